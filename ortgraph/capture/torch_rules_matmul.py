"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation


@rule("mm.default", "bmm.default", "mv.default", "dot.default", "matmul.default")
def _mm(t: Translation, **operands: Any) -> ir.Value:
    a, b = (v for v in operands.values())
    return t.op("MatMul", a, b)


@rule("addmm.default")
def _addmm(t: Translation, self: ir.Value, mat1: ir.Value, mat2: ir.Value, beta: Any, alpha: Any) -> ir.Value:
    return t.op("Gemm", mat1, mat2, self, alpha=float(alpha), beta=float(beta))


@rule("addmv.default")
def _addmv(t: Translation, self: ir.Value, mat: ir.Value, vec: ir.Value, beta: Any, alpha: Any) -> ir.Value:
    return _sum(t, self, t.op("MatMul", mat, vec), beta, alpha)


@rule("baddbmm.default")
def _baddbmm(t: Translation, self: ir.Value, batch1: ir.Value, batch2: ir.Value, beta: Any, alpha: Any) -> ir.Value:
    return _sum(t, self, t.op("MatMul", batch1, batch2), beta, alpha)


def _sum(t: Translation, addend: ir.Value, product: ir.Value, beta: Any, alpha: Any) -> ir.Value:
    dtype = t.out_dtype()
    if alpha != 1:
        product = t.op("Mul", product, t.scalar(alpha, dtype))
    if beta == 0:
        return product
    if beta != 1:
        addend = t.op("Mul", addend, t.scalar(beta, dtype))
    return t.op("Add", addend, product)


@rule("_trilinear.default")
def _trilinear(
    t: Translation, i1: ir.Value, i2: ir.Value, i3: ir.Value, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int,
) -> ir.Value:  # fmt: skip
    """The product of three tensors with dimensions put in, summed over some (nn.Bilinear and its gradients)."""
    product: ir.Value | None = None
    for value, axes in ((i1, expand1), (i2, expand2), (i3, expand3)):
        wide = t.op("Unsqueeze", value, t.build.ints(sorted(axes))) if axes else value
        product = wide if product is None else t.op("Mul", product, wide)
    assert product is not None
    return t.op("ReduceSum", product, t.build.ints(sorted(sumdim)), keepdims=0) if sumdim else product
