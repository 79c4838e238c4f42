"""Operator table: scaled dot-product attention and its gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops import attention_low
from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import FP32, PRECISIONS, is_low
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
from ortgraph.ops.spec import COMPOSITE, OpSpec, Shape, register

HEADS_FIRST, ROWS_FIRST = "bhsd", "bshd"  # layouts [B, H, S, D] and [B, S, H, D]
_TURN = [0, 2, 1, 3]
_Q, _K, _V, _Y = range(4)


@dataclasses.dataclass(frozen=True)
class _Probabilities:
    """P = Softmax(scores); ``scaled`` is scale Q (None in low precision, where products scale); ``seeing`` is 1 for
    rows with a key to see (None: all rows); ``kept`` are the probabilities after dropout and its mask."""

    p: ir.Value
    scores: ir.Value
    scaled: ir.Value | None
    seeing: ir.Value | None
    kept: tuple[ir.Value, ir.Value] | None
    draw: Mapping[str, Any]

    @property
    def used(self) -> ir.Value:
        """What values are weighted with."""
        return self.p if self.kept is None else self.kept[0]

    def slope(self, b: Builder, dp: ir.Value) -> ir.Value:
        """The gradient of P from that of the weights."""
        if self.kept is None:
            return dp
        return b.op("DropoutGrad", dp, self.kept[1], domain=COMPOSITE, ratio=self.draw["ratio"], draw=self.draw["node"])


def _swap_last(b: Builder, value: ir.Value, rank: int) -> ir.Value:
    return b.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])


def _inside(q: ir.Value) -> ir.DataType:
    """The type of scores and probabilities."""
    return ir.DataType.FLOAT if is_low(q) or q.dtype is None else q.dtype


def low_type(node: ir.Node, q: ir.Value) -> ir.DataType | None:
    """What operands of products are rounded to; None when they are taken as they are."""
    named = attribute(node, "precision")
    if named is not None and named != FP32:
        return PRECISIONS[named]
    return q.dtype if named is None and is_low(q) else None


def layouts(node: ir.Node) -> tuple[str, ...]:
    """The layouts of Q, K, V and Y; their gradients have the same."""
    words = str(attribute(node, "layout", HEADS_FIRST)).split(",")
    return tuple(words * 4 if len(words) == 1 else words)


def is_rows_first(node: ir.Node, tensor: int) -> bool:
    """Whether Q, K, V or Y (0 to 3) lies as [B, S, H, D]."""
    return layouts(node)[tensor] == ROWS_FIRST


def _turned(b: Builder, node: ir.Node, value: ir.Value, tensor: int) -> ir.Value:
    """From the layout of the node to [B, H, S, D], or back."""
    return b.op("Transpose", value, perm=_TURN) if is_rows_first(node, tensor) else value


def _shares(node: ir.Node, q: ir.Value, k: ir.Value) -> int:
    """Query heads per key head."""
    if rank_of(node, q, "Q") != 4:
        return 1
    heads, groups = (
        shape_of(x)[2 if is_rows_first(node, i) else 1]  # type: ignore[index]
        for x, i in ((q, _Q), (k, _K))
    )
    return heads // groups if isinstance(heads, int) and isinstance(groups, int) and groups else 1


def _repeated(b: Builder, node: ir.Node, value: ir.Value, share: int) -> ir.Value:
    """[B, G, T, D] as [B, G share, T, D]: each head as often as query heads use it."""
    if share == 1:
        return value
    groups, width = static_dim(node, value, 1, "K"), static_dim(node, value, 3, "K")
    wide = b.op("Expand", b.op("Unsqueeze", value, b.ints([2])), b.ints([1, 1, share, 1, 1]))
    return b.op("Reshape", wide, b.ints([0, groups * share, -1, width]))


def _gathered(b: Builder, node: ir.Node, gradient: ir.Value, share: int) -> ir.Value:
    """The gradient of ``_repeated``: the sum over the heads of a group."""
    if share == 1:
        return gradient
    heads, width = static_dim(node, gradient, 1, "dK"), static_dim(node, gradient, 3, "dK")
    split = b.op("Reshape", gradient, b.ints([0, heads // share, share, -1, width]))
    if is_low(gradient):
        total = b.op("ReduceSum", b.op("Cast", split, to=ir.DataType.FLOAT), b.ints([2]), keepdims=0)
        return b.op("Cast", total, to=gradient.dtype)
    return b.op("ReduceSum", split, b.ints([2]), keepdims=0)


def _bias(b: Builder, node: ir.Node, q: ir.Value, k: ir.Value, mask: ir.Value | None) -> ir.Value | None:
    """What is added to the scores: the mask and the causal triangle."""
    if mask is not None and is_low(mask):
        mask = b.op("Cast", mask, to=_inside(q))
    if not attribute(node, "is_causal", 0):
        return mask
    rows, keys = static_dim(node, q, -2, "Q"), static_dim(node, k, -2, "K")
    triangle = np.where(np.arange(keys)[None, :] > np.arange(rows)[:, None], -np.inf, 0.0)
    causal = b.const(triangle.astype(_inside(q).numpy()), name="causal")
    return causal if mask is None else b.op("Add", mask, causal)


def _probabilities(b: Builder, node: ir.Node, q: ir.Value, k: ir.Value, first: int) -> _Probabilities:
    """The same nodes in Attention and in AttentionGrad, so that CSE leaves one copy. ``first`` is the mask's input."""
    mask, key, step = (given(node, first + i) for i in range(3))
    bias, seeing = _bias(b, node, q, k, mask), None
    if bias is not None and mask is not None:
        # A row whose keys are all masked by -inf has probability 0 everywhere (PyTorch), not NaN: such rows are
        # lifted to finite scores here, and their result is multiplied by 0.
        highest = b.op("ReduceMax", bias, b.ints([-1]), keepdims=1)
        blind = b.op("Equal", highest, b.scalar(-np.inf, bias))
        floor = b.op("Where", blind, b.scalar(0.0, bias), b.scalar(-np.inf, bias))
        bias = b.op("Max", bias, floor)
        seeing = b.op("Cast", b.op("Not", blind), to=_inside(q))
    low, scaled = low_type(node, q), None
    if low is not None:
        p, scores = attention_low.probabilities(b, q, k, bias, _scale(node, q), low)
    else:
        wide = b.op("Cast", q, to=_inside(q)) if is_low(q) else q
        scaled = b.op("Mul", wide, b.scalar(_scale(node, q), wide))
        turned = _swap_last(b, k, rank_of(node, k, "K"))
        scores = b.op("MatMul", scaled, b.op("Cast", turned, to=_inside(q)) if is_low(k) else turned)
        if bias is not None:
            scores = b.op("Add", scores, bias)
        p = b.op("Softmax", scores, axis=-1)
    if key is None or step is None:
        return _Probabilities(p, scores, scaled, seeing, None, {})
    draw = {"ratio": decimal(node, "ratio", 0.0), "node": attribute(node, "node", 0)}
    kept = b.multi("Dropout", p, key, step, outputs=2, domain=COMPOSITE, **draw)
    return _Probabilities(p, scores, scaled, seeing, (kept[0], kept[1]), draw)


def _scale(node: ir.Node, q: ir.Value) -> float:
    """The scale; 1 / sqrt(D) exactly when the float32 attribute stands for it."""
    given_scale = decimal(node, "scale", 1.0) if "scale" in node.attributes else None
    width = q.shape[-1] if q.shape is not None else None
    if given_scale is not None and not isinstance(width, int):
        return given_scale
    usual = 1.0 / float(np.sqrt(static_dim(node, q, -1, "Q")))
    return usual if given_scale is None or abs(given_scale / usual - 1.0) < 1e-6 else given_scale


def _float_inside(b: Builder, node: ir.Node, values: list[ir.Value]) -> list[ir.Value]:
    """Low values whose products are float32 are cast first."""
    if low_type(node, values[0]) is not None:
        return values
    return [b.op("Cast", v, to=ir.DataType.FLOAT) if is_low(v) else v for v in values]


def _expand_attention(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    given_q = operands(node, 3)[0]
    q, k, v = (_turned(b, node, x, i) for i, x in enumerate(operands(node, 3)))
    share = _shares(node, *operands(node, 2))
    k, v = _repeated(b, node, k, share), _repeated(b, node, v, share)
    parts = _probabilities(b, node, q, k, 3)
    y, total = None, None
    low = low_type(node, q)
    if wanted(node, 0) and low is not None:
        assert given_q.dtype is not None
        y = attention_low.values(b, parts.used, v, low, given_q.dtype, parts.seeing)
    elif wanted(node, 0):
        y = b.op("MatMul", parts.used, *_float_inside(b, node, [v]))
        y = y if parts.seeing is None else b.op("Mul", y, parts.seeing)
        y = b.op("Cast", y, to=given_q.dtype) if is_low(given_q) else y
    if wanted(node, 1):
        total = b.op("ReduceLogSumExp", parts.scores, b.ints([-1]), keepdims=0)
    return [None if y is None else _turned(b, node, y, _Y), total]


def _expand_attention_grad(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    dy, q, k, v, y = (_turned(b, node, x, i) for i, x in zip((_Y, _Q, _K, _V, _Y), operands(node, 5), strict=True))
    share = _shares(node, *operands(node, 3)[1:])
    k, v = _repeated(b, node, k, share), _repeated(b, node, v, share)
    parts = _probabilities(b, node, q, k, 6)
    low = low_type(node, q)
    if low is not None:
        made = attention_low.attention_grad(b, node, (dy, q, k, v, y), parts, _scale(node, q), low)
    else:
        made = _gradients(b, node, _float_inside(b, node, [dy, q, k, v, y]), parts)
    results: list[ir.Value | None] = []
    for i, gradient in enumerate(made):
        if gradient is not None and is_low(q) and not is_low(gradient):
            gradient = b.op("Cast", gradient, to=q.dtype)
        if gradient is not None and i > 0:
            gradient = _gathered(b, node, gradient, share)
        results.append(None if gradient is None else _turned(b, node, gradient, i))
    return results


def _gradients(b: Builder, node: ir.Node, inputs: list[ir.Value], parts: _Probabilities) -> list[ir.Value | None]:
    dy, q, k, v, y = inputs
    rank = rank_of(node, q, "Q")
    if parts.seeing is not None:
        dy = b.op("Mul", dy, parts.seeing)
    results: list[ir.Value | None] = [None, None, None]
    if wanted(node, 2):
        results[2] = b.op("MatMul", _swap_last(b, parts.used, rank), dy)
    if not (wanted(node, 0) or wanted(node, 1)):
        return results
    dp = parts.slope(b, b.op("MatMul", dy, _swap_last(b, v, rank)))
    # sum(P dP) over keys equals sum(dY Y) over the narrower last axis.
    along = b.op("ReduceSum", b.op("Mul", dy, y), b.ints([-1]), keepdims=1)
    ds = b.op("Mul", parts.p, b.op("Sub", dp, along))
    if wanted(node, 0):
        results[0] = b.op("Mul", b.op("MatMul", ds, k), b.scalar(_scale(node, q), q))
    if wanted(node, 1):
        assert parts.scaled is not None
        results[1] = b.op("MatMul", _swap_last(b, ds, rank), parts.scaled)
    return results


def _attention_types(node: ir.Node) -> Types:
    q, v = shape_of(given(node, 0)), shape_of(given(node, 2))
    if q is not None:
        q = _lie(q, is_rows_first(node, _Q))
    y = None if q is None or v is None else _lie((*q[:-1], v[-1]), is_rows_first(node, _Y))
    query = node.inputs[0]
    total = None
    if query is not None and query.dtype is not None:
        total = (_inside(query), None if q is None else q[:-1])
    return [retyped(query, y), total][: len(node.outputs)]


def _lie(shape: Shape, rows_first: bool) -> Shape:
    """A shape [B, H, S, D] in a layout, or back."""
    return (shape[0], shape[2], shape[1], shape[3]) if rows_first and len(shape) == 4 else shape


def _attention_grad_types(node: ir.Node) -> Types:
    return [typed(given(node, i)) for i in (1, 2, 3)][: len(node.outputs)]


def score_count(node: ir.Node, unknown: int = 0) -> int:
    """Scores of an Attention or AttentionGrad, B H S T; a dimension that is not a number counts as ``unknown``."""
    first = 1 if node.op_type.startswith("AttentionGrad") else 0
    q, k = shape_of(given(node, first)), shape_of(given(node, first + 1))
    if q is None or k is None:
        return 0
    keys = k[1 if is_rows_first(node, _K) else -2]
    return math.prod(d if isinstance(d, int) else unknown for d in (*q[:-1], keys))


def _products(node: ir.Node, q: int, products: int) -> int:
    """Products of [S, D] by [D, T] size, and the passes over the scores."""
    key = given(node, q + 1)
    if key is None or static_shape(key) is None or not element_count(given(node, q)):
        return 0
    return score_count(node) * (static_shape(key)[-1] * 2 * products + 6)  # type: ignore[index]


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
        optional_outputs=(0, 1),
        doc="P = Softmax(scale Q K^T + Mask); Y = Dropout(P) V; LogSumExp over keys of the scores",
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
        optional_outputs=(0, 1, 2),
        doc="dV = P^T dY; dS = P (dY V^T - sum(dY Y)); dQ = scale dS K; dK = scale dS^T Q",
    ),
)
