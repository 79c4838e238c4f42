"""Normalizations without a gradient builder, written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ortgraph.capture.legalize_layout import rank, refuse
from ortgraph.graph.edit import static_shape
from ortgraph.ops.builder import Builder


def _standardized(b: Builder, x: ir.Value, axes: list[int], epsilon: float) -> ir.Value:
    """(X - mean) / sqrt(var + epsilon) over the axes."""
    where = b.ints(axes)
    centred = b.op("Sub", x, b.op("ReduceMean", x, where, keepdims=1))
    variance = b.op("ReduceMean", b.op("Mul", centred, centred), where, keepdims=1)
    return b.op("Div", centred, b.op("Sqrt", b.op("Add", variance, b.scalar(epsilon, x))))


def _affine(b: Builder, x: ir.Value, scale: ir.Value | None, bias: ir.Value | None, count: int) -> ir.Value:
    column = b.ints([-1] + [1] * (count - 2))
    return b.op("Add", b.op("Mul", x, b.op("Reshape", scale, column)), b.op("Reshape", bias, column))


def _instance_norm(b: Builder, node: ir.Node) -> list[ir.Value]:
    x, scale, bias = node.inputs
    count = rank(node)
    assert x is not None
    normal = _standardized(b, x, list(range(2, count)), node.attributes.get_float("epsilon", 1e-5))
    return [_affine(b, normal, scale, bias, count)]


def _group_norm(b: Builder, node: ir.Node) -> list[ir.Value]:
    """GroupNormalization: scale and bias per group in opset 18, per channel from opset 21 on."""
    x, scale, bias = node.inputs
    groups = node.attributes.get_int("num_groups")
    assert x is not None and x.shape is not None and scale is not None
    channels = x.shape[1]
    if not isinstance(channels, int):
        raise refuse(node, "the number of channels is not known")
    grouped = b.op("Reshape", x, b.ints([0, groups, channels // groups, -1]))
    normal = _standardized(b, grouped, [2, 3], node.attributes.get_float("epsilon", 1e-5))
    per_group = b.graph.opset_imports.get("", 18) < 21
    column = b.ints([1, groups, 1, 1] if per_group else [1, groups, channels // groups, 1])
    scaled = b.op("Mul", normal, b.op("Reshape", scale, column))
    shifted = b.op("Add", scaled, b.op("Reshape", bias, column))
    return [b.op("Reshape", shifted, _shape_of(b, x))]


def _shape_of(b: Builder, x: ir.Value) -> ir.Value:
    """The shape as a tensor, constant where it is static."""
    shape = static_shape(x)
    return b.op("Shape", x) if shape is None else b.ints(shape)


def _mean_variance(b: Builder, node: ir.Node) -> list[ir.Value]:
    x = node.inputs[0]
    assert x is not None
    axes = [a % rank(node) for a in node.attributes.get_ints("axes", [0, 2, 3])]
    return [_standardized(b, x, axes, 1e-9)]


def _lp_normalization(b: Builder, node: ir.Node) -> list[ir.Value]:
    x = node.inputs[0]
    assert x is not None
    where = b.ints([node.attributes.get_int("axis", -1) % rank(node)])
    if node.attributes.get_int("p", 2) == 1:
        norm = b.op("ReduceSum", b.op("Abs", x), where, keepdims=1)
    else:
        norm = b.op("Sqrt", b.op("ReduceSum", b.op("Mul", x, x), where, keepdims=1))
    return [b.op("Div", x, norm)]


def _lrn(b: Builder, node: ir.Node) -> list[ir.Value]:
    """X / (bias + alpha / size * sum of squares over neighbouring channels) ^ beta."""
    x = node.inputs[0]
    count, size = rank(node), node.attributes.get_int("size")
    assert x is not None and x.shape is not None
    channels = x.shape[1]
    if not isinstance(channels, int):
        raise refuse(node, "the number of channels is not known")
    rows = b.op("Reshape", b.op("Mul", x, x), b.ints([0, 1, channels, -1 if count > 2 else 1]))
    before = (size - 1) // 2
    mean = b.op(
        "AveragePool",
        rows,
        kernel_shape=[size, 1],
        pads=[before, 0, size - 1 - before, 0],
        count_include_pad=1,
        strides=[1, 1],
    )
    spread = b.op("Mul", b.op("Reshape", mean, _shape_of(b, x)), b.scalar(node.attributes.get_float("alpha", 1e-4), x))
    base = b.op("Add", spread, b.scalar(node.attributes.get_float("bias", 1.0), x))
    return [b.op("Div", x, b.op("Pow", base, b.scalar(node.attributes.get_float("beta", 0.75), x)))]


NORMS: dict[str, Callable[[Builder, ir.Node], Sequence[ir.Value]]] = {
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _lrn,
    "LpNormalization": _lp_normalization,
    "MeanVarianceNormalization": _mean_variance,
}
