"""One training step of a module: traced, then assembled into a training graph."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ortgraph.capture.torch_assembly import Assembly, Tensors
from ortgraph.capture.torch_batch import Batch, read_batch, read_dynamic
from ortgraph.capture.torch_decompositions import decompositions
from ortgraph.capture.torch_joint import trace_joint
from ortgraph.capture.torch_module import Results, TracedStep, is_criterion
from ortgraph.capture.torch_storage import refuse_shared_memory
from ortgraph.errors import CaptureError, InputError
from ortgraph.graph.training_graph import TrainingGraph


def capture_step(
    module: torch.nn.Module,
    example_batch: Any,
    dynamic: Mapping[str, Any] | None,
    loss: Any,
    *,
    opset: int,
    tangents: tuple[str, ...],
    input_gradients: tuple[str, ...],
) -> TrainingGraph:
    """See ``ortgraph.capture``."""
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"capture takes a torch.nn.Module, not {type(module).__name__}", "give the module itself")
    if isinstance(loss, type):
        raise InputError(f"loss is the class {loss.__name__}", f"give an instance: {loss.__name__}()")
    criterion = is_criterion(loss)
    batch = read_batch(module, example_batch, criterion, has_loss=callable(loss))
    axes = read_dynamic(batch, dynamic)
    results = Results()
    step = TracedStep(module, batch, loss, tangents, results, traced=True)
    parameters = Tensors.of(step.named_parameters(remove_duplicate=False))
    buffers = Tensors.of(step.named_buffers(remove_duplicate=False))
    if not any(p.requires_grad for p in parameters.values.values()):
        raise CaptureError(
            f"{type(module).__name__} has no trainable parameter", "set requires_grad on the parameters to be trained"
        )
    refuse_shared_memory(parameters.values, buffers.values)
    _warn_in_evaluation_mode(module)
    trace = trace_joint(
        step, _arguments(batch, input_gradients), tuple(set(a) for a in axes), decompositions(), batch.names
    )
    return Assembly(trace, batch, axes, results, parameters, buffers, opset).build(tangents)


class EvaluationModeWarning(UserWarning):
    """A module in evaluation mode is captured for training."""


def _warn_in_evaluation_mode(module: torch.nn.Module) -> None:
    """Say so when the whole module is in evaluation mode and that changes what is trained."""
    if any(m.training for m in module.modules()):
        return
    kinds = sorted({type(m).__name__ for m in module.modules() if _depends_on_mode(m)})
    if kinds:
        warnings.warn(
            f"{type(module).__name__} is in evaluation mode, and so is its {', '.join(kinds)}: "
            "call module.train() before capture, unless that is meant",
            EvaluationModeWarning,
            stacklevel=4,
        )


def _depends_on_mode(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def _arguments(batch: Batch, input_gradients: Sequence[str]) -> tuple[torch.Tensor, ...]:
    unknown = [n for n in input_gradients if n not in batch.names]
    if unknown:
        raise InputError(f"input_gradients names {unknown}; the inputs are {list(batch.names)}", "name one of these")
    arguments = []
    for name, tensor in zip(batch.names, batch.tensors, strict=True):
        wanted = name in input_gradients
        if wanted and not tensor.is_floating_point():
            raise InputError(
                f"input {name!r} is {tensor.dtype} and has no gradient", "ask for floating point inputs only"
            )
        arguments.append(tensor.detach().requires_grad_(wanted))
    return tuple(arguments)
