"""``ortgraph.capture``: from a PyTorch module to a training graph."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ortgraph.errors import InputError, RuntimeSetupError, UnsupportedError
from ortgraph.graph.training_graph import TrainingGraph

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
TORCH = ((2, 13), (2, 14))  # tested from, and the first release that is not
OPSETS = range(18, 22)
After = Callable[[TrainingGraph], Any]


def capture(
    module: torch.nn.Module,
    example_batch: Any,
    dynamic: Mapping[str, Any] | None = None,
    loss: Any = None,
    *,
    opset: int = 18,
    tangents: Sequence[str] = (),
    input_gradients: Sequence[str] = (),
    after: Sequence[Any] = (),
    allow_untested_torch: bool = False,
) -> TrainingGraph:
    """Capture one training step of a module: forward, loss and backward as one graph.

    The module is traced once with the example batch's shapes and is not changed; its training flags are respected
    (dropout and batch statistics only where ``module.training`` is set).

    Args:
        module: A module with at least one trainable parameter.
        example_batch: A dict (keyword arguments), a tuple or list (positional arguments) or one tensor. Input names
            are the keys, or ``forward``'s parameter names. Numbers, strings and None are fixed at their values.
        dynamic: Symbolic dimensions by input, ``{"x": {0: "batch", 1: "sequence"}}``. Equal names are equal sizes,
            which the caller vouches for; the example needs sizes of at least 2 there.
        loss: Where the scalar loss comes from.

            * None: the module returns it, as a tensor, in a field ``loss``, or as the first scalar float of a tuple;
            * a name or an index: one of the module's outputs;
            * a ``torch.nn`` loss module, or a callable whose second parameter is called target(s) or label(s): called
              as ``loss(output, target)`` with the module's first output. The target is the last item of a tuple
              batch, or the item of a dict called target(s) or label(s); the module does not get it. Its input name
              is ``target``, or its key;
            * any other callable: ``loss(outputs)`` or ``loss(outputs, batch)``, as many as it takes. Batch items that
              ``forward`` does not take are then kept for the loss only.
        opset: ONNX opset, 18 to 21.
        tangents: Outputs besides the loss to differentiate too: each gets a tangent input.
        input_gradients: Inputs whose gradient becomes an output.
        after: Functions or passes applied to the graph right after capture, in order.
        allow_untested_torch: Go on with a PyTorch release outside the tested range.

    Returns:
        A graph at stage ``captured``: see ``Signature`` for its inputs and outputs. Model outputs keep their field
        names (``output`` or ``output_<position>`` where there are none); gradients are ``gradient/<parameter>``.

    Raises:
        CaptureError: The module cannot be traced, has no trainable parameter, or its loss is no scalar.
        UnsupportedError: An operator has no translation; the message names it with module and source line.
        InputError: An argument does not fit.
        RuntimeSetupError: PyTorch is missing or untested.
    """
    check_torch(allow_untested_torch)
    if opset not in OPSETS:
        raise UnsupportedError(f"opset {opset} is not supported", f"choose from {OPSETS.start} to {OPSETS.stop - 1}")
    from ortgraph.capture.torch_step import capture_step

    graph = capture_step(
        module,
        example_batch,
        dynamic,
        loss,
        opset=opset,
        tangents=tuple(tangents),
        input_gradients=tuple(input_gradients),
    )
    for hook in after:
        graph = apply_hook(hook, graph)
    return graph


def apply_hook(hook: Any, graph: TrainingGraph) -> TrainingGraph:
    """Run a function of the graph or an ``onnx_ir`` pass; a function may return a new graph or change the given one."""
    import onnx_ir as ir

    if isinstance(hook, ir.passes.PassBase):
        result = hook(graph.model)
        return TrainingGraph(result.model, values=graph.values)
    if not callable(hook):
        raise InputError(f"after= holds {hook!r}", "give functions of the training graph, or passes")
    returned = hook(graph)
    return returned if isinstance(returned, TrainingGraph) else graph


def check_torch(allow_untested: bool) -> None:
    low, high = (".".join(map(str, v)) for v in TORCH)
    hint = f"pip install 'torch>={low},<{high}' --index-url https://download.pytorch.org/whl/cpu"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeSetupError("capture needs PyTorch, which is not installed", hint) from error
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if TORCH[0] <= numbers < TORCH[1]:
        return
    if not allow_untested:
        raise RuntimeSetupError(
            f"PyTorch {version} is outside the tested range {low} to {high} (exclusive)",
            f"{hint}, or capture(..., allow_untested_torch=True) and compare gradients",
        )
    logger.warning("PyTorch %s is outside the tested range %s to %s: compare gradients", version, low, high)
