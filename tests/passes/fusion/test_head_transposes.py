"""absorb-head-transposes: layouts of attention instead of transposes."""

from __future__ import annotations

import pytest

from ortgraph.passes.canonical.eliminate_dead_code import EliminateDeadCode
from ortgraph.passes.canonical.simplify_transposes import SimplifyTransposes
from ortgraph.passes.fusion.head_transposes import AbsorbHeadTransposes

B, S, T, H, D, E = 2, 5, 7, 3, 4, 6
TURN = [0, 2, 1, 3]
ROWS_FIRST = {"q": (B, S, H, D), "k": (B, T, H, D), "v": (B, T, H, E), "dy": (B, S, H, E)}
HEADS_FIRST = {n: (s[0], s[2], s[1], s[3]) for n, s in ROWS_FIRST.items()}


def attention(turned="qkvy", backward=True):
    """Attention whose operands come from transposes, and whose results go into transposes, where named."""

    def body(b, q, k, v, dy):
        def lie(x, name):
            return b.op("Transpose", x, perm=TURN) if name in turned else x

        q, k, v, dy = lie(q, "q"), lie(k, "k"), lie(v, "v"), lie(dy, "y")
        y, total = b.multi("Attention", q, k, v, outputs=2, domain="ortgraph", scale=0.5, is_causal=1)
        results = [lie(y, "y")]
        if backward:
            made = b.multi("AttentionGrad", dy, q, k, v, y, total, outputs=3, domain="ortgraph", scale=0.5, is_causal=1)
            results += [lie(g, n) for g, n in zip(made, "qkv", strict=True)]
        return results

    inputs = {n: (ROWS_FIRST if (n if n != "dy" else "y") in turned else HEADS_FIRST)[n] for n in ROWS_FIRST}
    return body, inputs


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(
    ("turned", "layout"),
    [("qkvy", "bshd"), ("vy", "bhsd,bhsd,bshd,bshd"), ("q", "bshd,bhsd,bhsd,bhsd"), ("ky", "bhsd,bshd,bhsd,bshd")],
)
def test_transposes_are_absorbed(bench, turned, layout, backward):
    graph = bench.make(*attention(turned, backward))
    assert bench.apply(graph, AbsorbHeadTransposes()) == {"halves": 2 if backward else 1}
    SimplifyTransposes()(graph.model)
    EliminateDeadCode()(graph.model)
    assert bench.ops(graph) == ["ortgraph.Attention", *(["ortgraph.AttentionGrad"] if backward else [])]
    assert {n.attributes.get_string("layout") for n in graph.graph} == {layout}


def test_heads_first_is_left_alone(bench):
    assert bench.refusals(bench.make(*attention("")), AbsorbHeadTransposes()) == []


def test_other_permutations_are_left_alone(bench):
    def body(b, q, k, v):
        q = b.op("Transpose", q, perm=[1, 2, 0, 3])
        return b.multi("Attention", q, k, v, outputs=1, domain="ortgraph", scale=0.5)[0]

    graph = bench.make(body, {"q": (S, B, H, D), "k": HEADS_FIRST["k"], "v": HEADS_FIRST["v"]})
    assert bench.refusals(graph, AbsorbHeadTransposes()) == []


def test_no_gain_no_change(bench):
    """dQ is wanted with heads first: what Q saves, dQ costs."""
    body, inputs = attention("q")

    def wanted(b, *x):
        y, dq, dk, dv = body(b, *x)
        return [y, dq.producer().inputs[0], dk, dv]

    assert any(
        "wanted with heads first" in r for r in bench.refusals(bench.make(wanted, inputs), AbsorbHeadTransposes())
    )


def test_readers_that_want_heads_first_get_them(bench):
    """One reader of Y more: three of four transposes of Y and dY are saved, one is made."""
    body, inputs = attention("qkvy")

    def wanted(b, *x):
        y, *rest = body(b, *x)
        return [y, *rest, b.op("Neg", y.producer().inputs[0])]

    graph = bench.make(wanted, inputs)
    assert bench.apply(graph, AbsorbHeadTransposes())
    assert {n.attributes.get_string("layout") for n in graph.graph if "Attention" in n.op_type} == {
        "bshd,bshd,bshd,bhsd"
    }
