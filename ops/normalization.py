"""Operator table: normalization layers and their gradients."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import (
    Types,
    attribute,
    bound_shape,
    decimal,
    elements_flops,
    given,
    like,
    normalized_axis,
    operand,
    operands,
    rank_of,
    retyped,
    shape_of,
    typed,
    wanted,
)
from ortgraph.ops.spec import COMPOSITE, OpSpec, register


def _layer_norm_grad_types(node: ir.Node) -> Types:
    x, scale = given(node, 1), given(node, 4)
    shape = shape_of(x)
    tail = None
    if scale is not None and scale.shape is not None:
        tail = shape_of(scale)
    elif shape is not None:
        tail = shape[normalized_axis(attribute(node, "axis", -1), len(shape)) :]
    parameter = scale if scale is not None else x
    return [typed(given(node, 0)), retyped(parameter, tail), retyped(parameter, tail)][: len(node.outputs)]


def layer_norm_grad(
    b: Builder,
    node: ir.Node,
    dy: ir.Value,
    x: ir.Value,
    mean: ir.Value | None,
    inv_std: ir.Value,
    scale: ir.Value | None,
    axis: int,
) -> list[ir.Value | None]:
    """dX, dScale, dBias of layer normalization; without ``mean`` of RMS normalization.

    With x_hat = (X - Mean) InvStd and g = dY Scale:
    dX = InvStd (g - mean(g) - x_hat mean(g x_hat)), dScale = sum(dY x_hat), dBias = sum(dY).
    """
    rank = rank_of(node, x, "X")
    first = normalized_axis(axis, rank)
    inner = b.ints([i - rank for i in range(first, rank)])
    x_hat = b.op("Mul", x if mean is None else b.op("Sub", x, mean), inv_std)
    results: list[ir.Value | None] = [None, None, None]
    if wanted(node, 0):
        g = dy if scale is None else b.op("Mul", dy, scale)
        along = b.op("ReduceMean", b.op("Mul", g, x_hat), inner, keepdims=1)
        centred = g if mean is None else b.op("Sub", g, b.op("ReduceMean", g, inner, keepdims=1))
        results[0] = b.op("Mul", b.op("Sub", centred, b.op("Mul", x_hat, along)), inv_std)
    if wanted(node, 1):
        results[1] = _sum_leading(b, b.op("Mul", dy, x_hat), first)
    if wanted(node, 2):
        results[2] = _sum_leading(b, dy, first)
    return results


def _sum_leading(b: Builder, value: ir.Value, count: int) -> ir.Value:
    return b.op("ReduceSum", value, b.ints(range(count)), keepdims=0) if count else value


def _expand_layer_norm_grad(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    dy, x = operands(node, 2)
    mean, inv_std, scale = given(node, 2), operand(node, 3), given(node, 4)
    return layer_norm_grad(b, node, dy, x, mean, inv_std, scale, attribute(node, "axis", -1))


def _batch_norm_types(node: ir.Node) -> Types:
    x, mean = given(node, 0), given(node, 3)
    return [typed(x), typed(mean), typed(given(node, 4)), typed(mean), typed(mean)][: len(node.outputs)]


def _channel_axes(rank: int) -> list[int]:
    return [i for i in range(rank) if i != 1]


def batch_norm(b: Builder, node: ir.Node, epsilon: float, momentum: float, unbiased: bool) -> list[ir.Value | None]:
    """Training-mode batch normalization of node inputs X, Scale, Bias, RunningMean, RunningVar.

    Returns Y, NewMean, NewVar, SavedMean, SavedInvStd; new = (1 - momentum) old + momentum batch.
    """
    x, scale, bias, running_mean, running_var = operands(node, 5)
    rank = rank_of(node, x, "X")
    axes, column = b.ints(_channel_axes(rank)), b.ints([-1] + [1] * (rank - 2))
    mean = b.op("ReduceMean", x, axes, keepdims=1)
    centred = b.op("Sub", x, mean)
    variance = b.op("ReduceMean", b.op("Mul", centred, centred), axes, keepdims=1)
    one = b.scalar(1.0, x)
    inv_std = b.op("Div", one, b.op("Sqrt", b.op("Add", variance, b.scalar(epsilon, x))))
    results: list[ir.Value | None] = [None] * 5
    if wanted(node, 0):
        normal = b.op("Mul", centred, b.op("Mul", inv_std, b.op("Reshape", scale, column)))
        results[0] = b.op("Add", normal, b.op("Reshape", bias, column))
    flat = b.ints([-1])
    if wanted(node, 1):
        results[1] = _blend(b, running_mean, b.op("Reshape", mean, flat), momentum)
    if wanted(node, 2):
        ratio = 1.0
        if unbiased:
            shape = bound_shape(node, x, "X")
            count = 1
            for i in _channel_axes(rank):
                count *= shape[i]
            ratio = count / (count - 1) if count > 1 else float("nan")
        results[2] = _blend(b, running_var, b.op("Reshape", variance, flat), momentum, ratio)
    if wanted(node, 3):
        results[3] = b.op("Reshape", mean, flat)
    if wanted(node, 4):
        results[4] = b.op("Reshape", inv_std, flat)
    return results


def _blend(b: Builder, old: ir.Value, new: ir.Value, momentum: float, ratio: float = 1.0) -> ir.Value:
    kept = b.op("Mul", old, b.scalar(1.0 - momentum, old))
    return b.op("Add", kept, b.op("Mul", new, b.scalar(momentum * ratio, old)))


def _batch_norm_grad_types(node: ir.Node) -> Types:
    scale = typed(given(node, 2))
    return [typed(given(node, 1)), scale, scale][: len(node.outputs)]


def batch_norm_grad(
    b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, scale: ir.Value, mean: ir.Value, inv_std: ir.Value
) -> list[ir.Value | None]:
    """dX, dScale, dBias of training-mode batch normalization; statistics are per channel [C]."""
    rank = rank_of(node, x, "X")
    axes, column = b.ints(_channel_axes(rank)), b.ints([-1] + [1] * (rank - 2))
    inv_column = b.op("Reshape", inv_std, column)
    x_hat = b.op("Mul", b.op("Sub", x, b.op("Reshape", mean, column)), inv_column)
    dy_x_hat = b.op("Mul", dy, x_hat)
    results: list[ir.Value | None] = [None, None, None]
    if wanted(node, 0):
        along = b.op("Mul", x_hat, b.op("ReduceMean", dy_x_hat, axes, keepdims=1))
        centred = b.op("Sub", dy, b.op("ReduceMean", dy, axes, keepdims=1))
        factor = b.op("Mul", inv_column, b.op("Reshape", scale, column))
        results[0] = b.op("Mul", b.op("Sub", centred, along), factor)
    if wanted(node, 1):
        results[1] = b.op("ReduceSum", dy_x_hat, axes, keepdims=0)
    if wanted(node, 2):
        results[2] = b.op("ReduceSum", dy, axes, keepdims=0)
    return results


def _expand_batch_norm(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    return batch_norm(b, node, decimal(node, "epsilon", 1e-5), decimal(node, "momentum", 0.1), unbiased=True)


def _expand_batch_norm_grad(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    return batch_norm_grad(b, node, *operands(node, 5))


register(
    OpSpec(
        COMPOSITE,
        "LayerNormGrad",
        precision="accumulate",
        infer=_layer_norm_grad_types,
        expand=_expand_layer_norm_grad,
        flops=elements_flops(14),
        optional_outputs=(1, 2),
        doc="dX = InvStd (g - mean(g) - x_hat mean(g x_hat)), g = dY Scale; dScale = sum(dY x_hat); dBias = sum(dY)",
    ),
    OpSpec(
        COMPOSITE,
        "BatchNorm",
        precision="accumulate",
        infer=_batch_norm_types,
        expand=_expand_batch_norm,
        flops=elements_flops(8),
        doc="Y = Scale (X - mean) / sqrt(var + epsilon) + Bias over all axes but 1; new = (1 - m) old + m batch",
    ),
    OpSpec(
        COMPOSITE,
        "BatchNormGrad",
        precision="accumulate",
        infer=_batch_norm_grad_types,
        expand=_expand_batch_norm_grad,
        flops=elements_flops(12),
        doc="dX = Scale InvStd (dY - mean(dY) - x_hat mean(dY x_hat)); dScale = sum(dY x_hat); dBias = sum(dY)",
    ),
)


def layer_norm_types(node: ir.Node) -> Types:
    """Y like X; Mean and InvStdDev with the normalized dimensions as 1."""
    x = given(node, 0)
    shape = shape_of(x)
    statistics = None
    if shape is not None:
        axis = normalized_axis(attribute(node, "axis", -1), len(shape))
        statistics = tuple(d if i < axis else 1 for i, d in enumerate(shape))
    saved = retyped(x, statistics)
    if saved is not None and attribute(node, "stash_type", 1) == 1 and saved[0] != ir.DataType.DOUBLE:
        saved = (ir.DataType.FLOAT, saved[1])
    return [typed(x), saved, saved][: len(node.outputs)]


register(
    OpSpec("", "LayerNormalization", precision="accumulate", inplace=((0, 0),), infer=layer_norm_types,
           flops=elements_flops(8), optional_outputs=(1, 2),
           doc="Y = Scale (X - mean) / sqrt(var + epsilon) + B over axes from axis on"),
    OpSpec("", "BatchNormalization", precision="float32", flops=elements_flops(4),
           doc="Y = Scale (X - mean) / sqrt(var + epsilon) + B per channel"),
    OpSpec("", "InstanceNormalization", precision="accumulate", infer=like(0), flops=elements_flops(8),
           doc="Y = Scale (X - mean) / sqrt(var + epsilon) + B per sample and channel"),
    OpSpec("", "GroupNormalization", precision="accumulate", infer=like(0), flops=elements_flops(8),
           doc="Y = Scale (X - mean) / sqrt(var + epsilon) + B per sample and group of channels"),
    OpSpec("", "LpNormalization", precision="float32", infer=like(0), doc="Y = X / norm(X, axis)"),
    OpSpec("", "LRN", precision="float32", infer=like(0), doc="Y = X / (bias + alpha / n sum X^2)^beta"),
    OpSpec("", "MeanVarianceNormalization", precision="float32", infer=like(0), doc="Y = (X - mean) / sqrt(var)"),
)  # fmt: skip
