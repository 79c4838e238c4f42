"""AddEmbeddingGradient: the gradient of a tied table is one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.fusion.operands import producer_of
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite


@dataclasses.dataclass(frozen=True)
class AddEmbeddingGradient(KernelRewrite):
    """G + EmbeddingGrad(dY, Indices) = EmbeddingGradAdd(dY, Indices, G), the same bits, written over G.

    G is what the other uses of the table gave (the product of a tied head). Of the table's size in gradients three
    values become one, and only rows that are looked up are touched.

    Refuses when:
        the gradient of the lookup is read elsewhere or is a graph output;
        the other summand is not known to have the table's shape, or is no float32.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "add-embedding-gradient"
    roots: ClassVar[frozenset[str]] = frozenset({f"{KERNELS}.EmbeddingGrad"})

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        table = node.outputs[0]
        total = next((u.node for u in table.uses() if producer_of(u.node.outputs[0], "Add", "Sum") is not None), None)
        if total is None or len(total.inputs) != 2 or total.graph is not node.graph:
            return None
        addend = total.inputs[1] if total.inputs[0] is table else total.inputs[0]
        if addend is table:
            return Refusal(node.name or "", "the gradient is added to itself")
        return Match((node, total), (total.outputs[0],), {"addend": addend}, count="sums")

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        table, addend = match.nodes[0], match.values["addend"]
        assert addend is not None
        if addend.dtype != ir.DataType.FLOAT:
            return f"element type {addend.dtype}"
        shape, made = static_shape(addend), static_shape(table.outputs[0])
        if shape is None or shape != made or len(shape) != 2:
            return f"the other summand is not known to be a table of {attribute(table, 'rows', -1)} rows"
        return None

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        table, _ = match.nodes
        padding = attribute(table, "padding_idx", -1)
        inputs = (*table.inputs, match.values["addend"])
        return [build.op("EmbeddingGradAdd", *inputs, domain=KERNELS, padding_idx=padding)]
