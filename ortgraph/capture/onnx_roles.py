"""Which initializers of a forward model are weights, which are buffers, and which stay constants."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import logging
import warnings
from collections.abc import Collection, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ortgraph.errors import InputError

logger = logging.getLogger(__name__)

# Inputs along which no gradient flows: shapes, axes, bounds, statistics. None stands for "every input from here on".
NO_GRADIENT_INPUTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Dropout": (1, 2),
    "Expand": (1,),
    "Gather": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "OneHot": (0, 1, 2),
    "Pad": (1, 2, 3),
    "Pow": (1,),
    "Range": (0, 1, 2),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "ScatterElements": (1,),
    "ScatterND": (1,),
    "Slice": (1, 2, 3, 4),
    "SoftmaxCrossEntropyLoss": (1, 2),
    "NegativeLogLikelihoodLoss": (1, 2),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Where": (0,),
}

MASKED = 1e9  # a mask's "minus infinity" is at least this large; no weight is
_VECTORS: dict[str, tuple[int, ...]] = {  # inputs that hold a scale or a bias
    "BatchNormalization": (1, 2),
    "Conv": (2,),
    "ConvTranspose": (2,),
    "Gemm": (2,),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
}
_STARTS: dict[str, tuple[int, ...]] = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}  # inputs that hold initial states
_SCALING = ("Div", "Max", "Min", "Mul", "Pow", "Sub")
_MASKING = ("Add", "Cast", "Expand", "Gather", "Max", "Min", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where")


@dataclasses.dataclass(frozen=True)
class Roles:
    """Roles of the float initializers of a forward graph, by original name, in graph order.

    Attributes:
        trainable: Weights to differentiate by.
        frozen: Weights that stay as they are.
        buffers: Running statistics of BatchNormalization.
    """

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]


def assign_roles(graph: ir.Graph, trainable: Sequence[str] | None, candidates: Collection[str]) -> Roles:
    """Split the float initializers into weights and buffers.

    A weight is a float initializer that some node reads along a differentiable input. Numbers, masks and initial
    states are weights only when named: exporters keep constants such as the 2 of a square, the scale of attention
    scores, a causal mask or the zeros that a recurrent layer starts from there. Everything else (integers, shapes,
    bounds, scales) stays a constant of the graph.

    Args:
        graph: The forward graph, functions inlined.
        trainable: Names or fnmatch patterns; None trains every weight.
        candidates: Names of the model's own initializers; others are constants that legalising made.

    Raises:
        InputError: A name or pattern fits no weight.
    """
    buffers = _statistics(graph)
    weights: list[str] = []
    fixed: list[str] = []
    for name, value in graph.initializers.items():
        if (
            value.dtype is None
            or not value.dtype.is_floating_point()
            or name in buffers
            or not _is_weight(value)
            or name not in candidates
        ):
            continue
        (fixed if _is_number(value) or _is_mask(value) or _is_start(value) else weights).append(name)
    if trainable is None:
        _warn_of_merged(graph, weights)
        return Roles(tuple(weights), (), tuple(buffers))
    chosen = _choose(graph, trainable, weights, fixed, buffers)
    _warn_of_merged(graph, chosen)
    order = [n for n in graph.initializers if n in chosen]
    return Roles(tuple(order), tuple(n for n in weights if n not in chosen), tuple(buffers))


def _statistics(graph: ir.Graph) -> dict[str, None]:
    found: dict[str, None] = {}
    for node in graph:
        if node.op_type in ("BatchNormalization", "BatchNormInternal"):
            for value in node.inputs[3:5]:
                if value is not None and value.is_initializer():
                    found[value.name or ""] = None
    return found


def _is_weight(value: ir.Value) -> bool:
    return any(use.idx not in NO_GRADIENT_INPUTS.get(use.node.op_type, ()) for use in value.uses())


def _is_number(value: ir.Value) -> bool:
    """A scalar, or one element that only scales or shifts a tensor as exporters fold it (a bias is read by Add)."""
    if value.shape is None or not len(value.shape):
        return True
    return all(d == 1 for d in value.shape) and all(use.node.op_type in _SCALING for use in value.uses())


def _is_mask(value: ir.Value) -> bool:
    """A tensor that is added or selected, sliced or reshaped before, and holds a mask's "minus infinity"."""
    if value.const_value is None or not all(use.node.op_type in _MASKING for use in value.uses()):
        return False
    numbers = value.const_value.numpy()
    return bool((np.abs(numbers) >= min(MASKED, float(ml_dtypes.finfo(numbers.dtype).max))).any())


def _is_start(value: ir.Value) -> bool:
    """An initial state of recurrent layers, read by nothing else: exporters write the zeros of a batch there."""
    return all(use.idx in _STARTS.get(use.node.op_type, ()) for use in value.uses())


def _warn_of_merged(graph: ir.Graph, trained: Collection[str]) -> None:
    """Exporters store equal tensors once: norms and biases that all start as ones or zeros are then one parameter."""
    merged = [
        name
        for name, value in graph.initializers.items()
        if name in trained
        and value.shape is not None
        and len(value.shape) == 1
        and len({u.node for u in value.uses() if u.idx in _VECTORS.get(u.node.op_type, ())}) > 1
    ]
    if merged:
        more = f" and {len(merged) - 3} more" if len(merged) > 3 else ""
        warnings.warn(
            f"{', '.join(merged[:3])}{more}: each is read as the scale or bias of several layers, which train it as "
            "one; if the exporter merged equal tensors, export again: torch.onnx.export(..., optimize=False)",
            stacklevel=4,
        )


def _choose(
    graph: ir.Graph, wanted: Sequence[str], weights: list[str], fixed: list[str], buffers: dict[str, None]
) -> set[str]:
    if isinstance(wanted, str):
        raise InputError(f"trainable={wanted!r} is a string", f"give a list: trainable=[{wanted!r}]")
    chosen: set[str] = set()
    named = {*weights, *fixed}
    for pattern in wanted:
        hits = [pattern] if pattern in named else fnmatch.filter(weights, pattern)
        chosen.update(hits)
        if not hits:
            _explain_miss(graph, pattern, weights, fixed, buffers)
    return chosen


def _explain_miss(
    graph: ir.Graph, pattern: str, weights: list[str], fixed: list[str], buffers: dict[str, None]
) -> None:
    """Say why an existing initializer is not trained; refuse a name that does not exist."""
    found = [pattern] if pattern in graph.initializers else fnmatch.filter(graph.initializers, pattern)
    if not found:
        close = difflib.get_close_matches(pattern, list(graph.initializers), n=3, cutoff=0.4)
        some = ", ".join(weights[:8]) + ", ..." * (len(weights) > 8)
        raise InputError(
            f"trainable: {pattern!r} names no weight of the model",
            f"close: {', '.join(close)}" if close else f"the weights are {some or 'none'}",
        )
    for name in found:
        dtype = graph.initializers[name].dtype
        if name in buffers:
            logger.info("%s is a running statistic: the step updates it, the optimizer does not", name)
        elif dtype is not None and not dtype.is_floating_point():
            logger.info("%s holds %s values and stays frozen", name, dtype.short_name())
        elif name in fixed:
            warnings.warn(
                f"{name} is a number, a mask or an initial state: it is trained only under its full name", stacklevel=5
            )
        else:
            warnings.warn(f"{name} is read by nothing that a gradient flows through: it is not trained", stacklevel=5)
