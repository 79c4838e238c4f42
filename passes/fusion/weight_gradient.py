"""FuseWeightGradient: the sum over the batch happens inside one product."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match, RewritePass
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import CONTRIB
from ortgraph.passes.fusion.operands import FLOATS, axes_of, permutation, producer_of, rank


@dataclasses.dataclass(frozen=True)
class FuseWeightGradient(RewritePass):
    """ReduceSum(MatMul(X^T, dY), batch axes) = Gemm(X viewed [rows, K], dY viewed [rows, N], transA=1).

    X is [batch.., M, K], dY [batch.., M, N], summed over every batch dimension. On two cores, 8x128 rows of 1024 by
    256: batched FusedMatMul + ReduceSum 4.74 ms, one Gemm 3.07.

    Refuses when:
        the batched product is read elsewhere or is a graph output;
        the sum leaves a batch dimension, takes the last two, or keeps summed dimensions;
        an operand is broadcast over the batch, or K or N is unknown;
        the element type is neither float32 nor float64.
    """

    name: ClassVar[str] = "fuse-weight-gradient"
    roots: ClassVar[frozenset[str]] = frozenset({"ReduceSum"})

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        value = node.inputs[0]
        product = producer_of(value, "MatMul") or producer_of(value, "FusedMatMul", domain=CONTRIB)
        if product is None or (rank(value) or 0) < 3:
            return None
        x, dy = product.inputs[:2]
        assert x is not None and dy is not None
        nodes: tuple[ir.Node, ...] = (product, node)
        transpose = producer_of(x, "Transpose")
        perm = None if transpose is None else permutation(transpose)
        if perm is not None and perm == (*range(len(perm) - 2), len(perm) - 1, len(perm) - 2):
            x, flipped = transpose.inputs[0], not attribute(product, "transA", 0)  # type: ignore[union-attr]
        else:
            flipped = bool(attribute(product, "transA", 0))
        if not flipped:
            return Refusal(node.name or "", "the left operand is not transposed: the rows are not what is summed")
        return Match(nodes, (node.outputs[0],), {"x": x, "dy": dy}, {"product": product})

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        product, node = match.nodes
        x, dy = match.values["x"], match.values["dy"]
        assert x is not None and dy is not None
        if node.outputs[0].dtype not in FLOATS:
            return f"element type {node.outputs[0].dtype}: Gemm runs in float32 and float64"
        if any(attribute(product, k, 0) for k in ("transB", "transBatchA", "transBatchB")):
            return "the right operand or the batch dimensions are transposed"
        n = rank(product.outputs[0])
        assert n is not None
        if axes_of(node) != tuple(range(n - 2)):
            return f"sums over axes {axes_of(node)}, not over all batch dimensions"
        if attribute(node, "keepdims", 1):
            return "keeps the summed dimensions"
        if rank(x) != n or rank(dy) != n or list(x.shape)[:-1] != list(dy.shape)[:-1]:  # type: ignore[arg-type]
            return "an operand is broadcast over the batch"
        if not all(isinstance(v.shape[-1], int) for v in (x, dy)):  # type: ignore[index]
            return "the width of an operand is not known"
        return None

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        rows = [
            build.op("Reshape", v, build.ints([-1, int(v.shape[-1])]))  # type: ignore[union-attr, index, arg-type]
            for v in (match.values["x"], match.values["dy"])
        ]
        return [build.op("Gemm", *rows, transA=1, alpha=attribute(match.nodes[0], "alpha"))]
