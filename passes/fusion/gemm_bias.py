"""FuseGemmBias: a bias is added by the product itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match, RewritePass
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import CONTRIB
from ortgraph.passes.fusion.operands import FLOATS, rank, reshape_dims


@dataclasses.dataclass(frozen=True)
class FuseGemmBias(RewritePass):
    """Add(MatMul(A, W), b) = Gemm(A, W, b), with A [.., M, K], W [K, N], b [N].

    Also from FusedMatMul (scale, transposed W) and from a Gemm without bias. An A of more than two dimensions is
    viewed as [rows, K] by Reshape, and the result viewed back; neighbouring Reshapes cancel
    (``simplify-reshapes``). Reshape + Gemm + Reshape costs what the N-D product costs, and the Add is saved.

    Refuses when:
        the product is read elsewhere or is a graph output;
        the bias is not one row: wrong length, a full matrix, or more than two dimensions;
        W is not two-dimensional, or A has two unknown leading dimensions;
        the element type is neither float32 nor float64.
    """

    name: ClassVar[str] = "fuse-gemm-bias"
    roots: ClassVar[frozenset[str]] = frozenset({"Add"})

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        for i in (0, 1):
            value = node.inputs[i]
            product = None if value is None else value.producer()
            if product is not None and _is_product(product):
                bias = node.inputs[1 - i]
                values = {"a": product.inputs[0], "w": product.inputs[1], "bias": bias, "product": product.outputs[0]}
                return Match((product, node), (node.outputs[0],), values, {"node": product})
        return None

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        a, w, bias, product = (match.values[k] for k in ("a", "w", "bias", "product"))
        node = match.nodes[0]
        assert a is not None and w is not None and bias is not None and product is not None
        if product.dtype not in FLOATS or bias.dtype != product.dtype:
            return f"element type {product.dtype}: Gemm runs in float32 and float64"
        if w.shape is None or len(w.shape) != 2 or a.shape is None or len(a.shape) < 2:
            return "the right operand is not a matrix"
        if rank(a) != 2 and attribute(node, "transA", 0):
            return "the left operand is transposed and has batch dimensions"
        if any(attribute(node, k, 0) for k in ("transBatchA", "transBatchB")):
            return "batch dimensions are transposed"
        if product.shape is None:
            return f"the shape of the product %{product.name} is not known"
        width = product.shape[-1]
        if not isinstance(width, int) or not isinstance(w.shape[0 if not attribute(node, "transB", 0) else 1], int):
            return "the width of the product is not known"
        if bias.shape is None or not 1 <= len(bias.shape) <= 2 or bias.shape[-1] != width:
            return f"%{bias.name} is not one row of {width} elements"
        if len(bias.shape) == 2 and bias.shape[0] != 1:
            return f"%{bias.name} is a matrix, not a bias"
        if rank(a) != 2 and reshape_dims(tuple(product.shape)) is None:
            return "two or more leading dimensions are unknown: the result cannot be viewed back"
        return None

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        a, w, bias, product = (match.values[k] for k in ("a", "w", "bias", "product"))
        node = match.nodes[0]
        assert a is not None and w is not None and product is not None
        assert a.shape is not None and w.shape is not None and product.shape is not None
        options = {
            "alpha": attribute(node, "alpha"),
            "transA": attribute(node, "transA"),
            "transB": attribute(node, "transB"),
        }
        if len(a.shape) == 2:
            return [build.op("Gemm", a, w, bias, **options)]
        depth = w.shape[1 if options["transB"] else 0]
        assert isinstance(depth, int)
        rows = build.op("Reshape", a, build.ints([-1, depth]))
        flat = build.op("Gemm", rows, w, bias, **options)
        back = build.op("Reshape", flat, build.ints(reshape_dims(tuple(product.shape)) or []))
        back.shape = product.shape
        return [back]


def _is_product(node: ir.Node) -> bool:
    if node.domain == CONTRIB:
        return node.op_type == "FusedMatMul"
    if node.domain not in ("", "ai.onnx"):
        return False
    return node.op_type == "MatMul" or (node.op_type == "Gemm" and given(node, 2) is None)
