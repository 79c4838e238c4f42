"""simplify-attention: constant causal masks, heads that are repeated in place."""

from __future__ import annotations

import numpy as np
import pytest

from ortgraph.passes.fusion.attention_composites import SimplifyAttention

B, H, G, S, T, D, E = 2, 6, 2, 5, 7, 4, 3
INPUTS = {"q": (B, H, S, D), "k": (B, G, T, D), "v": (B, G, T, E), "dy": (B, H, S, E)}


def repeat(b, x):
    wide = b.op("Expand", b.op("Unsqueeze", x, b.ints([2])), b.ints([B, G, H // G, T, x.shape[-1]]))
    return b.op("Reshape", wide, b.ints([B, H, T, x.shape[-1]]))


def gather(b, g):
    split = b.op("Reshape", g, b.ints([B, G, H // G, T, g.shape[-1]]))
    return b.op("ReduceSum", split, b.ints([2]), keepdims=0)


def halves(b, q, k, v, dy, mask=None, **options):
    options = {"scale": 0.5, "is_causal": 0, **options}
    y, total = b.multi("Attention", q, k, v, mask, outputs=2, domain="ortgraph", **options)
    made = b.multi("AttentionGrad", dy, q, k, v, y, total, mask, outputs=3, domain="ortgraph", **options)
    return [y, *made]


def of(graph):
    return [n for n in graph.graph if n.op_type in ("Attention", "AttentionGrad")]


@pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize("lead", [(), (B, 1)])
def test_causal_masks(bench, low, lead):
    mask = np.broadcast_to(np.where(np.tri(S, T, dtype=bool), 0, low).astype(np.float32), (*lead, S, T)).copy()
    inputs = {**INPUTS, "k": (B, H, T, D), "v": (B, H, T, E)}
    graph = bench.make(lambda b, *x: halves(b, *x, b.const(mask)), inputs)
    assert bench.apply(graph, SimplifyAttention()) == {"causal": 2}
    assert all(n.attributes.get_int("is_causal") == 1 for n in of(graph))
    assert [len(n.inputs) for n in of(graph)] == [3, 6]


@pytest.mark.parametrize("change", [(1, 3), (2, 0)])
def test_other_masks_stay(bench, change):
    mask = np.where(np.tri(S, T, dtype=bool), 0, -np.inf).astype(np.float32)
    mask[change] = -1.0
    inputs = {**INPUTS, "k": (B, H, T, D), "v": (B, H, T, E)}
    graph = bench.make(lambda b, *x: halves(b, *x, b.const(mask)), inputs)
    assert bench.refusals(graph, SimplifyAttention()) == []


def test_repeated_heads(bench):
    def body(b, q, k, v, dy):
        y, dq, dk, dv = halves(b, q, repeat(b, k), repeat(b, v), dy)
        return [y, dq, gather(b, dk), gather(b, dv)]

    graph = bench.make(body, INPUTS)
    assert bench.apply(graph, SimplifyAttention()) == {"grouped": 2}
    assert "ReduceSum" not in bench.ops(graph)
    assert [[tuple(v.shape)[1] for v in n.inputs[2:4]] for n in of(graph)[1:]] == [[G, G]]


def test_repeated_heads_whose_gradient_is_read_whole(bench):
    """The forward half alone reads fewer heads then."""

    def body(b, q, k, v, dy):
        y, dq, dk, dv = halves(b, q, repeat(b, k), repeat(b, v), dy)
        return [y, dq, dk, gather(b, dv)]

    graph = bench.make(body, INPUTS)
    assert bench.apply(graph, SimplifyAttention()) == {"grouped": 1}


def test_heads_that_are_tiled_are_not_repeated_in_place(bench):
    def body(b, q, k, v, dy):
        tile = lambda x: b.op("Tile", x, b.ints([1, H // G, 1, 1]))  # noqa: E731
        return halves(b, q, tile(k), tile(v), dy)

    assert bench.refusals(bench.make(body, INPUTS), SimplifyAttention()) == []
