"""FuseMatmulScale: a constant factor becomes the product's alpha."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match, RewritePass, op_key
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import CONTRIB
from ortgraph.passes.fusion.operands import FLOAT32, producer_of, rank, with_constant

_PRODUCTS = frozenset({"MatMul", "Gemm", f"{CONTRIB}.FusedMatMul"})
_LARGEST = float(2**127)  # of float32, the type of alpha


@dataclasses.dataclass(frozen=True)
class FuseMatmulScale(RewritePass):
    """c MatMul(A, B) = MatMul(c A, B) = FusedMatMul(A, B, alpha=c); also x / c, and Gemm's alpha and beta.

    A factor behind the product is folded when it is the product's only reader. A factor before is folded when all
    that read the scaled operand are products, each of which then takes the factor (the scores' gradient, which the
    gradients of query and key both read).

    Refuses when:
        the product is read elsewhere, or the scaled operand is read by anything but products;
        either is a graph output;
        the number is divided by the value instead of dividing it, is zero, or makes alpha no finite float32;
        the element type is not float32.
    """

    name: ClassVar[str] = "fuse-matmul-scale"
    roots: ClassVar[frozenset[str]] = frozenset({"Mul", "Div", *_PRODUCTS})
    shared_inner: ClassVar[str] = "keep"  # check looks at the readers itself

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        if node.op_type in ("Mul", "Div"):
            return _behind(node)
        inputs, factor, scalings, reason = list(node.inputs), 1.0, [], None
        for i in (0, 1):
            peeled = _peel(node.inputs[i])
            if isinstance(peeled, str):
                reason = reason or peeled
                continue
            inputs[i] = peeled[0]
            factor *= peeled[1]
            scalings += [n for n in peeled[2] if n not in scalings]
        if not scalings:
            return Refusal(node.name or "", reason) if reason else None
        return Match((*scalings, node), (node.outputs[0],), {}, {"inputs": inputs, "factor": factor, "beta": 1.0})

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        dtype = match.outputs[0].dtype
        if dtype != FLOAT32:
            return f"element type {dtype}: alpha is a float32 and FusedMatMul runs in float32 only"
        product = _product(match)
        alpha = match.facts["factor"] * attribute(product, "alpha", 1.0)
        if alpha == 0.0 or not abs(alpha) <= _LARGEST:
            return f"alpha would be {alpha}"
        if product is match.nodes[0]:
            return _only_read_by(product.outputs[0], match.nodes[-1])
        return None

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        product, inputs = _product(match), match.facts["inputs"]
        assert isinstance(inputs, list)
        options = {k: a.value for k, a in product.attributes.items()}
        options["alpha"] = float(attribute(product, "alpha", 1.0) * match.facts["factor"])
        if given(product, 2) is not None:
            options["beta"] = float(attribute(product, "beta", 1.0) * match.facts["beta"])
        is_matrix = all(rank(v) == 2 for v in inputs[:2]) and not any(k.startswith("transBatch") for k in options)
        if is_matrix:
            made = build.op("Gemm", *inputs, **options)
        else:
            made = build.op("FusedMatMul", *inputs, domain=CONTRIB, **options)
        made.shape = match.outputs[0].shape
        return [made]


def _product(match: Match) -> ir.Node:
    first, last = match.nodes[0], match.nodes[-1]
    return last if op_key(last) in _PRODUCTS else first


def _behind(node: ir.Node) -> Match | Refusal | None:
    """A product, then a factor."""
    found = with_constant(node)
    product = None if found is None else found[0].producer()
    if found is None or product is None or op_key(product) not in _PRODUCTS:
        return None
    factor = _factor(node, found[1], found[2])
    if isinstance(factor, str):
        return Refusal(node.name or "", factor)
    facts = {"inputs": list(product.inputs), "factor": factor, "beta": factor}
    return Match((product, node), (node.outputs[0],), {}, facts)


def _peel(value: ir.Value | None) -> tuple[ir.Value | None, float, list[ir.Node]] | str:
    """(operand without its factors, their product, their nodes), or the reason why the first is not taken."""
    factor = 1.0
    scalings: list[ir.Node] = []
    while (node := producer_of(value, "Mul", "Div")) is not None and (found := with_constant(node)) is not None:
        number = _factor(node, found[1], found[2])
        if not isinstance(number, str):
            reason = (
                _only_products_read(node.outputs[0]) if not scalings else _only_read_by(node.outputs[0], scalings[-1])
            )
            number = number if reason is None else reason
        if isinstance(number, str):
            return (value, factor, scalings[::-1]) if scalings else number
        factor *= number
        scalings.append(node)
        value = found[0]
    return value, factor, scalings[::-1]


def _only_products_read(value: ir.Value) -> str | None:
    if value.is_graph_output():
        return f"the scaled value %{value.name} is a graph output"
    for use in value.uses():
        if op_key(use.node) not in _PRODUCTS or use.idx > 1:
            return f"the scaled value %{value.name} is also read by {use.node.op_type} {use.node.name!r}"
    return None


def _only_read_by(value: ir.Value, reader: ir.Node) -> str | None:
    if value.is_graph_output():
        return f"inner value %{value.name} is a graph output"
    other = next((u.node for u in value.uses() if u.node is not reader), None)
    return None if other is None else f"inner value %{value.name} is also read by {other.op_type} {other.name!r}"


def _factor(node: ir.Node, number: float, position: int) -> float | str:
    if number == 0.0:
        return "the factor is zero"
    if node.op_type == "Mul":
        return number
    if position == 0:
        return "the constant is divided by the value, not the value by it"
    return 1.0 / number if math.isfinite(1.0 / number) else f"division by {number}"
