"""Operator table: embedding lookup gradients."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import (
    Types,
    attribute,
    elements_flops,
    operands,
    retyped,
    shape_of,
    static_dim,
    zeros,
)
from ortgraph.ops.spec import COMPOSITE, OpSpec, register


def _embedding_grad_types(node: ir.Node) -> Types:
    dy = node.inputs[0]
    shape = shape_of(dy)
    return [retyped(dy, None if shape is None else (attribute(node, "rows"), shape[-1]))]


def embedding_grad(b: Builder, dy: ir.Value, indices: ir.Value, rows: int, width: int, padding: int) -> ir.Value:
    """Sum of the rows of dY by index, [rows, width]. ScatterElements adds sequentially: right at any thread count."""
    flat = b.op("Reshape", dy, b.ints([-1, width]))
    index = b.op("Reshape", indices, b.ints([-1, 1]))
    if padding >= 0:
        kept = b.op("Not", b.op("Equal", index, b.scalar(padding, index)))
        flat = b.op("Mul", flat, b.op("Cast", kept, to=dy.dtype))
    spread = b.op("Expand", index, b.ints([1, width]))
    return b.op("ScatterElements", zeros(b, [rows, width], dy.dtype), spread, flat, axis=0, reduction="add")


def _expand_embedding_grad(b: Builder, node: ir.Node) -> list[ir.Value]:
    dy, indices = operands(node, 2)
    width = static_dim(node, dy, -1, "dY")
    return [embedding_grad(b, dy, indices, attribute(node, "rows"), width, attribute(node, "padding_idx", -1))]


register(
    OpSpec(
        COMPOSITE,
        "EmbeddingGrad",
        precision="accumulate",
        infer=_embedding_grad_types,
        expand=_expand_embedding_grad,
        flops=elements_flops(1),
        doc="dTable[r] = sum of dY[i] where Indices[i] = r; 0 for r = padding_idx",
    )
)
