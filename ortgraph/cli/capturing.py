"""From ``file.py:build`` to a graph, to feeds, and to PyTorch's own gradients for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ortgraph.capture.build_spec import BuildSpec, load_build
from ortgraph.cli.output import Output
from ortgraph.errors import CaptureError, InputError, UnsupportedError
from ortgraph.graph import TrainingGraph

_RANDOM = ("random_key", "random_step")


def capture_build(
    out: Output, target: str, dynamic: Mapping[str, Any] | None = None, opset: int | None = None
) -> tuple[BuildSpec, TrainingGraph]:
    """Run the build function and capture what it returned. ``dynamic`` replaces the function's own.

    Raises:
        RuntimeSetupError: PyTorch is missing or outside the tested range.
        InputError, CaptureError: See ``load_build`` and ``ortgraph.capture``.
    """
    from ortgraph.runtime.detect import check_torch, torch_version

    check_torch(torch_version())  # before the user's file imports it
    with out.progress(f"capturing {target}"):
        spec = load_build(target)
        import ortgraph

        options: dict[str, Any] = {} if opset is None else {"opset": opset}
        graph = ortgraph.capture(spec.module, spec.batch, dynamic=dynamic or spec.dynamic, loss=spec.loss, **options)
    return spec, graph


def all_obstacles(target: str, error: CaptureError) -> list[tuple[str, str]]:
    """What and hint of everything that keeps a model from being captured, where a trace stops at the first.

    Args:
        target: As for ``capture_build``.
        error: What capture raised.
    """
    from ortgraph.capture.torch_obstacles import find_obstacles

    if isinstance(error, UnsupportedError):
        return list(error.obstacles)
    spec = load_build(target)
    found = [(error.what, error.hint)]
    for what, hint in find_obstacles(spec.module, spec.batch, spec.loss):
        place = what.rpartition(", ")[2].rstrip(")")
        if ":" not in place or f"{place}:" not in error.what:  # the trace's own sentence about this place says more
            found.append((what, hint))
    return found


def feeds(spec: BuildSpec, batch: Any) -> dict[str, np.ndarray]:
    """A user's batch, nested or not, as arrays by the names of the graph's inputs."""
    read = _read(spec, batch)
    return {name: tensor.detach().cpu().numpy() for name, tensor in zip(read.names, read.tensors, strict=True)}


def _read(spec: BuildSpec, batch: Any) -> Any:
    from ortgraph.capture.torch_batch import read_batch
    from ortgraph.capture.torch_module import is_criterion

    return read_batch(spec.module, batch, is_criterion(spec.loss), has_loss=callable(spec.loss))


def torch_gradients(spec: BuildSpec) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the example batch in PyTorch, by parameter name (one name of tied ones)."""
    from ortgraph.capture.torch_module import Results, TracedStep

    read = _read(spec, spec.batch)
    step = TracedStep(spec.module, read, spec.loss, (), Results())
    spec.module.zero_grad(set_to_none=True)
    loss = step(*read.tensors)[0]
    loss.backward()
    found = {n: p.grad.detach().cpu().numpy() for n, p in spec.module.named_parameters() if p.grad is not None}
    spec.module.zero_grad(set_to_none=True)
    return float(loss.detach()), found


def gradients_against_torch(spec: BuildSpec, graph: TrainingGraph) -> dict[str, float]:
    """Norm-wise relative difference of every gradient to PyTorch's, on the example batch.

    Raises:
        InputError: The graph draws random numbers: PyTorch draws others, so that nothing can be compared.
    """
    from ortgraph.manager.numerics import relative_errors
    from ortgraph.runtime.session import TrainingSession

    if any(s.kind in _RANDOM for s in graph.signature.states):
        raise InputError("the model draws random numbers (dropout): its gradients cannot be compared", "module.eval()")
    _, want = torch_gradients(spec)
    return relative_errors(TrainingSession(graph).gradients(feeds(spec, spec.batch)), want)
