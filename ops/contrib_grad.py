"""Expansions of com.microsoft training operators: what stock ONNX Runtime runs instead of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.errors import UnsupportedError
from ortgraph.graph.edit import static_shape
from ortgraph.ops import activation, convolution, loss, normalization
from ortgraph.ops.builder import Builder
from ortgraph.ops.random import scale_kept
from ortgraph.ops.shapes import (
    attribute,
    bound_shape,
    decimal,
    given,
    indicator,
    ints_of,
    normalized_axis,
    operand,
    operands,
    operator,
    rank_of,
    wanted,
    zeros,
)
from ortgraph.ops.spec import Expansion

Values = list["ir.Value | None"]


def pair(function: Callable[[Builder, ir.Value, ir.Value], ir.Value]) -> Expansion:
    """An operator whose inputs are the gradient and one forward value."""
    return lambda b, node: [function(b, operand(node, 0), operand(node, 1))]


def over_axis(function: Callable[[Builder, ir.Value, ir.Value, int], ir.Value]) -> Expansion:
    return lambda b, node: [function(b, operand(node, 0), operand(node, 1), attribute(node, "axis", -1))]


def over_flat_axes(function: Callable[[Builder, ir.Value, ir.Value, int], ir.Value]) -> Expansion:
    """The forms before opset 13: the softmax runs over all dimensions from ``axis`` on."""

    def expand(b: Builder, node: ir.Node) -> Values:
        dy, y = operands(node, 2)
        rank = rank_of(node, y, "Y")
        axis = normalized_axis(attribute(node, "axis", 1), rank)
        if axis == rank - 1:
            return [function(b, dy, y, -1)]
        shape = bound_shape(node, y, "Y")
        flat = b.ints([*shape[:axis], -1])
        return [b.op("Reshape", function(b, b.op("Reshape", dy, flat), b.op("Reshape", y, flat), -1), b.ints(shape))]

    return expand


def gelu_grad(tanh: bool, bias: bool = False) -> Expansion:
    def expand(b: Builder, node: ir.Node) -> Values:
        dy, x = operands(node, 2)
        x = b.op("Add", x, node.inputs[2]) if bias else x
        return [activation.gelu_grad(b, dy, x, tanh)]

    return expand


def quick_gelu_grad(b: Builder, node: ir.Node) -> Values:
    dy, x = operands(node, 2)
    alpha = decimal(node, "alpha", 1.702)
    z = b.op("Mul", x, b.scalar(alpha, x))
    s, one = b.op("Sigmoid", z), b.scalar(1.0, x)
    rest = b.op("Add", b.op("Mul", z, b.op("Sub", one, s)), one)
    return [b.op("Mul", dy, b.op("Mul", s, rest))]


def leaky_relu_grad(b: Builder, node: ir.Node) -> Values:
    dy, y = operands(node, 2)
    alpha = decimal(node, "alpha", 0.01)
    positive = indicator(b, b.op("Greater", y, b.scalar(0.0, y)), dy.dtype)
    slope = b.op("Add", b.op("Mul", positive, b.scalar(1.0 - alpha, dy)), b.scalar(alpha, dy))
    return [b.op("Mul", dy, slope)]


def layer_norm_grad(b: Builder, node: ir.Node) -> Values:
    dy, x = operands(node, 2)
    scale, mean, inv_std = given(node, 2), given(node, 3), operand(node, 4)
    return normalization.layer_norm_grad(b, node, dy, x, mean, inv_std, scale, attribute(node, "axis", -1))


def rms_norm_grad(b: Builder, node: ir.Node) -> Values:
    dy, x, scale, inv_std = operands(node, 4)
    return normalization.layer_norm_grad(b, node, dy, x, None, inv_std, scale, attribute(node, "axis", -1))


def _known_shape(node: ir.Node, source: ir.Value | None, output: int = 0) -> tuple[int, ...]:
    """The result's shape: from a constant shape input, from Shape of a static value, or as recorded."""
    dims = shape_elements(source)
    if dims is not None:
        return tuple(dims)
    return bound_shape(node, node.outputs[output], "its result")


def shape_elements(value: ir.Value | None) -> list[int] | None:
    """The elements of a shape tensor that is constant or the Shape of a value with a static shape."""
    dims = ints_of(value)
    producer = None if value is None else value.producer()
    if dims is not None or producer is None or producer.op_type != "Shape" or producer.attributes:
        return dims
    shape = static_shape(producer.inputs[0]) if producer.inputs[0] is not None else None
    return None if shape is None else list(shape)


def gather_grad(b: Builder, node: ir.Node) -> Values:
    """Rows of dY added at their index: sequential ScatterElements, right at any thread count."""
    source, indices, dy = operands(node, 3)
    shape = _known_shape(node, source)
    axis = normalized_axis(attribute(node, "axis", 0), len(shape))
    outer, inner = shape[:axis], shape[axis + 1 :]
    rows = b.op("Reshape", dy, b.ints([*outer, -1, *inner]))
    index = b.op("Reshape", indices, b.ints([*[1] * len(outer), -1, *[1] * len(inner)]))
    spread = b.op("Expand", index, b.ints([*outer, 1, *inner]))
    start = zeros(b, shape, dy.dtype)
    return [b.op("ScatterElements", start, spread, rows, axis=axis, reduction="add")]


def gather_elements_grad(b: Builder, node: ir.Node) -> Values:
    dy, source, indices = operands(node, 3)
    start = zeros(b, _known_shape(node, source), dy.dtype)
    return [b.op("ScatterElements", start, indices, dy, axis=attribute(node, "axis", 0), reduction="add")]


def reduce_sum_training(b: Builder, node: ir.Node) -> Values:
    data, axes = node.inputs[:2]
    keep, empty = attribute(node, "keepdims", 1), attribute(node, "noop_with_empty_axes", 0)
    return [b.op("ReduceSum", data, axes, keepdims=keep, noop_with_empty_axes=empty)]


def concat_training(b: Builder, node: ir.Node) -> Values:
    axis = attribute(node, "axis", 0)
    lengths = None
    if wanted(node, 1):
        lengths = b.ints([bound_shape(node, v, "an input")[axis] for v in node.inputs])
    return [b.op("Concat", *node.inputs, axis=axis), lengths]


def split_training(b: Builder, node: ir.Node) -> Values:
    made = b.multi("Split", *node.inputs[:2], outputs=len(node.outputs), axis=attribute(node, "axis", 0))
    return list(made)


def _ignored(node: ir.Node, index: int) -> int | None:
    value = given(node, index)
    if value is None:
        return attribute(node, "ignore_index")
    found = ints_of(value)
    if found is None:
        raise UnsupportedError(
            f"{operator(node)} {node.name!r}: ignore_index is not a constant", "fold constants first"
        )
    return found[0]


def cross_entropy(b: Builder, node: ir.Node) -> Values:
    scores, labels = operands(node, 2)
    log_prob = b.op("LogSoftmax", scores, axis=1)
    if not wanted(node, 0):
        return [None, log_prob]
    reduction = attribute(node, "reduction", "mean")
    value, _ = loss.nll_loss(b, log_prob, labels, given(node, 2), reduction, _ignored(node, 3))
    return [value, log_prob]


def nll_loss(b: Builder, node: ir.Node) -> Values:
    scores, labels = operands(node, 2)
    reduction = attribute(node, "reduction", "mean")
    return [loss.nll_loss(b, scores, labels, given(node, 2), reduction, _ignored(node, 3))[0]]


def cross_entropy_grad(b: Builder, node: ir.Node) -> Values:
    dy, log_prob, labels = operands(node, 3)
    weight, ignore, reduction = given(node, 3), _ignored(node, 4), attribute(node, "reduction", "mean")
    total = None
    if reduction == "mean":
        total = b.op("ReduceSum", loss.kept_rows(b, labels, weight, ignore, log_prob)[2], keepdims=0)
    result = loss.cross_entropy_grad(b, dy, log_prob, labels, weight, total, reduction, ignore)
    bias = given(node, 5)
    return [result if bias is None else b.op("Add", result, bias)]


def dropout_grad(b: Builder, node: ir.Node) -> Values:
    dy, mask = operands(node, 2)
    ratio, training = given(node, 2), given(node, 3)
    if training is not None:
        flag = ints_of(training)
        if flag is None:
            raise UnsupportedError(f"{operator(node)} {node.name!r}: training_mode is not a constant", "fold constants")
        if not flag[0]:
            return [dy]
    constant = None if ratio is None else ir.convenience.get_const_tensor(ratio)
    if ratio is None or constant is not None:
        value = 0.5 if constant is None else float(str(np.float32(constant.numpy().reshape(-1)[0])))
        return [scale_kept(b, dy, mask, value)]
    keep = b.op("Sub", b.scalar(1.0, ratio), ratio)
    keep = keep if keep.dtype == dy.dtype else b.op("Cast", keep, to=dy.dtype)
    return [b.op("Div", b.op("Mul", dy, indicator(b, mask, dy.dtype)), keep)]


def max_pool_grad(b: Builder, node: ir.Node) -> Values:
    dy, indices = operands(node, 2)
    return [convolution.max_pool_grad(b, dy, indices, bound_shape(node, node.outputs[0], "dX"))]


def average_pool_grad(b: Builder, node: ir.Node) -> Values:
    return [convolution.average_pool_grad(b, node, operand(node, 0), bound_shape(node, node.outputs[0], "dX"))]


def batch_norm_internal(b: Builder, node: ir.Node) -> Values:
    if not attribute(node, "training_mode", 1):
        x, scale, bias, mean, var = node.inputs[:5]
        epsilon = attribute(node, "epsilon")
        return [b.op("BatchNormalization", x, scale, bias, mean, var, epsilon=epsilon), None, None, None, None]
    # ONNX's momentum keeps the old value: running = momentum running + (1 - momentum) batch.
    momentum = 1.0 - decimal(node, "momentum", 0.9)
    return normalization.batch_norm(b, node, decimal(node, "epsilon", 1e-5), momentum, unbiased=False)


def batch_norm_grad(b: Builder, node: ir.Node) -> Values:
    return normalization.batch_norm_grad(b, node, *operands(node, 5))


def _reduced_to(b: Builder, node: ir.Node, value: ir.Value, target: ir.Value) -> ir.Value:
    """Sum a broadcast gradient over what was broadcast."""
    rank, own = rank_of(node, value, "the gradient"), rank_of(node, target, "an input")
    lead = rank - own
    axes = list(range(lead))
    for i in range(own):
        if target.shape[i] == 1 and value.shape[lead + i] != 1:  # type: ignore[index]
            axes.append(lead + i)
    if not axes:
        return value
    summed = b.op("ReduceSum", value, b.ints(axes), keepdims=1)
    return b.op("Squeeze", summed, b.ints(range(lead))) if lead else summed


def div_grad(b: Builder, node: ir.Node) -> Values:
    dy, x, y = operands(node, 3)
    results: Values = [None, None]
    part = b.op("Div", dy, y)
    if wanted(node, 0):
        results[0] = _reduced_to(b, node, part, x)
    if wanted(node, 1):
        full = b.op("Neg", b.op("Mul", part, b.op("Div", x, y)))
        results[1] = _reduced_to(b, node, full, y)
    return results


def scale(b: Builder, node: ir.Node) -> Values:
    value, factor = operands(node, 2)
    factor = factor if factor.dtype == value.dtype else b.op("Cast", factor, to=value.dtype)
    return [b.op("Div" if attribute(node, "scale_down", 0) else "Mul", value, factor)]


def slice_grad(b: Builder, node: ir.Node) -> Values:
    """dY put back at its place in zeros: a margin where the step is 1, else a scatter along the axis."""
    dy = operand(node, 0)
    shape = _known_shape(node, given(node, 1))
    starts, ends = ints_of(given(node, 2)), ints_of(given(node, 3))
    axes = ints_of(given(node, 4)) if given(node, 4) is not None else list(range(len(starts or ())))
    steps = ints_of(given(node, 5)) if given(node, 5) is not None else [1] * len(starts or ())
    if starts is None or ends is None or axes is None or steps is None:
        raise UnsupportedError(f"{operator(node)} {node.name!r}: bounds are not constants", "fold constants first")
    before, after = [0] * len(shape), [0] * len(shape)
    scattered: list[tuple[int, list[int]]] = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = normalized_axis(axis, len(shape))
        picked = _picked(start, end, step, shape[axis])
        if step == 1 and picked:
            before[axis], after[axis] = picked[0], shape[axis] - 1 - picked[-1]
        elif len(picked) != shape[axis] or step != 1:
            scattered.append((axis, picked))
    value = dy
    for axis, picked in scattered:
        value = _scatter_along(b, node, value, axis, picked, shape[axis])
    if any(before) or any(after):
        value = b.op("Pad", value, b.ints([*before, *after]))
    return [value]


def _picked(start: int, end: int, step: int, dim: int) -> list[int]:
    positions = range(dim)
    if step < 0 and end < -dim:
        return list(positions[start::step])
    return list(positions[slice(start, end, step)])


def _scatter_along(b: Builder, node: ir.Node, value: ir.Value, axis: int, picked: Sequence[int], size: int) -> ir.Value:
    shape = bound_shape(node, value, "dY")
    index = np.asarray(picked, np.int64).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    full = [size if i == axis else d for i, d in enumerate(shape)]
    start = zeros(b, full, value.dtype)
    if not picked or not math.prod(shape):
        return start
    return b.op("ScatterElements", start, b.op("Expand", b.const(index), b.ints(shape)), value, axis=axis)


def broadcast_axes(b: Builder, node: ir.Node) -> Values:
    """Constant axes over which the gradients of two broadcast inputs are summed."""
    left, right = (shape_elements(given(node, i)) for i in (0, 1))
    if left is None or right is None:
        raise UnsupportedError(
            f"{operator(node)} {node.name!r}: its shapes are not constants",
            "bind the symbolic dimensions first (shapes=...), then lower",
        )
    return [b.const(np.asarray(reduced_axes(*pair_), np.int64)) for pair_ in ((left, right), (right, left))]


def reduced_axes(own: Sequence[int], other: Sequence[int]) -> list[int]:
    """Axes of the broadcast result over which the gradient of the first shape is summed."""
    rank = max(len(own), len(other))
    lead = rank - len(own)
    full, against = [1] * lead + list(own), [1] * (rank - len(other)) + list(other)
    return [i for i in range(rank) if i < lead or (full[i] == 1 and against[i] != 1)]
