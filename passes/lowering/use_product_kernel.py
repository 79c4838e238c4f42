"""UseProductKernel: float32 products of a form that the compiled kernel is faster at go there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import CONTRIB, KERNELS
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite

_LEAST_COLUMNS = 16  # a vector of the kernel
_LEAST_WORK = 1 << 22  # multiplications: below, calls and packing decide


@dataclasses.dataclass(frozen=True)
class UseProductKernel(KernelRewrite):
    """Gemm(A, B, C?) = kernels.Product(A, B, Bias?, Addend?) with transA=1, or with a row of numbers as C.

    These are the gradients of weights and the products with a bias. ONNX Runtime packs rows of A that lie across, where the
    kernel reads them in place, and writes the bias into the result first, to read it again. Measured, GFLOP/s, runtime
    against kernel, M x N x K. transA, one thread: 8192 x 256 x 512: 167 and 214; 704 x 256 x 512: 199 and 210;
    256 x 256 x 512: 197 and 230; 1024 x 256 x 1024: 192 and 216; 3072 x 768 x 512: 193 and 236. Bias, in a step on two
    threads: 1024 x 1024 x 256: 338 and 415; 1024 x 768 x 256: 326 and 433; 1024 x 256 x 1024: 396 and 427, with transB 390
    and 381; 1024 x 256 x 256 with transB: 312 and 376. All else is as fast or faster in the runtime (512 x 704 x 256:
    240 and 228), so it stays.

    Refuses when:
        neither transA nor a row is there;
        the element type is not float32, an operand is no matrix, a dimension is not known;
        the result has fewer than 16 columns, or the product fewer than 2^22 multiplications;
        C is neither a row of N numbers nor of the result's shape, or beta is not 1.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "use-product-kernel"
    roots: ClassVar[frozenset[str]] = frozenset({"Gemm", f"{CONTRIB}.FusedMatMul"})

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        c = given(node, 2)
        if not attribute(node, "transA", 0) and (c is None or c.shape is None or len(c.shape) != 1):
            return Refusal(
                node.name or "", "rows of A lie along and there is no bias: the runtime's product is as fast"
            )
        return Match((node,), (node.outputs[0],), count="products")

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        node = match.nodes[0]
        if any(v is not None and v.dtype != ir.DataType.FLOAT for v in node.inputs):
            return "an element type that is not float32"
        sizes = _sizes(node)
        if sizes is None:
            return "an operand is no matrix of a known shape"
        if any(attribute(node, name, 0) for name in ("transBatchA", "transBatchB")):
            return "batches change places"
        rows, columns, inner = sizes
        if columns < _LEAST_COLUMNS or rows * columns * inner < _LEAST_WORK:
            return f"{rows} x {columns} x {inner} is too small"
        c = given(node, 2)
        if c is None:
            return None
        if attribute(node, "beta", 1.0) != 1.0:
            return "the addend is scaled"
        return None if static_shape(c) in ((columns,), (rows, columns)) else f"the shape of the addend %{c.name}"

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        node = match.nodes[0]
        inputs, c = [*node.inputs[:2]], given(node, 2)
        if c is not None:
            inputs += [c] if c.shape is not None and len(c.shape) == 1 else [None, c]
        made = build.op(
            "Product", *inputs, domain=KERNELS, transA=attribute(node, "transA", 0),
            transB=attribute(node, "transB", 0), alpha=float(attribute(node, "alpha", 1.0)), precision="fp32",
        )  # fmt: skip
        made.shape = match.outputs[0].shape
        return [made]


def _sizes(node: ir.Node) -> tuple[int, int, int] | None:
    """Rows, columns and inner dimension; None where an operand is no matrix of a known shape."""
    a, b = (static_shape(v) if v is not None else None for v in node.inputs[:2])
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return None
    rows, inner = a[::-1] if attribute(node, "transA", 0) else a
    return rows, b[0 if attribute(node, "transB", 0) else 1], inner
