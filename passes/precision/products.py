"""Product in place of a float32 matrix product: operands in the low type, sums in float32."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import NAMES
from ortgraph.ops.shapes import attribute, decimal, given, shape_of
from ortgraph.ops.spec import COMPOSITE


def build_product(
    build: Builder, node: ir.Node, a: ir.Value, b: ir.Value, low: ir.DataType, to: ir.DataType
) -> ir.Value:
    """The Product that stands for a MatMul, Gemm or FusedMatMul with these operands.

    A bias of Gemm of shape [N] goes in; one of the result's own shape is the addend when the result is float32; any
    other is added afterwards.

    Args:
        node: The float32 product.
        a, b: Its operands, float32 or ``low`` each.
        low: The type that operands are rounded to.
        to: Type of the result.
    """
    c = given(node, 2) if node.op_type == "Gemm" else None
    bias = addend = after = None
    if c is not None:
        shape, columns = shape_of(c), shape_of(node.outputs[0])
        if shape is not None and columns is not None and shape == columns[-1:]:
            bias = c
        elif shape is not None and shape == columns and to == ir.DataType.FLOAT:
            addend = c
        else:
            after = c
    inputs: list[ir.Value | None] = [a, b, bias, addend]
    while inputs[-1] is None:
        inputs.pop()
    made = build.op(
        "Product", *inputs, domain=COMPOSITE, name=node.name or "product", precision=NAMES[low],
        to=ir.DataType.FLOAT if after is not None else to, alpha=decimal(node, "alpha", 1.0),
        transA=attribute(node, "transA", 0), transB=attribute(node, "transB", 0),
    )  # fmt: skip
    if after is None:
        return made
    total = build.op("Add", made, after)
    return total if to == ir.DataType.FLOAT else build.op("Cast", total, to=to)
