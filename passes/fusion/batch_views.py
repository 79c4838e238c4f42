"""LiftBatchViews: batched products work on the batch dimensions as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import take_type
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match, RewritePass
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import CONTRIB
from ortgraph.passes.fusion.operands import producer_of, rank, reshape_dims


@dataclasses.dataclass(frozen=True)
class LiftBatchViews(RewritePass):
    """MatMul(Reshape(A, [bh, M, K]), Reshape(B, [bh, K, N])) = Reshape(MatMul(A, B), [bh, M, N]), A [b, h, M, K].

    PyTorch's batched product takes three dimensions, so attention is traced with a view before and behind every
    product. Lifted, the views meet and cancel (``simplify-reshapes``), and scale, mask and transposes become
    neighbours of the product. The batched product costs the same either way.

    Refuses when:
        the operands have different batch dimensions, or one is viewed across its last two dimensions;
        two or more dimensions of the result are unknown;
        the product transposes batch dimensions.
    """

    name: ClassVar[str] = "lift-batch-views"
    roots: ClassVar[frozenset[str]] = frozenset({"MatMul", f"{CONTRIB}.FusedMatMul"})
    shared_inner: ClassVar[str] = "keep"

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        views = [producer_of(v, "Reshape") for v in node.inputs[:2]]
        if rank(node.outputs[0]) != 3 or any(v is None or (rank(v.inputs[0]) or 0) < 4 for v in views):
            return None
        nodes = tuple(dict.fromkeys(v for v in views if v is not None))
        sources = {k: v.inputs[0] for k, v in zip("ab", views, strict=True) if v is not None}
        return Match((*nodes, node), (node.outputs[0],), sources)

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        node, a, b = match.nodes[-1], match.values["a"], match.values["b"]
        assert a is not None and b is not None and a.shape is not None and b.shape is not None
        if any(attribute(node, k, 0) for k in ("transBatchA", "transBatchB")):
            return "batch dimensions are transposed"
        if list(a.shape)[:-2] != list(b.shape)[:-2]:
            return f"batch dimensions differ: {list(a.shape)[:-2]} and {list(b.shape)[:-2]}"
        for source, view in zip((a, b), node.inputs, strict=False):
            if rank(view) != 3 or list(source.shape)[-2:] != list(view.shape)[-2:]:  # type: ignore[union-attr, arg-type]
                return f"%{source.name} is viewed across its last two dimensions"
        if reshape_dims(tuple(node.outputs[0].shape or ())) is None:
            return "two or more dimensions of the result are unknown"
        return None

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        node, a, b = match.nodes[-1], match.values["a"], match.values["b"]
        old = node.outputs[0]
        assert a is not None and a.shape is not None and old.shape is not None
        options = {k: x.value for k, x in node.attributes.items()}
        made = build.op(node.op_type, a, b, domain=node.domain, **options)
        take_type(made, old)
        made.shape = ir.Shape([*list(a.shape)[:-2], *list(old.shape)[-2:]])
        back = build.op("Reshape", made, build.ints(reshape_dims(tuple(old.shape)) or []))
        back.shape = old.shape
        return [back]
