"""Operator table: matrix products and recurrent layers."""

from __future__ import annotations

import math

import onnx_ir as ir

from ortgraph.ops.shapes import Types, attribute, broadcast, element_count, given, shape_of
from ortgraph.ops.spec import OpSpec, Shape, register


def product_shape(a: Shape, b: Shape) -> Shape | None:
    """Shape of a matrix product with numpy's rules, None when a rank is 0 or batches are unknown."""
    if not a or not b:
        return None
    batch = broadcast(a[:-2], b[:-2])
    if batch is None:
        return None
    rows = a[-2:-1]
    columns = b[-1:] if len(b) > 1 else ()
    return (*batch, *rows, *columns)


def _matmul_types(node: ir.Node) -> Types | None:
    a, b = node.inputs
    if a is None or a.dtype is None or shape_of(a) is None or shape_of(b) is None:
        return None
    shape = product_shape(shape_of(a), shape_of(b))  # type: ignore[arg-type]
    return None if shape is None else [(a.dtype, shape)]


def product_flops(node: ir.Node, inner: int) -> int:
    """2 M N K of the node's only output, with K given."""
    return 2 * element_count(node.outputs[0]) * inner


def _inner(value: ir.Value | None, axis: int) -> int:
    shape = shape_of(value)
    dim = shape[axis] if shape else 0
    return dim if isinstance(dim, int) else 0


def _gemm_types(node: ir.Node) -> Types | None:
    a, b = given(node, 0), given(node, 1)
    left, right = shape_of(a), shape_of(b)
    if a is None or a.dtype is None or left is None or right is None or len(left) != 2 or len(right) != 2:
        return None
    return [
        (a.dtype, (left[1 if attribute(node, "transA", 0) else 0], right[0 if attribute(node, "transB", 0) else 1]))
    ]


def gemm_flops(node: ir.Node) -> int:
    return product_flops(node, _inner(given(node, 0), 0 if attribute(node, "transA", 0) else 1))


def _einsum_flops(node: ir.Node) -> int:
    equation = str(attribute(node, "equation", "")).replace(" ", "")
    left = equation.split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, value in zip(left, node.inputs, strict=False):
        shape = shape_of(value)
        if shape is None or "." in term or len(term) != len(shape):
            return 0
        sizes.update({letter: d for letter, d in zip(term, shape, strict=True) if isinstance(d, int)})
    if any(letter not in sizes for term in left for letter in term):
        return 0
    return 2 * math.prod(sizes.values())


def _recurrent_flops(node: ir.Node) -> int:
    """Both products of every step: X W' and H R'."""
    x, weight, again = (shape_of(given(node, i)) for i in range(3))
    if x is None or weight is None or again is None or not all(isinstance(d, int) for d in (*x, *weight, *again)):
        return 0
    return 2 * x[0] * x[1] * (math.prod(weight) + math.prod(again))


register(
    OpSpec(
        "", "MatMul", precision="low", low_inputs=(0, 1), low_outputs=(0,), infer=_matmul_types,
        flops=lambda node: product_flops(node, _inner(given(node, 0), -1)), doc="Y = A B",
    ),
    OpSpec(
        "", "Gemm", precision="low", low_inputs=(0, 1), low_outputs=(0,), inplace=((2, 0),), infer=_gemm_types, flops=gemm_flops,
        doc="Y = alpha A' B' + beta C",
    ),
    OpSpec("", "Einsum", precision="accumulate", flops=_einsum_flops, doc="Y = sum of products by the equation"),
    OpSpec("", "LSTM", precision="float32", flops=_recurrent_flops, doc="long short-term memory over a sequence"),
    OpSpec("", "GRU", precision="float32", flops=_recurrent_flops, doc="gated recurrent unit over a sequence"),
    OpSpec("", "RNN", precision="float32", flops=_recurrent_flops, doc="simple recurrence over a sequence"),
    OpSpec("", "MatMulInteger", precision="any", flops=lambda node: product_flops(node, _inner(given(node, 0), -1)),
           doc="Y = (A - a) (B - b) in int32"),
    OpSpec("", "Det", precision="float32", doc="Y = determinant"),
)  # fmt: skip
