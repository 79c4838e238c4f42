"""Operator table: reductions, scans and selections along axes."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.ops.shapes import Types, attribute, element_count, given, ints_of, like, normalized_axis, shape_of
from ortgraph.ops.spec import OpSpec, Shape, register


def reduced_shape(shape: Shape, axes: list[int] | None, keepdims: bool, none_when_empty: bool) -> Shape:
    """Shape after a reduction over ``axes`` (None or empty: all, or none of them)."""
    if not axes:
        if none_when_empty:
            return shape
        axes = list(range(len(shape)))
    inside = {normalized_axis(a, len(shape)) for a in axes}
    if keepdims:
        return tuple(1 if i in inside else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in inside)


def reduction_types(node: ir.Node) -> Types | None:
    """Axes as attribute or as constant input; other cases are left to ONNX."""
    data, axes = given(node, 0), attribute(node, "axes")
    shape = shape_of(data)
    if data is None or data.dtype is None or shape is None:
        return None
    if axes is None and given(node, 1) is not None:
        axes = ints_of(given(node, 1))
        if axes is None:
            return None
    empty = bool(attribute(node, "noop_with_empty_axes", 0))
    return [(data.dtype, reduced_shape(shape, axes, bool(attribute(node, "keepdims", 1)), empty))]


def _reduction(op_type: str, doc: str, precision: str = "accumulate", flops: int = 1) -> OpSpec:
    return OpSpec(
        "",
        op_type,
        precision=precision,
        infer=reduction_types,
        flops=lambda n: flops * element_count(given(n, 0)),
        doc=doc,
    )


register(
    _reduction("ReduceSum", "Y = sum(X)"),
    _reduction("ReduceMean", "Y = mean(X)"),
    _reduction("ReduceMax", "Y = max(X)", "any"),
    _reduction("ReduceMin", "Y = min(X)", "any"),
    _reduction("ReduceProd", "Y = product(X)", "float32"),
    _reduction("ReduceL1", "Y = sum |X|"),
    _reduction("ReduceL2", "Y = sqrt(sum X^2)", "float32", 2),
    _reduction("ReduceSumSquare", "Y = sum X^2", "float32", 2),
    _reduction("ReduceLogSum", "Y = log(sum(X))", "float32"),
    _reduction("ReduceLogSumExp", "Y = log(sum(exp(X)))", "float32", 8),
    OpSpec("", "ArgMax", precision="any", doc="Y = index of the greatest element"),
    OpSpec("", "ArgMin", precision="any", doc="Y = index of the least element"),
    OpSpec("", "CumSum", precision="float32", infer=like(0), doc="Y = running sum of X along an axis"),
    OpSpec("", "TopK", precision="any", doc="Y = the k greatest elements and their indices"),
)
