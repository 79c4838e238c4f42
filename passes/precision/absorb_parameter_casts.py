"""AbsorbParameterCasts: products round weights while they pack them, lookups round rows instead of the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match, RewritePass
from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import NAMES
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import COMPOSITE

_MAX_READERS = 3  # with k readers: 4 k bytes per element, against 6 + 2 k with a cast


@dataclasses.dataclass(frozen=True)
class AbsorbParameterCasts(RewritePass):
    """Product(A, Cast(W)) = Product(A, W), which rounds W itself; Gather(Cast(W), i) = Cast(Gather(W, i)).

    A parameter is there in float32 in any case, so its cast costs a pass over it at every step.

    Refuses when:
        the cast has a reader of another kind: it stays, and reading the low copy is cheaper than rounding again;
        a product rounds its operands to another type;
        more than three products read the cast (chunks of a loss): rounding again would cost more than the cast.
    """

    name: ClassVar[str] = "absorb-parameter-casts"
    stages: ClassVar[tuple[str, ...]] = ("cast",)
    roots: ClassVar[frozenset[str]] = frozenset({"Cast"})

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        weight, low = node.inputs[0], node.outputs[0]
        parameters = {p.name for p in graph.signature.parameters}
        if weight is None or weight.name not in parameters or not weight.is_graph_input() or low.dtype not in NAMES:
            return None
        if weight.dtype != ir.DataType.FLOAT or low.is_graph_output():
            return None
        readers = tuple(dict.fromkeys(use.node for use in low.uses()))
        products = [n for n in readers if (n.domain, n.op_type) == (COMPOSITE, "Product")]
        other = next((n for n in readers if n not in products and not _looks_up(n, low)), None)
        if other is not None:
            return Refusal(node.name or "", f"%{low.name} is also read by {other.op_type} {other.name!r}")
        wrong = next((n for n in products if not _rounds(n, low)), None)
        if wrong is not None:
            return Refusal(node.name or "", f"{wrong.name!r} rounds its operands to another type")
        if len(products) > _MAX_READERS:
            return Refusal(node.name or "", f"{len(products)} products read %{low.name}")
        if any(n.graph is not node.graph for n in readers):
            return Refusal(node.name or "", f"%{low.name} is read in a subgraph")
        outputs = tuple(n.outputs[0] for n in readers)
        return Match((node, *readers), outputs, {"weight": weight, "low": low}, count="casts", at=readers[-1])

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        weight, low = match.values["weight"], match.values["low"]
        assert weight is not None and low is not None
        made = []
        for node in match.nodes[1:]:
            build.before, build.origins = node, (node,)
            inputs = [weight if v is low else v for v in node.inputs]
            kept = {name: a.value for name, a in node.attributes.items()}
            value = build.op(node.op_type, *inputs, domain=node.domain, name=node.name or "", **kept)
            made.append(value if node.domain == COMPOSITE else build.op("Cast", value, to=low.dtype, name="rows"))
        return made


def _looks_up(node: ir.Node, table: ir.Value) -> bool:
    return (node.domain, node.op_type) == ("", "Gather") and node.inputs[0] is table and node.inputs[1] is not table


def _rounds(node: ir.Node, low: ir.Value) -> bool:
    """Whether the low value is an operand of the product, rounded to its own type, and nothing else of it."""
    assert low.dtype is not None
    extra = any(v is low for v in node.inputs[2:])
    return attribute(node, "precision", "") == NAMES[low.dtype] and not extra
