"""LiftBatchViews: views around batched products move behind them; near misses."""

from __future__ import annotations

import pytest

from ortgraph.passes.fusion.batch_views import LiftBatchViews


def attention(bench, a=(2, 3, 4, 5), b_shape=(2, 3, 5, 6), view_a=(6, 4, 5), view_b=(6, 5, 6), domain="", **attributes):
    def body(b, x, y):
        left = b.op("Reshape", x, b.ints(view_a))
        right = b.op("Reshape", y, b.ints(view_b))
        m = b.op("FusedMatMul" if domain else "MatMul", left, right, domain=domain, **attributes)
        return b.op("Tanh", m)

    return bench.make(body, {"x": a, "y": b_shape})


MS = "com.microsoft"
HITS = [
    {},
    {"a": (2, 2, 3, 4, 5), "b_shape": (2, 2, 3, 5, 6), "view_a": (12, 4, 5), "view_b": (12, 5, 6)},
    {"b_shape": (2, 3, 6, 5), "view_b": (6, 6, 5), "domain": MS, "transB": 1, "alpha": 0.5},
    {"a": ("n", 3, 4, 5), "b_shape": ("n", 3, 5, 6), "view_a": (-1, 4, 5), "view_b": (-1, 5, 6)},
]


@pytest.mark.parametrize("case", HITS)
def test_hits(bench, case):
    graph = attention(bench, **case)
    assert bench.apply(graph, LiftBatchViews()) == {"rewritten": 1}
    assert bench.ops(graph)[1:] == ["Reshape", "Tanh"]


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"a": (3, 2, 4, 5)}, "batch dimensions differ"),
        ({"a": (2, 3, 5, 4)}, "across its last two"),
        ({"a": (2, 3, 2, 10), "view_a": (6, 4, 5)}, "across its last two"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(attention(bench, **case), LiftBatchViews())
    assert len(reasons) == 1 and word in reasons[0]


@pytest.mark.parametrize("case", [{"a": (6, 4, 5)}, {"a": (24, 5), "view_a": (6, 4, 5)}])
def test_other_views_are_no_candidates(bench, case):
    assert bench.refusals(attention(bench, **case), LiftBatchViews()) == []


def test_exposed_inner_values(bench):
    assert len(bench.expose_each(lambda: attention(bench), LiftBatchViews())) == 3
