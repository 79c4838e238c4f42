"""Reference expansions of attention in low precision: operands of products are rounded, the softmax is in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import NAMES
from ortgraph.ops.shapes import wanted
from ortgraph.ops.spec import COMPOSITE

if TYPE_CHECKING:
    from ortgraph.ops.attention import _Probabilities

_FLOAT = ir.DataType.FLOAT


def product(
    b: Builder, x: ir.Value, y: ir.Value, low: ir.DataType, to: ir.DataType, trans: str = "", alpha: float = 1.0
) -> ir.Value:
    """Product of X and Y rounded to ``low``, summed in float32; ``trans`` names the sides that are transposed."""
    return b.op(
        "Product", x, y, domain=COMPOSITE, name="product", precision=NAMES[low], to=to, alpha=alpha,
        transA=int("A" in trans), transB=int("B" in trans),
    )  # fmt: skip


def probabilities(
    b: Builder, q: ir.Value, k: ir.Value, bias: ir.Value | None, scale: float, low: ir.DataType
) -> tuple[ir.Value, ir.Value]:
    """(Softmax(scores), scores) in float32; the same nodes in Attention and in AttentionGrad."""
    scores = product(b, q, k, low, _FLOAT, "B", scale)
    if bias is not None:
        scores = b.op("Add", scores, bias)
    return b.op("Softmax", scores, axis=-1), scores


def values(
    b: Builder, p: ir.Value, v: ir.Value, low: ir.DataType, to: ir.DataType, seeing: ir.Value | None
) -> ir.Value:
    """Y = P V in the type ``to``."""
    y = product(b, p, v, low, to if seeing is None else _FLOAT)
    if seeing is None:
        return y
    y = b.op("Mul", y, seeing)
    return y if to == _FLOAT else b.op("Cast", y, to=to)


def attention_grad(
    b: Builder, node: ir.Node, inputs: tuple[ir.Value, ...], parts: _Probabilities, scale: float, low: ir.DataType
) -> list[ir.Value | None]:
    """dQ, dK and dV in the types of Q, K and V; dP and dS stay in float32.

    Args:
        inputs: dY, Q, K, V, Y.
        parts: The probabilities.
        scale: Factor on the scores.
        low: What operands are rounded to.
    """
    dy, q, k, v, y = inputs
    to = q.dtype
    assert to is not None
    exact = b.op("Cast", dy if dy.dtype == low else b.op("Cast", dy, to=low), to=_FLOAT)
    if parts.seeing is not None:
        exact = dy = b.op("Mul", exact, parts.seeing)
    results: list[ir.Value | None] = [None, None, None]
    if wanted(node, 2):
        results[2] = product(b, parts.used, dy, low, to, "A")
    if not (wanted(node, 0) or wanted(node, 1)):
        return results
    dp = parts.slope(b, product(b, dy, v, low, _FLOAT, "B"))
    wide = y if y.dtype == _FLOAT else b.op("Cast", y, to=_FLOAT)
    along = b.op("ReduceSum", b.op("Mul", exact, wide), b.ints([-1]), keepdims=1)
    ds = b.op("Mul", parts.p, b.op("Sub", dp, along))
    if wanted(node, 0):
        results[0] = product(b, ds, k, low, to, "", scale)
    if wanted(node, 1):
        results[1] = product(b, ds, q, low, to, "A", scale)
    return results
