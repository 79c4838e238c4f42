"""FuseMaskedSoftmax: scale and mask of attention scores go into the softmax kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.fusion.operands import producer_of, rank, same_shape, with_constant
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite, other_reader


@dataclasses.dataclass(frozen=True)
class FuseMaskedSoftmax(KernelRewrite):
    """Softmax(scale S + Mask) = ScaledMaskedSoftmax(S, Mask), over the last axis; scale is a constant, 1 if absent.

    Refuses when:
        another axis than the last;
        the masked scores are a graph output or have another reader;
        neither operand of the sum has the shape of the scores with the other broadcast to it by known dimensions;
        the element type is not float32.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "fuse-masked-softmax"
    roots: ClassVar[frozenset[str]] = frozenset({"Softmax", f"{KERNELS}.Softmax"})

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        total = producer_of(node.inputs[0], "Add")
        if total is None:
            return None
        n = rank(node.inputs[0])
        if n is None or attribute(node, "axis", -1) not in (-1, n - 1):
            return Refusal(node.name or "", "the softmax is not over the last axis")
        operands = _operands(total)
        if operands is None:
            return Refusal(node.name or "", f"no operand of the sum %{total.outputs[0].name} is a mask of known shape")
        scores, mask = operands
        product = producer_of(scores, "Mul")
        scaled = with_constant(product) if product is not None else None
        if product is None or scaled is None or not same_shape(scaled[0], scores) or other_reader(scores, total):
            return Match((total, node), (node.outputs[0],), {"x": scores, "mask": mask}, {"scale": 1.0}, "masked")
        values: dict[str, ir.Value | None] = {"x": scaled[0], "mask": mask}
        return Match((product, total, node), (node.outputs[0],), values, {"scale": scaled[1]}, "scaled_and_masked")

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        dtype = match.outputs[0].dtype
        return None if dtype == ir.DataType.FLOAT else f"element type {dtype}"

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        x, mask, scale = match.values["x"], match.values["mask"], match.facts["scale"]
        made = build.op("ScaledMaskedSoftmax", x, mask, domain=KERNELS, scale=scale)
        made.shape = match.outputs[0].shape
        return [made]


def _operands(total: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """(scores, mask) of a sum: the scores have the shape of the sum, the mask broadcasts to it."""
    a, b = total.inputs
    assert a is not None and b is not None
    pairs = [(x, y) for x, y in ((a, b), (b, a)) if same_shape(x, total.outputs[0]) and _broadcasts_to(y, x)]
    # Where both have the shape of the sum, the product is the scores.
    return min(pairs, key=lambda pair: producer_of(pair[0], "Mul", "MatMul") is None, default=None)


def _broadcasts_to(mask: ir.Value, scores: ir.Value) -> bool:
    if mask.shape is None or scores.shape is None or len(mask.shape) > len(scores.shape):
        return False
    lead = len(scores.shape) - len(mask.shape)
    # Dimensions without a name are equal to nothing, not even to each other.
    return all(
        m == 1 or (m == s and (isinstance(m, int) or m.value is not None))
        for m, s in zip(mask.shape, list(scores.shape)[lead:], strict=True)
    )
