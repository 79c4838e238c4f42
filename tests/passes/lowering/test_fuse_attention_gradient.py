"""FuseAttentionGradient: forms of the expansion; every operand must be the right value."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.ops import kernels
from ortgraph.passes.lowering.fuse_attention_gradient import FuseAttentionGradient

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")
Q, K = (2, 3, 4, 5), (2, 3, 19, 5)


def gradient(bench, *, turn="flag", seeing="", swap=False, wrong="", axis=-1, sum_axis=-1, keep=1, dtype=None):
    """``seeing``: how Y and dY are zeroed by rows. ``wrong`` names an operand that is replaced by another value."""
    dtype = dtype or ir.DataType.FLOAT

    def pair(b, x, y):
        return b.op("Mul", *((y, x) if swap else (x, y)))

    def make(b, scores, dy, v, other_dy, other_v, other_p, rows):
        p = b.op("Softmax", scores, axis=axis)
        y = b.op("MatMul", b.op("Softmax", other_p, axis=-1) if wrong == "p" else p, v)
        if seeing:
            cast = b.op("Cast", b.op("Greater", rows, b.const(0.5, dtype)), to=dtype)
            zero = rows if seeing == "number" else cast
            y, dy = pair(b, y, zero), pair(b, dy, cast if seeing == "different" else zero)
            y = b.op("Mul", y, rows) if seeing == "different" else y
        key = other_v if wrong == "v" else v
        if turn == "flag":
            dp = b.op("FusedMatMul", dy, key, domain="com.microsoft", transB=1)
        elif turn == "scaled":
            dp = b.op("FusedMatMul", dy, key, domain="com.microsoft", transB=1, alpha=0.5)
        else:
            dp = b.op("MatMul", dy, b.op("Transpose", key, perm=[0, 1, 3, 2]))
        weighted = pair(b, other_dy if wrong == "dy" else dy, y)
        along = b.op("ReduceSum", weighted, b.ints([sum_axis]), keepdims=keep)
        along = along if keep else b.op("Unsqueeze", along, b.ints([-1]))
        return [pair(b, p, b.op("Sub", dp, along)), y]

    shapes = {"scores": (*Q[:3], 19), "dy": Q, "v": K, "other_dy": Q, "other_v": K, "other_p": (*Q[:3], 19)}
    shapes["rows"] = (2, 1, 4, 1)
    return bench.make(make, shapes, dict.fromkeys(shapes, dtype))


@pytest.mark.parametrize(
    "case", [{}, {"swap": True}, {"turn": "transpose"}, {"seeing": "cast"}, {"seeing": "cast", "swap": True}]
)
def test_hits(bench, case):
    graph = gradient(bench, **case)
    assert bench.apply(graph, FuseAttentionGradient(), tolerance=1e-6) == {"gradients": 1}
    ops = bench.ops(graph)
    assert "ortgraph.kernels.SoftmaxGrad" in ops and "Sub" not in ops and "ReduceSum" not in ops


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"wrong": "p"}, "is not the product"),
        ({"wrong": "v"}, "is not the product"),
        ({"wrong": "dy"}, "is not weighted by"),
        ({"seeing": "number"}, "is not the product"),
        ({"seeing": "different"}, "is not the product"),
        ({"axis": 2}, "not over the last axis"),
        ({"sum_axis": 2}, "not over the last axis"),
        ({"dtype": ir.DataType.DOUBLE, "turn": "transpose"}, "element type"),
    ],
)
def test_near_misses(bench, case, word):
    graph = gradient(bench, **case)
    reasons = bench.refusals(graph, FuseAttentionGradient())
    assert len(reasons) == 1 and word in reasons[0]


@pytest.mark.parametrize("case", [{"turn": "scaled"}, {"keep": 0}])
def test_other_products_are_no_candidates(bench, case):
    assert bench.refusals(gradient(bench, **case), FuseAttentionGradient()) == []


def test_exposed_inner_values(bench):
    seen = bench.expose_each(lambda: gradient(bench), FuseAttentionGradient(), tolerance=1e-6)
    assert seen and all(counts == {"gradients": 1} for _, counts in seen)


@pytest.mark.parametrize("threads", [1, 2])
def test_float64(bench, threads):
    graph = gradient(bench)
    feeds = bench.feeds(graph)
    FuseAttentionGradient()(graph.model)
    got = bench.run(graph, feeds, threads)[0]
    wide = {k: v.astype(np.float64) for k, v in feeds.items()}
    e = np.exp(wide["scores"] - wide["scores"].max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    dp = wide["dy"] @ wide["v"].swapaxes(-1, -2)
    np.testing.assert_allclose(got, p * (dp - (p * dp).sum(-1, keepdims=True)), rtol=0, atol=2e-6)


def test_without_kernels(bench):
    (reason,) = bench.refusals(gradient(bench), FuseAttentionGradient(kernels=False))
    assert "kernels=false" in reason
