"""Operator table: the matrix product with rounded operands, bias, activation and addend in one node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortgraph.errors import UnsupportedError
from ortgraph.ops.builder import Builder
from ortgraph.ops.matmul import product_flops, product_shape
from ortgraph.ops.precision import FP32, PRECISIONS
from ortgraph.ops.shapes import Types, attribute, decimal, given, operands, rank_of, shape_of
from ortgraph.ops.spec import COMPOSITE, OpSpec, Shape, register

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu", "tanh")
_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)  # what sums are kept in; double for references


def operand_shape(node: ir.Node, index: int) -> Shape | None:
    """Shape of operand 0 or 1 as it is multiplied: with its last two dimensions swapped where the node says so."""
    shape = shape_of(given(node, index))
    if shape is None or not attribute(node, ("transA", "transB")[index], 0):
        return shape
    return (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape


def _types(node: ir.Node) -> Types | None:
    left, right = operand_shape(node, 0), operand_shape(node, 1)
    dtype = ir.DataType(attribute(node, "to", ir.DataType.FLOAT))
    shape = product_shape(left, right) if left is not None and right is not None else None
    return [(dtype, shape)] * len(node.outputs)


def flops_of(node: ir.Node) -> int:
    """2 M N K and the batch."""
    left = operand_shape(node, 0)
    inner = left[-1] if left else 0
    return product_flops(node, inner if isinstance(inner, int) else 0)


def _expand(b: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    a, c = operands(node, 2)
    low = PRECISIONS.get(str(attribute(node, "precision", FP32)))
    to = ir.DataType(attribute(node, "to", ir.DataType.FLOAT))
    activation = str(attribute(node, "activation", "none"))
    if low is None or activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"Product {node.name!r}: unknown precision or activation",
            f"precision is one of {', '.join(PRECISIONS)}, activation one of {', '.join(ACTIVATIONS)}",
        )
    wide = next((v.dtype for v in (a, c) if v.dtype in _WIDE[1:]), _WIDE[0])
    left, right = (_operand(b, node, i, v, low, wide) for i, v in enumerate((a, c)))
    z = b.op("MatMul", left, right)
    alpha = decimal(node, "alpha", 1.0)
    if alpha != 1.0:
        z = b.op("Mul", z, b.scalar(alpha, z))
    bias, addend = given(node, 2), given(node, 3)
    if bias is not None:
        z = b.op("Add", z, bias)
    y = _activate(b, z, activation)
    if addend is not None:
        y = b.op("Add", y, _cast(b, addend, wide))
    return [_cast(b, y, to), _cast(b, z, to)][: len(node.outputs)]


def _operand(
    b: Builder, node: ir.Node, index: int, value: ir.Value, low: ir.DataType, wide: ir.DataType | None
) -> ir.Value:
    assert wide is not None
    if low != ir.DataType.FLOAT:
        value = _cast(b, value, low)
    value = _cast(b, value, wide)
    if not attribute(node, ("transA", "transB")[index], 0):
        return value
    rank = rank_of(node, value, "AB"[index])
    return b.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])


def _cast(b: Builder, value: ir.Value, to: ir.DataType) -> ir.Value:
    return value if value.dtype == to else b.op("Cast", value, to=to)


def _activate(b: Builder, z: ir.Value, activation: str) -> ir.Value:
    if activation in ("gelu", "gelu_tanh"):
        return b.op("Gelu", z, domain=COMPOSITE, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "silu":
        return b.op("Silu", z, domain=COMPOSITE)
    return z if activation == "none" else b.op(activation.capitalize(), z)


register(
    OpSpec(
        COMPOSITE, "Product", precision="low", low_inputs=(0, 1), low_outputs=(0, 1), expands_low=True, infer=_types,
        expand=_expand, flops=flops_of, optional_outputs=(0, 1),
        doc="Z = alpha round(A) round(B) + Bias, Y = activation(Z) + Addend",
    )
)  # fmt: skip
