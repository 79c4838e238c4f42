"""FuseEmbeddingUpdate: an embedding table is updated without its gradient table."""

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
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite, readers

_SKIP = 7  # input of AdamW
_RULE = ("beta1", "beta2", "epsilon", "weight_decay")


@dataclasses.dataclass(frozen=True)
class FuseEmbeddingUpdate(KernelRewrite):
    """AdamW(W, EmbeddingGrad(dY, Indices), M, V) = EmbeddingAdamW(W, dY, Indices, M, V), the same bits.

    The gradient table stays in the graph as long as it is a graph output: the ``step`` program does not compute it,
    the ``gradients`` program does.

    Refuses when:
        the gradient table has another reader (a global norm, an accumulator): it would be computed anyway;
        the update may be skipped (a loss scale);
        the gradient is a sum of which a table is one part (a tied weight);
        the table's shape is not known, or is not [rows, D] with the rows of the gradient.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "fuse-embedding-update"
    roots: ClassVar[frozenset[str]] = frozenset({f"{KERNELS}.AdamW"})
    shared_inner: ClassVar[str] = "keep"

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        gradient = node.inputs[3]
        table = producer_of(gradient, "EmbeddingGrad", domain=KERNELS)
        if table is not None:
            return Match((table, node), tuple(node.outputs), count="updates")
        total = producer_of(gradient, "Add", "Sum")
        if (
            gradient is not None
            and total is not None
            and any(producer_of(v, "EmbeddingGrad", domain=KERNELS) for v in total.inputs)
        ):
            return Refusal(node.name or "", f"the gradient %{gradient.name} is a sum of which a table is one part")
        return None

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        table, update = match.nodes
        gradient, weight = update.inputs[3], update.inputs[2]
        assert gradient is not None and weight is not None
        other = next((n for n in readers(gradient) if n is not update), None)
        if other is not None:
            return f"the gradient table %{gradient.name} is also read by {other.op_type} {other.name!r}"
        if len(update.inputs) > _SKIP and update.inputs[_SKIP] is not None:
            return "the update may be skipped, which the fused kernel cannot"
        shape = static_shape(weight)
        if shape is None or len(shape) != 2 or shape[0] != attribute(table, "rows", -1):
            return f"the weight %{weight.name} is not known to be a table of {attribute(table, 'rows', -1)} rows"
        return None

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        table, update = match.nodes
        rate, step, weight, _, m, v, *scale = update.inputs
        attributes = {k: a.value for k, a in update.attributes.items() if k in _RULE}
        padding = attribute(table, "padding_idx", -1)
        inputs = (rate, step, weight, *table.inputs, m, v, *scale)
        return build.multi("EmbeddingAdamW", *inputs, outputs=3, domain=KERNELS, padding_idx=padding, **attributes)
