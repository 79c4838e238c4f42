"""Operator table: scaled dot-product attention and its gradient."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from ortgraph.ops import attention_low
from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import is_low
from ortgraph.ops.shapes import (
    Types,
    attribute,
    decimal,
    element_count,
    given,
    operands,
    rank_of,
    retyped,
    shape_of,
    static_dim,
    typed,
    wanted,
)
from ortgraph.ops.spec import COMPOSITE, OpSpec, register


@dataclasses.dataclass(frozen=True)
class _Probabilities:
    """P = Softmax(scores); ``scaled`` is scale Q (None in low precision, where products scale); ``seeing`` is 1 for
    rows with a key to see (None: all rows)."""

    p: ir.Value
    scores: ir.Value
    scaled: ir.Value | None
    seeing: ir.Value | None


def _swap_last(b: Builder, value: ir.Value, rank: int) -> ir.Value:
    return b.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])


def _inside(q: ir.Value) -> ir.DataType:
    """The type of scores and probabilities."""
    return ir.DataType.FLOAT if is_low(q) or q.dtype is None else q.dtype


def _bias(b: Builder, node: ir.Node, q: ir.Value, k: ir.Value, mask: ir.Value | None) -> ir.Value | None:
    """What is added to the scores: the mask and the causal triangle."""
    if not attribute(node, "is_causal", 0):
        return mask
    rows, keys = static_dim(node, q, -2, "Q"), static_dim(node, k, -2, "K")
    triangle = np.where(np.arange(keys)[None, :] > np.arange(rows)[:, None], -np.inf, 0.0)
    causal = b.const(triangle.astype(_inside(q).numpy()), name="causal")
    return causal if mask is None else b.op("Add", mask, causal)


def _probabilities(b: Builder, node: ir.Node, q: ir.Value, k: ir.Value, mask: ir.Value | None) -> _Probabilities:
    """The same nodes in Attention and in AttentionGrad, so that CSE leaves one copy."""
    bias, seeing = _bias(b, node, q, k, mask), None
    if bias is not None and mask is not None:
        # A row whose keys are all masked by -inf has probability 0 everywhere (PyTorch), not NaN: such rows are
        # lifted to finite scores here, and their result is multiplied by 0.
        highest = b.op("ReduceMax", bias, b.ints([-1]), keepdims=1)
        blind = b.op("Equal", highest, b.scalar(-np.inf, bias))
        floor = b.op("Where", blind, b.scalar(0.0, bias), b.scalar(-np.inf, bias))
        bias = b.op("Max", bias, floor)
        seeing = b.op("Cast", b.op("Not", blind), to=_inside(q))
    if is_low(q):
        p, scores = attention_low.probabilities(b, q, k, bias, _scale(node, q))
        return _Probabilities(p, scores, None, seeing)
    scaled = b.op("Mul", q, b.scalar(_scale(node, q), q))
    scores = b.op("MatMul", scaled, _swap_last(b, k, rank_of(node, k, "K")))
    if bias is not None:
        scores = b.op("Add", scores, bias)
    return _Probabilities(b.op("Softmax", scores, axis=-1), scores, scaled, seeing)


def _scale(node: ir.Node, q: ir.Value) -> float:
    """The scale; 1 / sqrt(D) exactly when the float32 attribute stands for it."""
    given_scale = decimal(node, "scale", 1.0) if "scale" in node.attributes else None
    width = q.shape[-1] if q.shape is not None else None
    if given_scale is not None and not isinstance(width, int):
        return given_scale
    usual = 1.0 / float(np.sqrt(static_dim(node, q, -1, "Q")))
    return usual if given_scale is None or abs(given_scale / usual - 1.0) < 1e-6 else given_scale


def _expand_attention(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    q, k, v = operands(node, 3)
    parts = _probabilities(b, node, q, k, given(node, 3))
    if is_low(q):
        return attention_low.attention(b, node, parts.p, parts.scores, v, parts.seeing)
    y, total = None, None
    if wanted(node, 0):
        y = b.op("MatMul", parts.p, v)
        y = y if parts.seeing is None else b.op("Mul", y, parts.seeing)
    if wanted(node, 1):
        total = b.op("ReduceLogSumExp", parts.scores, b.ints([-1]), keepdims=0)
    return [y, total]


def _expand_attention_grad(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    dy, q, k, v, y = operands(node, 5)
    parts = _probabilities(b, node, q, k, given(node, 6))
    if parts.scaled is None:
        return attention_low.attention_grad(b, node, (dy, q, k, v, y), parts.p, parts.seeing, _scale(node, q))
    rank = rank_of(node, q, "Q")
    if parts.seeing is not None:
        dy = b.op("Mul", dy, parts.seeing)
    results: list[ir.Value | None] = [None, None, None]
    if wanted(node, 2):
        results[2] = b.op("MatMul", _swap_last(b, parts.p, rank), dy)
    if not (wanted(node, 0) or wanted(node, 1)):
        return results
    dp = b.op("MatMul", dy, _swap_last(b, v, rank))
    # sum(P dP) over keys equals sum(dY Y) over the narrower last axis.
    along = b.op("ReduceSum", b.op("Mul", dy, y), b.ints([-1]), keepdims=1)
    ds = b.op("Mul", parts.p, b.op("Sub", dp, along))
    if wanted(node, 0):
        results[0] = b.op("Mul", b.op("MatMul", ds, k), b.scalar(_scale(node, q), q))
    if wanted(node, 1):
        results[1] = b.op("MatMul", _swap_last(b, ds, rank), parts.scaled)
    return results


def _attention_types(node: ir.Node) -> Types:
    q, v = shape_of(given(node, 0)), shape_of(given(node, 2))
    y = None if q is None or v is None else (*q[:-1], v[-1])
    query = node.inputs[0]
    total = None if query is None or query.dtype is None else (_inside(query), None if q is None else q[:-1])
    return [retyped(query, y), total][: len(node.outputs)]


def _attention_grad_types(node: ir.Node) -> Types:
    return [typed(given(node, i)) for i in (1, 2, 3)][: len(node.outputs)]


def _products(node: ir.Node, q: int, products: int) -> int:
    """Products of [S, D] by [D, T] size, and the passes over the scores."""
    query, key = given(node, q), given(node, q + 1)
    keys = shape_of(key)
    if keys is None or not isinstance(keys[-2], int):
        return 0
    width = keys[-1] if isinstance(keys[-1], int) else 0
    return element_count(query) * keys[-2] * 2 * products + 6 * (element_count(query) // max(width, 1)) * keys[-2]


register(
    OpSpec(
        COMPOSITE,
        "Attention",
        precision="low",
        low_inputs=(0, 1, 2),
        low_outputs=(0,),
        expands_low=True,
        infer=_attention_types,
        expand=_expand_attention,
        flops=lambda node: _products(node, 0, 2),
        doc="P = Softmax(scale Q K^T + Mask); Y = P V; LogSumExp over keys of the scores",
    ),
    OpSpec(
        COMPOSITE,
        "AttentionGrad",
        precision="low",
        low_inputs=(0, 1, 2, 3, 4),
        low_outputs=(0, 1, 2),
        expands_low=True,
        infer=_attention_grad_types,
        expand=_expand_attention_grad,
        flops=lambda node: _products(node, 1, 5),
        doc="dV = P^T dY; dS = P (dY V^T - sum(dY Y)); dQ = scale dS K; dK = scale dS^T Q",
    ),
)
