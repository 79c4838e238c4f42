"""EliminateIdentity: drop nodes whose output is their input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.ops.spec import COMPOSITE, CONTRIB
from ortgraph.passes.canonical.values import BEFORE_PLAN, Edit, constant_array, constant_ints, dims, same_shape


@dataclasses.dataclass(frozen=True)
class EliminateIdentity(GraphPass):
    """y = x: let the readers of y read x.

    Cases: Identity; Cast to the same dtype; Reshape, Flatten, Squeeze, Unsqueeze, Expand, Tile to the same shape;
    Transpose that keeps the order; Slice of everything; Pad by nothing; Concat, Sum, Max, Min, Mean of one input;
    x * 1, x / 1, x ** 1, x + 0, x - 0 with a genuine constant; ReduceSum over no axis; Dropout in inference mode or
    with ratio 0. ``x + 0`` loses the sign of a negative zero. Counted by operator.

    Refuses when:
        - shape or dtype would change (a constant that broadcasts x, an unknown shape);
        - the constant is a parameter or any other graph input, whatever its value;
        - the mask of the Dropout is read;
        - the output is a graph output and x is a graph input, a constant or another graph output.
    """

    name: ClassVar[str] = "eliminate-identity"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN

    def run(self, graph: TrainingGraph) -> Changes:
        edit = Edit(graph.graph)
        version = graph.graph.opset_imports.get("", 18)
        changes = Changes()
        gone: list[ir.Node] = []
        for node in graph.graph:
            source = _source(node, version)
            if source is None:
                continue
            if any(edit.is_read(o) for o in node.outputs[1:]):
                changes.refusals.append(Refusal(node.name or "", f"%{node.outputs[1].name} of {node.op_type} is read"))
                continue
            if not edit.is_read(node.outputs[0]):
                continue
            if not edit.redirect(node.outputs[0], source):
                reason = f"graph output %{node.outputs[0].name} equals %{source.name}, which keeps its own name"
                changes.refusals.append(Refusal(node.name or "", reason))
                continue
            changes.counts[node.op_type] += 1
            gone.append(node)
        edit.remove(gone)
        return changes


def _source(node: ir.Node, version: int) -> ir.Value | None:
    """The input that equals the first output, or None."""
    if node.domain == COMPOSITE:
        ratio_zero = node.op_type == "Dropout" and node.attributes.get_float("ratio", 0.5) == 0
        return node.inputs[0] if ratio_zero else None
    if node.domain == CONTRIB and node.op_type == "ReduceSumTraining" and node.inputs:
        return node.inputs[0] if _reduce_nothing(node, version) else None
    if node.domain not in ("", "ai.onnx") or not node.inputs or not node.outputs:
        return None
    if node.op_type in _NEUTRAL:
        return _without_neutral(node)
    rule = _RULES.get(node.op_type)
    x = node.inputs[0]
    return x if rule is not None and x is not None and rule(node, x, version) else None


def _input(node: ir.Node, i: int) -> ir.Value | None:
    return node.inputs[i] if i < len(node.inputs) else None


def _identity(node: ir.Node, x: ir.Value, version: int) -> bool:
    return True


def _same_dtype(node: ir.Node, x: ir.Value, version: int) -> bool:
    to = node.attributes.get_int("to", 0)
    return x.dtype is not None and x.dtype == to


def _same_bytes(node: ir.Node, x: ir.Value, version: int) -> bool:
    return same_shape(x, node.outputs[0])


def _reshape(node: ir.Node, x: ir.Value, version: int) -> bool:
    if same_shape(x, node.outputs[0]):
        return True
    target = constant_ints(_input(node, 1))
    if (
        target is None
        or x.shape is None
        or len(target) != x.shape.rank()
        or node.attributes.get_int("allowzero", 0) != 0
    ):
        return False
    # 0 copies a dimension, so one -1 beside kept dimensions can only be the dimension that is left.
    kept = all(t in (0, -1) or t == d for t, d in zip(target, x.shape, strict=True))
    return kept and target.count(-1) <= 1


def _transpose(node: ir.Node, x: ir.Value, version: int) -> bool:
    perm = node.attributes.get_ints("perm", None)
    if perm is not None:
        return tuple(perm) == tuple(range(len(perm)))
    return x.shape is not None and x.shape.rank() <= 1


def _expand(node: ir.Node, x: ir.Value, version: int) -> bool:
    if same_shape(x, node.outputs[0]):
        return True
    target = constant_ints(_input(node, 1))
    return target is not None and x.shape is not None and len(target) <= x.shape.rank() and set(target) <= {1}


def _slice(node: ir.Node, x: ir.Value, version: int) -> bool:
    if not same_shape(x, node.outputs[0]):
        return False
    steps = _input(node, 4)  # a step of -1 reverses and keeps the shape
    return steps is None or set(constant_ints(steps) or (0,)) == {1}


def _pad(node: ir.Node, x: ir.Value, version: int) -> bool:
    pads = node.attributes.get_ints("pads", None) if version < 11 else constant_ints(_input(node, 1))
    return pads is not None and not any(pads)


def _one_input(node: ir.Node, x: ir.Value, version: int) -> bool:
    return len(node.inputs) == 1


def _reduce_sum(node: ir.Node, x: ir.Value, version: int) -> bool:
    return version >= 13 and _reduce_nothing(node, version)


def _reduce_nothing(node: ir.Node, version: int) -> bool:
    axes = _input(node, 1)
    no_axes = axes is None or constant_ints(axes) == ()
    return no_axes and node.attributes.get_int("noop_with_empty_axes", 0) == 1


def _dropout(node: ir.Node, x: ir.Value, version: int) -> bool:
    if version < 7:
        return node.attributes.get_int("is_test", 0) == 1
    if version < 12:  # these versions work in inference mode only
        return True
    training = _input(node, 2)
    if training is None:
        return True
    training_value, ratio = constant_array(training), constant_array(_input(node, 1))
    off = training_value is not None and not training_value.any()
    return off or (ratio is not None and ratio.size == 1 and not ratio.any())


_Rule = Callable[[ir.Node, ir.Value, int], bool]
_RULES: dict[str, _Rule] = {
    "Identity": _identity, "Cast": _same_dtype, "Reshape": _reshape, "Flatten": _same_bytes, "Squeeze": _same_bytes,
    "Unsqueeze": _same_bytes, "Tile": _same_bytes, "Expand": _expand, "Transpose": _transpose, "Slice": _slice,
    "Pad": _pad, "Concat": _one_input, "Sum": _one_input, "Max": _one_input, "Min": _one_input, "Mean": _one_input,
    "ReduceSum": _reduce_sum, "Dropout": _dropout,
}  # fmt: skip

# Operator -> (neutral element, input positions at which it is neutral).
_NEUTRAL: dict[str, tuple[int, tuple[int, ...]]] = {
    "Mul": (1, (1, 0)), "Div": (1, (1,)), "Pow": (1, (1,)), "Add": (0, (1, 0)), "Sub": (0, (1,)),
}  # fmt: skip


def _without_neutral(node: ir.Node) -> ir.Value | None:
    element, positions = _NEUTRAL[node.op_type]
    for i in positions:
        x, constant = node.inputs[1 - i], node.inputs[i]
        if x is None or constant is None or x is constant:
            continue
        array = constant_array(constant)
        if array is not None and _keeps_shape(x, array, node.outputs[0]) and bool(np.all(array == element)):
            return x
    return None


def _keeps_shape(x: ir.Value, array: np.ndarray, output: ir.Value) -> bool:
    if array.size == 1 and x.shape is not None and array.ndim <= x.shape.rank():
        return True
    shape = dims(x)
    return array.ndim == 0 or (array.size > 0 and shape is not None and shape == dims(output))
