"""ZeroEmptyRows: rows that see no key become zeros in the softmax kernel instead of before and after products."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import CONTRIB, KERNELS
from ortgraph.passes.fusion.operands import axes_of, producer_of, rank, scalar
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite, other_reader, readers


@dataclasses.dataclass(frozen=True)
class ZeroEmptyRows(KernelRewrite):
    """Softmax(S + Max(Mask, floor)) seeing = ScaledMaskedSoftmax(S, Mask, zero_empty_rows), the same numbers.

    ``floor`` is 0 in rows of the mask that are minus infinity throughout, else minus infinity; ``seeing`` is 0 there,
    else 1. The expansion of Attention multiplies P V and the incoming dY by ``seeing``; probabilities of zero make both
    products superfluous: they reach results only through P.

    Refuses when:
        the probabilities are a graph output, or are read by anything but P V, P^T dY and SoftmaxGrad;
        P V or dY is used without the factor, or has a reader to which the factor matters.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "zero-empty-rows"
    roots: ClassVar[frozenset[str]] = frozenset({f"{KERNELS}.ScaledMaskedSoftmax"})
    shared_inner: ClassVar[str] = "keep"

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        if len(node.inputs) < 2 or attribute(node, "zero_empty_rows", 0):
            return None
        found = _lifted(node.inputs[1])
        if found is None:
            return None
        mask, blind = found
        p = node.outputs[0]
        old: list[ir.Value] = []
        new: list[ir.Value] = []
        if p.is_graph_output():
            return Refusal(node.name or "", f"the probabilities %{p.name} are a graph output")
        for reader in readers(p):
            pairs = _without_factor(reader, p, blind)
            if isinstance(pairs, str):
                return Refusal(node.name or "", pairs)
            for a, b in pairs:
                if a not in old:
                    old.append(a)
                    new.append(b)
        factors = tuple(v.producer() for v in old)
        facts = {"new": tuple(new)}
        return Match((node, *factors), (p, *old), {"mask": mask}, facts, "softmaxes", at=node)  # type: ignore[arg-type]

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        node, new = match.nodes[0], match.facts["new"]
        scale = attribute(node, "scale", 1.0)
        inputs = (node.inputs[0], match.values["mask"])
        p = build.op("ScaledMaskedSoftmax", *inputs, domain=KERNELS, scale=scale, zero_empty_rows=1)
        p.shape = match.outputs[0].shape
        assert isinstance(new, tuple)
        return [p, *new]


def _lifted(mask: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """(Mask, blind) when ``mask`` is Max(Mask, Where(blind, 0, -inf)), blind = (ReduceMax(Mask) == -inf)."""
    lifted = producer_of(mask, "Max")
    if lifted is None or len(lifted.inputs) != 2:
        return None
    for source, floor in (lifted.inputs, lifted.inputs[::-1]):
        where = producer_of(floor, "Where")
        if where is None or (scalar(where.inputs[1]), scalar(where.inputs[2])) != (0.0, -math.inf):
            continue
        equal = producer_of(where.inputs[0], "Equal")
        highest = producer_of(equal.inputs[0], "ReduceMax") if equal is not None else None
        if equal is None or highest is None or scalar(equal.inputs[1]) != -math.inf or highest.inputs[0] is not source:
            continue
        last = (rank(source) or 0) - 1
        if source is not None and axes_of(highest) == (last,) and attribute(highest, "keepdims", 1) == 1:
            return source, equal.outputs[0]
    return None


def _without_factor(reader: ir.Node, p: ir.Value, blind: ir.Value) -> list[tuple[ir.Value, ir.Value]] | str:
    """(value with the factor, value without) for one reader of the probabilities, or why they must stay."""
    if _is(reader, "SoftmaxGrad", KERNELS) and reader.inputs[1] is p and reader.inputs[0] is not p:
        dp = reader.inputs[0]
        return _incoming(dp.producer() if dp is not None else None, blind, p)
    turned = attribute(reader, "transBatchA", 0)
    if not _is_product(reader) or turned or reader.inputs[0] is not p or reader.inputs[1] is p:
        return f"the probabilities %{p.name} are also read by {reader.op_type} {reader.name!r}"
    if attribute(reader, "transA", 0):
        return _incoming(reader.inputs[1].producer() if reader.inputs[1] is not None else None, blind, p)
    result = reader.outputs[0]
    found = next((n for n in readers(result) if _unscaled(n, blind) is result), None)
    if found is None:
        return f"%{result.name} keeps what rows without keys see"
    reason = other_reader(result, found)
    return reason if reason is not None else [(found.outputs[0], result)]


def _incoming(node: ir.Node | None, blind: ir.Value, p: ir.Value) -> list[tuple[ir.Value, ir.Value]] | str:
    """dY seeing and dY, from the node that makes dY seeing or its product with V^T."""
    if node is not None and _is_product(node):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    source = _unscaled(node, blind) if node is not None else None
    if node is None or source is None:
        return "the incoming gradient is not zeroed in rows without keys"
    for reader in readers(node.outputs[0]):
        if not _reaches_only(reader, node.outputs[0], p):
            return f"%{node.outputs[0].name} is also read by {reader.op_type} {reader.name!r}"
    if node.outputs[0].is_graph_output():
        return f"%{node.outputs[0].name} is a graph output"
    return [(node.outputs[0], source)]


def _reaches_only(reader: ir.Node, dy: ir.Value, p: ir.Value) -> bool:
    """Whether ``reader`` of dY is P^T dY, or dY V^T that only SoftmaxGrad with P reads."""
    if not _is_product(reader):
        return False
    if reader.inputs[1] is dy:
        return reader.inputs[0] is p and bool(attribute(reader, "transA", 0))
    if attribute(reader, "transA", 0) or attribute(reader, "transBatchA", 0) or reader.outputs[0].is_graph_output():
        return False
    after = readers(reader.outputs[0])
    return all(_is(n, "SoftmaxGrad", KERNELS) and n.inputs[1] is p for n in after)


def _unscaled(node: ir.Node, blind: ir.Value) -> ir.Value | None:
    """X of Mul(X, Cast(Not(blind)))."""
    if not _is(node, "Mul", ""):
        return None
    for i, factor in enumerate(node.inputs):
        cast = producer_of(factor, "Cast")
        negated = producer_of(cast.inputs[0], "Not") if cast is not None else None
        if negated is not None and negated.inputs[0] is blind:
            return node.inputs[1 - i]
    return None


def _is(node: ir.Node, op_type: str, domain: str) -> bool:
    return node.op_type == op_type and (node.domain == domain or (not domain and node.domain == "ai.onnx"))


def _is_product(node: ir.Node) -> bool:
    return _is(node, "MatMul", "") or _is(node, "FusedMatMul", CONTRIB)
