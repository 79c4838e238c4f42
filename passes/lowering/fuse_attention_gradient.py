"""FuseAttentionGradient: the gradient of attention probabilities in one kernel."""

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
from ortgraph.ops.spec import CONTRIB, KERNELS
from ortgraph.passes.fusion.operands import axes_of, permutation, producer_of, rank, same_shape
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite, readers

_PLAIN = {"transA": 0, "transB": 0, "transBatchA": 0, "transBatchB": 0, "alpha": 1.0}


@dataclasses.dataclass(frozen=True)
class FuseAttentionGradient(KernelRewrite):
    """P (dY V^T - sum(dY Y)) = SoftmaxGrad(dY V^T, P) for Y = P V and a softmax P over its last axis.

    sum(dY Y) over the values equals sum(P dP) over the keys, which the kernel takes from what it reads anyway. Y may
    be zeroed by rows (rows that see no key) when it is multiplied by a cast of booleans, and so is dY.

    Refuses when:
        dY, P or V is not the same value in all places;
        the sum is not over the last axis;
        the element type is not float32.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "fuse-attention-gradient"
    roots: ClassVar[frozenset[str]] = frozenset({"Softmax", f"{KERNELS}.Softmax", f"{KERNELS}.ScaledMaskedSoftmax"})
    shared_inner: ClassVar[str] = "keep"

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        p, reasons = node.outputs[0], []
        for product in readers(p):
            if product.op_type != "Mul" or product.domain not in ("", "ai.onnx"):
                continue
            found = _gradient(product, p)
            if isinstance(found, Match):
                n = rank(p)
                if n is None or attribute(node, "axis", -1) not in (-1, n - 1):
                    return Refusal(product.name or "", "the softmax is not over the last axis")
                return found
            reasons += [Refusal(product.name or "", found)] if found else []
        return reasons[0] if reasons else None

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        dtype = match.outputs[0].dtype
        return None if dtype == ir.DataType.FLOAT else f"element type {dtype}"

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        return [build.op("SoftmaxGrad", match.values["dp"], match.values["p"], domain=KERNELS, axis=-1)]


def _gradient(product: ir.Node, p: ir.Value) -> Match | str | None:
    """The match that ends in ``product`` = P (dP - sum(dY Y)), a reason, or None when it is another product."""
    other = product.inputs[1] if product.inputs[0] is p else product.inputs[0]
    difference = producer_of(other, "Sub")
    if difference is None:
        return None
    dp, along = difference.inputs
    total = producer_of(along, "ReduceSum")
    weighted = producer_of(total.inputs[0], "Mul") if total is not None else None
    turned = _second_turned(dp)
    if total is None or weighted is None or turned is None or dp is None:
        return None
    if axes_of(total) != ((rank(total.inputs[0]) or 0) - 1,) or attribute(total, "keepdims", 1) != 1:
        return "the sum is not over the last axis"
    if not same_shape(dp, p):
        return f"%{dp.name} has another shape than the probabilities"
    dy, v = turned
    if dy not in weighted.inputs:
        return f"the sum %{total.outputs[0].name} is not weighted by %{dy.name}"
    y = weighted.inputs[1] if weighted.inputs[0] is dy else weighted.inputs[0]
    if _source(y, dy) != (p, v):
        return f"%{y.name if y is not None else ''} is not the product of %{p.name} and %{v.name}"
    return Match((weighted, total, difference, product), (product.outputs[0],), {"dp": dp, "p": p}, count="gradients")


def _source(y: ir.Value | None, dy: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """(P, V) where y = P V, or y = P V seeing with dY = .. seeing, ``seeing`` being 0 or 1."""
    zeroed, outer = producer_of(y, "Mul"), producer_of(dy, "Mul")
    if zeroed is not None and outer is not None:
        for i, seeing in enumerate(zeroed.inputs):
            cast = producer_of(seeing, "Cast")
            source = cast.inputs[0] if cast is not None else None
            if source is not None and source.dtype == ir.DataType.BOOL and seeing in outer.inputs:
                y = zeroed.inputs[1 - i]
                break
    made = producer_of(y, "MatMul") or producer_of(y, "FusedMatMul", domain=CONTRIB)
    return _operands(made, {}) if made is not None else None


def _second_turned(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """(A, B) where value = A B^T over the last two dimensions."""
    fused = producer_of(value, "FusedMatMul", domain=CONTRIB)
    if fused is not None:
        return _operands(fused, {"transB": 1})
    made = producer_of(value, "MatMul")
    turn = producer_of(made.inputs[1], "Transpose") if made is not None else None
    if made is None or turn is None or made.inputs[0] is None or turn.inputs[0] is None:
        return None
    perm = permutation(turn) or ()
    n = len(perm)
    return (made.inputs[0], turn.inputs[0]) if perm == (*range(n - 2), n - 1, n - 2) else None


def _operands(product: ir.Node, form: dict[str, int]) -> tuple[ir.Value, ir.Value] | None:
    a, b = product.inputs[:2]
    if a is None or b is None or any(attribute(product, k, d) != form.get(k, d) for k, d in _PLAIN.items()):
        return None
    return a, b
