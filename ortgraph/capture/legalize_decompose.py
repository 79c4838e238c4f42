"""Operators without a gradient builder, rewritten into ones that have one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.capture.legalize_control import constant_value
from ortgraph.capture.legalize_layout import LAYOUT, optional, rank, refuse
from ortgraph.capture.legalize_losses import LOSSES
from ortgraph.capture.legalize_norms import NORMS
from ortgraph.capture.legalize_pools import POOLS, padded_positions
from ortgraph.capture.legalize_recurrent import unroll
from ortgraph.capture.legalize_saved import BY
from ortgraph.graph import Names, replace_value, static_shape
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder

# Builds what the node's outputs become, in order; None leaves the node as it is.
Decomposition = Callable[[Builder, ir.Node], "Sequence[ir.Value] | None"]


def decompose(path: list[ir.Node], names: Names) -> int:
    """Rewrite every operator of this table on the data path. Returns how many nodes were replaced.

    Raises:
        UnsupportedError: A form of an operator that has no decomposition; names the node and the reason.
    """
    count = 0
    for node in path:
        rule = RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if rule is None:
            continue
        assert isinstance(node.graph, ir.Graph)
        build = Builder(node.graph, BY, before=node, origins=[node], names=names)
        results = rule(build, node)
        if results is None:
            continue
        for old, new in zip(node.outputs, results, strict=False):
            if new is not old:
                replace_value(old, new)
        remove_node(node)
        count += 1
    return count


def _chain(op_type: str) -> Callable[[Builder, Sequence[ir.Value | None]], ir.Value]:
    def build_chain(b: Builder, values: Sequence[ir.Value | None]) -> ir.Value:
        total = values[0]
        assert total is not None
        if len(values) == 1:
            return b.op("Identity", total)
        for value in values[1:]:
            total = b.op(op_type, total, value)
        return total

    return build_chain


def _sum(b: Builder, node: ir.Node) -> list[ir.Value]:
    return [_chain("Add")(b, node.inputs)]


def _mean(b: Builder, node: ir.Node) -> list[ir.Value]:
    total = _chain("Add")(b, node.inputs)
    return [b.op("Mul", total, b.scalar(1.0 / len(node.inputs), total))]


def _extreme(b: Builder, node: ir.Node) -> list[ir.Value]:
    """Max and Min of two: PyTorch's derivative, half to each side where both are equal."""
    total = node.inputs[0]
    assert total is not None
    if len(node.inputs) == 1:
        return [b.op("Identity", total)]
    wins = "Greater" if node.op_type == "Max" else "Less"
    for value in node.inputs[1:]:
        assert value is not None
        half = b.op("Mul", b.op("Add", total, value), b.scalar(0.5, total))
        tied = chosen(b, b.op("Equal", total, value), half, value)
        total = chosen(b, b.op(wins, total, value), total, tied)
    return [total]


def _clip(b: Builder, node: ir.Node) -> list[ir.Value]:
    """The lower bound first, then the upper, which wins: the derivative is 1 at the bounds, as in PyTorch."""
    x, low, high = node.inputs[0], optional(node, 1), optional(node, 2)
    assert x is not None
    result = x
    if low is not None:
        result = chosen(b, b.op("Less", x, low), low, result)
    if high is not None:
        result = chosen(b, b.op("Greater", result, high), high, result)
    return [b.op("Identity", result) if result is x else result]


def _where(b: Builder, node: ir.Node) -> list[ir.Value]:
    """Broadcast operands are expanded first: the builder does not sum their gradients over the broadcast axes."""
    return [chosen(b, *node.inputs[:3])]


def chosen(b: Builder, condition: ir.Value | None, x: ir.Value | None, y: ir.Value | None) -> ir.Value:
    """Where(condition, X, Y) with X and Y expanded to the result's shape where they are narrower."""
    assert condition is not None and x is not None and y is not None
    plain = b.op("Where", condition, x, y)
    narrow = [v for v in (x, y) if not _is_constant(v) and not _same_shape(v, plain)]
    if not narrow:
        return plain
    static = static_shape(plain)
    shape = b.op("Shape", plain) if static is None else b.ints(static)
    wide = [b.op("Expand", v, shape) if v in narrow else v for v in (x, y)]
    result = b.op("Where", condition, *wide)
    result.type, result.shape = plain.type, plain.shape
    return result


def _same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether both have the same numbers and names of dimensions."""
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return False
    return all(x == y and (isinstance(x, int) or x.value is not None) for x, y in zip(a.shape, b.shape, strict=True))


def _is_constant(value: ir.Value) -> bool:
    """Whether it holds a constant that is no weight: rank 0 or made by a Constant node."""
    producer = value.producer()
    if producer is not None:
        return producer.op_type == "Constant"
    return value.is_initializer() and value.shape is not None and len(value.shape) == 0


def _slice(b: Builder, node: ir.Node) -> list[ir.Value] | None:
    """A negative step becomes a Gather of constant positions: the runtime's SliceGrad refuses it."""
    if len(node.inputs) < 5 or node.inputs[4] is None:
        return None
    known = [None if v is None else constant_value(v) for v in node.inputs[1:5]]
    starts, ends, axes, steps = known
    if steps is not None and (steps > 0).all():
        return None
    x = node.inputs[0]
    if x is None or x.shape is None or starts is None or ends is None or steps is None:
        raise refuse(node, "a step that is negative or computed needs constant bounds")
    places = range(len(starts)) if axes is None else [int(a) % len(x.shape) for a in axes]
    shape = x.shape
    for axis, start, end, step in zip(places, starts.tolist(), ends.tolist(), steps.tolist(), strict=True):
        length = shape[axis]
        if not isinstance(length, int):
            raise refuse(node, f"the length of axis {axis} is not known")
        stop = None if step < 0 and end < -length else end
        x = b.op("Gather", x, b.ints(list(range(length))[start:stop:step]), axis=axis)
    return [x]


def _prelu(b: Builder, node: ir.Node) -> list[ir.Value]:
    x, slope = node.inputs
    assert x is not None
    return [chosen(b, b.op("Greater", x, b.scalar(0.0, x)), x, b.op("Mul", slope, x))]


def _cast_like(b: Builder, node: ir.Node) -> list[ir.Value]:
    like = node.inputs[1]
    if like is None or like.dtype is None:
        raise refuse(node, "the type to cast to is not known")
    return [b.op("Cast", node.inputs[0], to=like.dtype)]


def _reduced_axes(node: ir.Node) -> tuple[list[int], int]:
    """Axes (all when none are given) and keepdims of a reduction of opset 18."""
    keep = node.attributes.get_int("keepdims", 1)
    given = optional(node, 1)
    count = rank(node)
    if given is None:
        return ([] if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(count))), keep
    axes = ir.convenience.get_const_tensor(given)
    known = axes.numpy() if axes is not None else constant_value(given)
    if known is None:
        raise refuse(node, "its axes are computed when the graph runs")
    if not known.size and not node.attributes.get_int("noop_with_empty_axes", 0):
        return list(range(count)), keep
    return sorted(int(a) % count for a in known.reshape(-1)), keep


def _reduce_extreme(b: Builder, node: ir.Node) -> list[ir.Value]:
    """The extreme value; its derivative is spread evenly over the elements that equal it (PyTorch's amax)."""
    x = node.inputs[0]
    axes, keep = _reduced_axes(node)
    assert x is not None
    if not axes:
        return [b.op("Identity", x)]
    where = b.ints(axes)
    extreme = b.op(node.op_type, x, where, keepdims=1)
    chosen = b.op("Equal", x, extreme)
    ties = b.op("ReduceSum", b.op("Cast", chosen, to=x.dtype), where, keepdims=keep)
    total = b.op("ReduceSum", b.op("Where", chosen, x, b.scalar(0.0, x)), where, keepdims=keep)
    return [b.op("Div", total, ties)]


def _matmul(b: Builder, node: ir.Node) -> list[ir.Value] | None:
    """A vector operand becomes a matrix of one row or column: the builder takes only matrices."""
    left, right = node.inputs
    vectors = [rank(node, 0) == 1, rank(node, 1) == 1]
    if not any(vectors):
        return None
    a = b.op("Unsqueeze", left, b.ints([0])) if vectors[0] else left
    c = b.op("Unsqueeze", right, b.ints([1])) if vectors[1] else right
    product = b.op("MatMul", a, c)
    return [b.op("Squeeze", product, b.ints([axis for axis, flag in ((-2, vectors[0]), (-1, vectors[1])) if flag]))]


def _reduce_log_sum_exp(b: Builder, node: ir.Node) -> list[ir.Value] | None:
    """All axes are written out: the builder does not know the form without axes."""
    if optional(node, 1) is not None:
        return None
    axes, keep = _reduced_axes(node)
    return [b.op("ReduceLogSumExp", node.inputs[0], b.ints(axes), keepdims=keep)]


def _reduce_prod(b: Builder, node: ir.Node) -> list[ir.Value]:
    """A chain of products along each axis, whose length must be known: right for zeros too."""
    x = node.inputs[0]
    axes, keep = _reduced_axes(node)
    assert x is not None and x.shape is not None
    for axis in axes:
        length = x.shape[axis]
        if not isinstance(length, int):
            raise refuse(node, f"the length of axis {axis} is not known")
        parts = [b.op("Slice", x, b.ints([i]), b.ints([i + 1]), b.ints([axis])) for i in range(length)]
        x = _chain("Mul")(b, parts)
    return [x if keep or not axes else b.op("Squeeze", x, b.ints(axes))]


def _reduce_of(inner: str, outer: str) -> Decomposition:
    def rule(b: Builder, node: ir.Node) -> list[ir.Value]:
        x = node.inputs[0]
        axes, keep = _reduced_axes(node)
        assert x is not None
        x = b.op("Mul", x, x) if inner == "square" else b.op("Abs", x) if inner == "abs" else x
        total = b.op("ReduceSum", x, b.ints(axes), keepdims=keep) if axes else b.op("Identity", x)
        return [b.op(outer, total) if outer else total]

    return rule


def _reduce_l2(b: Builder, node: ir.Node) -> list[ir.Value]:
    """sqrt(sum X^2) with derivative 0, not NaN, where the norm is 0 (as in PyTorch)."""
    x = node.inputs[0]
    axes, keep = _reduced_axes(node)
    assert x is not None
    squares = b.op("Mul", x, x)
    total = b.op("ReduceSum", squares, b.ints(axes), keepdims=keep) if axes else squares
    positive = b.op("Greater", total, b.scalar(0.0, x))
    root = b.op("Sqrt", b.op("Where", positive, total, b.scalar(1.0, x)))
    return [b.op("Where", positive, root, b.scalar(0.0, x))]


def _global_max_pool(b: Builder, node: ir.Node) -> list[ir.Value]:
    x = node.inputs[0]
    assert x is not None
    where = b.ints(list(range(2, rank(node))))
    chosen = b.op("Equal", x, b.op("ReduceMax", x, where, keepdims=1))
    ties = b.op("ReduceSum", b.op("Cast", chosen, to=x.dtype), where, keepdims=1)
    return [b.op("Div", b.op("ReduceSum", b.op("Where", chosen, x, b.scalar(0.0, x)), where, keepdims=1), ties)]


def _cumulative_sum(b: Builder, node: ir.Node) -> list[ir.Value]:
    """A product with a triangle of ones along the axis, whose length must be known."""
    x, axis_value = node.inputs
    assert x is not None and x.shape is not None and axis_value is not None
    tensor = ir.convenience.get_const_tensor(axis_value)
    if tensor is None:
        raise refuse(node, "its axis is computed when the graph runs")
    axis = int(tensor.numpy().reshape(())) % rank(node)
    length = x.shape[axis]
    if not isinstance(length, int):
        raise refuse(node, f"the length of axis {axis} is not known")
    triangle = np.triu(np.ones((length, length)), node.attributes.get_int("exclusive", 0))
    if node.attributes.get_int("reverse", 0):
        triangle = triangle.T
    assert x.dtype is not None
    matrix = b.const(triangle, x.dtype)
    last = rank(node) - 1
    order = list(range(last + 1))
    order[axis], order[last] = order[last], order[axis]
    moved = x if axis == last else b.op("Transpose", x, perm=order)
    summed = b.op("MatMul", moved, matrix)
    return [summed if axis == last else b.op("Transpose", summed, perm=order)]


def _pow(b: Builder, node: ir.Node) -> list[ir.Value] | None:
    """Square and square root in plain form, so that the derivative is right at zero and below."""
    x, exponent = node.inputs
    assert x is not None and exponent is not None
    tensor = ir.convenience.get_const_tensor(exponent) or exponent.const_value
    if tensor is None or tensor.size != 1 or math.prod(tensor.shape.numpy()) != 1 or len(tensor.shape) > rank(node):
        return _guarded_pow(b, x, exponent, None if tensor is None else tensor.numpy())
    power = float(tensor.numpy().reshape(()))
    if power == 2.0:
        return [b.op("Mul", x, x)]
    if power == 1.0:
        return [b.op("Identity", x)]
    if power == 3.0:
        return [b.op("Mul", b.op("Mul", x, x), x)]
    return [b.op("Sqrt", x)] if power == 0.5 else _guarded_pow(b, x, exponent, tensor.numpy())


def _guarded_pow(b: Builder, x: ir.Value, exponent: ir.Value, known: np.ndarray | None) -> list[ir.Value] | None:
    """X^0 = 1^0, with derivative 0 and not 0 X^-1, which is NaN where X is 0. None when no exponent is 0."""
    if known is not None and known.all():
        return None
    zero = b.op("Equal", exponent, b.scalar(0, exponent))
    return [b.op("Pow", chosen(b, zero, b.scalar(1.0, x), x), exponent)]


def _pad(b: Builder, node: ir.Node) -> list[ir.Value] | None:
    """Axes are written out: the builder takes pads for those of all axes. Other modes gather known positions."""
    axes_value, mode = optional(node, 3), node.attributes.get_string("mode", "constant")
    if axes_value is None and mode == "constant":
        return None
    count, pads = rank(node), constant_value(node.inputs[1])  # type: ignore[arg-type]
    axes = np.arange(count) if axes_value is None else constant_value(axes_value)
    if axes is None or pads is None:
        raise refuse(node, f"pads and axes must be constants where axes are given or the mode is {mode}")
    full = [0] * (2 * count)
    for i, axis in enumerate(int(a) % count for a in axes):
        full[axis], full[count + axis] = int(pads[i]), int(pads[len(axes) + i])
    if mode == "constant":
        return [b.op("Pad", node.inputs[0], b.ints(full), optional(node, 2), mode=mode)]
    x = node.inputs[0]
    assert x is not None and x.shape is not None
    for axis, (length, before, after) in enumerate(zip(x.shape, full[:count], full[count:], strict=True)):
        if before == after == 0:
            continue
        if not isinstance(length, int):
            raise refuse(node, f"the length of axis {axis} is not known")
        x = b.op("Gather", x, b.ints(padded_positions(length, before, after, mode)), axis=axis)
    return [b.op("Identity", x) if x is node.inputs[0] else x]


RULES: dict[str, Decomposition] = {
    "CastLike": _cast_like,
    "Clip": _clip,
    "CumSum": _cumulative_sum,
    "GRU": unroll,
    "GlobalMaxPool": _global_max_pool,
    "LSTM": unroll,
    "MatMul": _matmul,
    "Max": _extreme,
    "Mean": _mean,
    "Min": _extreme,
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": _pow,
    "RNN": unroll,
    "ReduceL1": _reduce_of("abs", ""),
    "ReduceL2": _reduce_l2,
    "ReduceLogSum": _reduce_of("", "Log"),
    "ReduceLogSumExp": _reduce_log_sum_exp,
    "ReduceMax": _reduce_extreme,
    "ReduceMin": _reduce_extreme,
    "ReduceProd": _reduce_prod,
    "ReduceSumSquare": _reduce_of("square", ""),
    "Slice": _slice,
    "Sum": _sum,
    "Where": _where,
    **LAYOUT,
    **LOSSES,
    **NORMS,
    **POOLS,
}
