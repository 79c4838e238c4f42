"""Reference expansions of attention on low-precision Q, K and V: products in that precision, the softmax in float32."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import NAMES
from ortgraph.ops.shapes import wanted
from ortgraph.ops.spec import COMPOSITE

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
    b: Builder, q: ir.Value, k: ir.Value, bias: ir.Value | None, scale: float
) -> tuple[ir.Value, ir.Value]:
    """(Softmax(scores), scores) in float32; the same nodes in Attention and in AttentionGrad."""
    assert q.dtype is not None
    scores = product(b, q, k, q.dtype, _FLOAT, "B", scale)
    if bias is not None:
        scores = b.op("Add", scores, bias)
    return b.op("Softmax", scores, axis=-1), scores


def attention(
    b: Builder, node: ir.Node, p: ir.Value, scores: ir.Value, v: ir.Value, seeing: ir.Value | None
) -> list[ir.Value | None]:
    """Y = P V in the type of V, and LogSumExp in float32."""
    assert v.dtype is not None
    y, total = None, None
    if wanted(node, 0):
        y = product(b, p, v, v.dtype, v.dtype if seeing is None else _FLOAT)
        y = y if seeing is None else b.op("Cast", b.op("Mul", y, seeing), to=v.dtype)
    if wanted(node, 1):
        total = b.op("ReduceLogSumExp", scores, b.ints([-1]), keepdims=0)
    return [y, total]


def attention_grad(
    b: Builder, node: ir.Node, inputs: tuple[ir.Value, ...], p: ir.Value, seeing: ir.Value | None, scale: float
) -> list[ir.Value | None]:
    """dQ, dK and dV in the types of Q, K and V; dP and dS stay in float32.

    Args:
        inputs: dY, Q, K, V, Y.
        p: The probabilities.
        seeing: 1 for rows with a key to see, 0 for others; None: all rows see one.
        scale: Factor on the scores.
    """
    dy, q, k, v, y = inputs
    low = q.dtype
    assert low is not None
    exact = b.op("Cast", dy, to=_FLOAT)
    if seeing is not None:
        exact = dy = b.op("Mul", exact, seeing)
    results: list[ir.Value | None] = [None, None, None]
    if wanted(node, 2):
        results[2] = product(b, p, dy, low, low, "A")
    if not (wanted(node, 0) or wanted(node, 1)):
        return results
    dp = product(b, dy, v, low, _FLOAT, "B")
    along = b.op("ReduceSum", b.op("Mul", exact, b.op("Cast", y, to=_FLOAT)), b.ints([-1]), keepdims=1)
    ds = b.op("Mul", p, b.op("Sub", dp, along))
    if wanted(node, 0):
        results[0] = product(b, ds, k, low, low, "", scale)
    if wanted(node, 1):
        results[1] = product(b, ds, q, low, low, "A", scale)
    return results
