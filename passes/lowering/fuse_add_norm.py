"""FuseAddNorm: the sum in front of a layer normalization, or beside its gradient, goes into the kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.fusion.operands import producer_of, same_shape
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite, other_reader, readers


@dataclasses.dataclass(frozen=True)
class FuseAddNorm(KernelRewrite):
    """LayerNorm(A + B) = AddLayerNorm(A, B), which gives the sum too; the same bits.

    In gradients: LayerNormGrad(dY + dY2) = AddLayerNormGrad(dY, dY2), the same bits, and LayerNormGrad(dY) + R =
    LayerNormGradAdd(dY, R), the same but for the last bit (the sum is part of a fused multiply-add).
    Where a gradient has a sum on both sides, the one in front is taken.

    Refuses when:
        the sum broadcasts;
        in a gradient, an inner value is a graph output or has another reader;
        a reader of the sum stands before the normalization, or a reader of dScale or dBias before R.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "fuse-add-norm"
    roots: ClassVar[frozenset[str]] = frozenset({f"{KERNELS}.LayerNorm", f"{KERNELS}.LayerNormGrad"})
    shared_inner: ClassVar[str] = "keep"  # why: check looks at the inner values, whose rules differ by form

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        total = producer_of(node.inputs[0], "Add")
        if node.op_type == "LayerNorm":
            return None if total is None else Match((total, node), (total.outputs[0], *node.outputs), count="norms")
        reasons = []
        if total is not None:
            reason = _broadcasts(total) or other_reader(total.outputs[0], node)
            if reason is None:
                return Match((total, node), tuple(node.outputs), count="sums_before_gradients")
            reasons.append(reason)
        found = _added(node, graph.graph)
        if isinstance(found, Match):
            return found
        reasons += [found] if found else []
        return Refusal(node.name or "", "; ".join(reasons)) if reasons else None

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        if match.count != "norms":
            return None
        total, norm = match.nodes
        early = _first_before(graph.graph, norm, readers(total.outputs[0]))
        if early is not None:
            return f"{early.op_type} {early.name!r} reads the sum before the normalization"
        return _broadcasts(total)

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        first, second = match.nodes
        if match.count == "norms":
            outputs = 1 + len(second.outputs)
            inputs, op_type, norm = (*first.inputs, *second.inputs[1:]), "AddLayerNorm", second
        elif match.count == "sums_before_gradients":
            outputs = len(second.outputs)
            inputs, op_type, norm = _gradient_inputs(second, *first.inputs), "AddLayerNormGrad", second
        else:
            outputs = len(first.outputs)
            inputs, op_type, norm = (
                _gradient_inputs(first, first.inputs[0], match.values["r"]),
                "LayerNormGradAdd",
                first,
            )
        attributes = {k: a.value for k, a in norm.attributes.items() if k in ("axis", "epsilon")}
        return build.multi(op_type, *inputs, outputs=outputs, domain=KERNELS, **attributes)


def _gradient_inputs(gradient: ir.Node, dy: ir.Value | None, extra: ir.Value | None) -> tuple[ir.Value | None, ...]:
    scale = gradient.inputs[4] if len(gradient.inputs) > 4 else None
    return dy, *gradient.inputs[1:4], scale, extra


def _added(gradient: ir.Node, graph: ir.Graph) -> Match | str | None:
    """LayerNormGrad whose dX is read by one Add only; a reason when that sum cannot be taken in."""
    dx = gradient.outputs[0]
    found = [n for n in readers(dx) if n.op_type == "Add" and n.domain in ("", "ai.onnx")]
    if not found:
        return None
    total = found[0]
    if list(total.inputs) == [dx, dx]:
        return f"%{dx.name} is added to itself"
    reason = other_reader(dx, total) or _broadcasts(total)
    if reason is not None:
        return reason
    r = total.inputs[1] if total.inputs[0] is dx else total.inputs[0]
    assert r is not None
    maker = r.producer()
    outputs = (total.outputs[0], *gradient.outputs[1:])
    values: dict[str, ir.Value | None] = {"r": r}
    if maker is None or _first_before(graph, gradient, [maker]) is not None:
        return Match((gradient, total), outputs, values, count="sums_after_gradients", at=gradient)
    early = _first_before(graph, total, [n for v in gradient.outputs[1:] for n in readers(v)])
    if early is not None:
        return f"{early.op_type} {early.name!r} reads dScale or dBias before %{r.name} is known"
    return Match((gradient, total), outputs, values, count="sums_after_gradients")


def _broadcasts(total: ir.Node) -> str | None:
    a, b = total.inputs
    assert a is not None and b is not None
    return None if same_shape(a, b) else f"the sum %{total.outputs[0].name} broadcasts, or a shape is not known"


def _first_before(graph: ir.Graph, node: ir.Node, others: Iterable[ir.Node]) -> ir.Node | None:
    """The first of ``others`` that stands before ``node``."""
    wanted = set(others) - {node}
    if not wanted:
        return None
    for other in graph:
        if other is node or other in wanted:
            return None if other is node else other
    return None
