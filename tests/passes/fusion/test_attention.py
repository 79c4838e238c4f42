"""fuse-attention: decomposed forms of several exporters, both halves; near misses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.graph.verify import verify
from ortgraph.passes.canonical.eliminate_dead_code import EliminateDeadCode
from ortgraph.passes.fusion.attention import FuseAttention

B, H, S, T, D, E = 2, 4, 5, 7, 8, 6
LOW = np.finfo(np.float32).min
INPUTS = {"q": (B, H, S, D), "k": (B, H, T, D), "v": (B, H, T, E), "dy": (B, H, S, E)}


def _swap(b, x):
    n = len(x.shape)
    return b.op("Transpose", x, perm=[*range(n - 2), n - 1, n - 2])


def _three(b, x):
    return b.op("Reshape", x, b.ints([B * H, *list(x.shape)[2:]]))


def _four(b, x):
    return b.op("Reshape", x, b.ints([B, H, *list(x.shape)[1:]]))


def forms(
    b, q, k, v, dy, masks=(), scale="scores", views=False, draw=None, gradients="qkv", turned_gradients=False,
    between=lambda b, p: p, safe=False,
):  # fmt: skip
    """Attention and its gradient in parts. Returns Y and the gradients asked for."""
    c = D**-0.5
    three, four = (_three, _four) if views else ((lambda b, x: x), (lambda b, x: x))
    before = {"q": (c, 1.0), "both": (c**0.5, c**0.5), "k": (1.0, c)}.get(scale, (1.0, 1.0))
    factor = c if scale in ("scores", "div") else 1.0
    qs, ks = (x if f == 1.0 else b.op("Mul", x, b.scalar(f, x)) for x, f in zip((q, k), before, strict=True))
    q3, kt3, v3 = three(b, qs), three(b, _swap(b, ks)), three(b, v)
    scores = four(b, b.op("MatMul", q3, kt3))
    if scale == "scores":
        scores = b.op("Mul", scores, b.scalar(c, scores))
    elif scale == "div":
        scores = b.op("Div", scores, b.scalar(1 / c, scores))
    for mask in masks:
        scores = mask(b, scores)
    p = b.op("Softmax", scores, axis=-1)
    if safe:
        highest = b.op("ReduceMax", scores, b.ints([-1]), keepdims=1)
        p = b.op("Where", b.op("Equal", highest, b.scalar(-np.inf, highest)), b.scalar(0.0, p), p)
    p = between(b, p)
    used, kept = p, None
    if draw is not None:
        used, kept = b.multi("Dropout", p, *draw, outputs=2, domain="ortgraph", ratio=0.25, node=3)
    y = four(b, b.op("MatMul", three(b, used), v3))
    results = [y]
    dy3 = three(b, dy)
    if "v" in gradients:
        results.append(four(b, b.op("MatMul", _swap(b, three(b, used)), dy3)))
    if not set("qk") & set(gradients):
        return results
    dp = four(b, b.op("MatMul", dy3, _swap(b, v3)))
    if kept is not None:
        dp = b.op("DropoutGrad", dp, kept, domain="ortgraph", ratio=0.25)
    ds = b.op("SoftmaxGrad", dp, p, domain="ortgraph", axis=-1)
    if factor != 1.0:
        ds = b.op("Mul", ds, b.scalar(factor, ds))
    ds3 = three(b, ds)
    if "q" in gradients:
        dq = four(b, b.op("MatMul", ds3, _swap(b, kt3)))
        results.append(dq if before[0] == 1.0 else b.op("Mul", dq, b.scalar(before[0], dq)))
    if "k" in gradients:
        if turned_gradients:
            dk = _swap(b, four(b, b.op("MatMul", _swap(b, q3), ds3)))
        else:
            dk = four(b, b.op("MatMul", _swap(b, ds3), q3))
        results.append(dk if before[1] == 1.0 else b.op("Mul", dk, b.scalar(before[1], dk)))
    return results


def added(value):
    return lambda b, s: b.op("Add", s, value(b) if callable(value) else value)


def make(bench, inputs=None, dtypes=None, **options):
    return bench.make(lambda b, *x: forms(b, *x[:4], **options), inputs or INPUTS, dtypes)


def whole(bench, graph):
    return [op for op in bench.ops(graph) if op not in ("Reshape", "Transpose", "Mul", "Add", "Where")]


@pytest.mark.parametrize("scale", ["scores", "div", "q", "k", "both", "none"])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_both_halves(bench, scale, views, turned):
    graph = make(bench, scale=scale, views=views, turned_gradients=turned)
    assert bench.apply(graph, FuseAttention()) == {"attentions": 1}
    assert whole(bench, graph) == ["ortgraph.Attention", "ortgraph.AttentionGrad"]
    if not (turned or views):
        EliminateDeadCode()(graph.model)
        assert "Mul" not in bench.ops(graph)


@pytest.mark.parametrize("gradients", ["", "q", "k", "v", "qv", "kv", "qk"])
def test_what_is_asked_for(bench, gradients):
    graph = make(bench, gradients=gradients)
    assert bench.apply(graph, FuseAttention()) == {"attentions": 1}
    assert whole(bench, graph) == ["ortgraph.Attention", *(["ortgraph.AttentionGrad"] if gradients else [])]


@pytest.mark.parametrize("shape", [(B, 1, 1, T), (B, 1, S, T), (S, T), (1, H, S, T), (H, 1, T)])
def test_added_masks(bench, shape):
    body = lambda b, q, k, v, dy, m: forms(b, q, k, v, dy, masks=[added(m)], views=True)  # noqa: E731
    graph = bench.make(body, {**INPUTS, "m": shape})
    assert bench.apply(graph, FuseAttention()) == {"attentions": 1}
    node = next(n for n in graph.graph if n.op_type == "Attention")
    assert node.inputs[3].name == "m"


@pytest.mark.parametrize("low", [LOW, -np.inf])
@pytest.mark.parametrize("hidden", [True, False])
def test_chosen_masks(bench, low, hidden):
    def choose(b, s):
        condition = b.op(
            "Greater", b.const(np.tile([1.0, -1.0, 0.5], (S, T))[:, :T].astype(np.float32)), b.scalar(0.0, s)
        )
        low_value = b.scalar(low, s)
        return b.op("Where", condition, s, low_value) if hidden else b.op("Where", b.op("Not", condition), low_value, s)

    graph = make(bench, masks=[choose])
    assert bench.apply(graph, FuseAttention()) == {"attentions": 1}


def triangle(low, rows=S, keys=T):
    return np.where(np.tri(rows, keys, dtype=bool), 0.0, low).astype(np.float32)


@pytest.mark.parametrize("low", [LOW, -np.inf])
@pytest.mark.parametrize("lead", [(), (1, 1), (B, 1)])
def test_causal_constants(bench, low, lead):
    mask = np.broadcast_to(triangle(low), (*lead, S, T)).copy()
    graph = make(bench, masks=[added(lambda b: b.const(mask))])
    bench.apply(graph, FuseAttention())
    node = next(n for n in graph.graph if n.op_type == "AttentionGrad")
    assert node.attributes.get_int("is_causal") == 1 and len(node.inputs) == 6


@pytest.mark.parametrize(("low", "causal"), [(-np.inf, 1), (LOW, 0)])
def test_causal_beside_another_mask(bench, low, causal):
    """A large finite number hides a key only as long as another is seen: it stays a mask beside another one."""
    body = lambda b, q, k, v, dy, m: forms(  # noqa: E731
        b, q, k, v, dy, masks=[added(lambda b: b.const(triangle(low))), added(m)]
    )
    graph = bench.make(body, {**INPUTS, "m": (B, 1, 1, T)})
    bench.apply(graph, FuseAttention())
    assert next(n for n in graph.graph if n.op_type == "Attention").attributes.get_int("is_causal") == causal


@pytest.mark.parametrize("change", [(2, 4), (3, 0)])
def test_nearly_causal_constants_stay_masks(bench, change):
    mask = triangle(LOW)
    mask[change] = 0.0 if mask[change] else LOW
    graph = make(bench, masks=[added(lambda b: b.const(mask))])
    bench.apply(graph, FuseAttention())
    assert next(n for n in graph.graph if n.op_type == "Attention").attributes.get_int("is_causal") == 0


@pytest.mark.parametrize("safe", [False, True])
def test_dropout(bench, safe):
    body = lambda b, q, k, v, dy, key, step: forms(b, q, k, v, dy, draw=(key, step), views=True, safe=safe)  # noqa: E731
    dtypes = dict.fromkeys(("key", "step"), ir.DataType.INT64)
    graph = bench.make(body, {**INPUTS, "key": (), "step": ()}, dtypes)
    assert bench.apply(graph, FuseAttention()) == {"attentions": 1}
    assert whole(bench, graph) == ["ortgraph.Attention", "ortgraph.AttentionGrad"]


def test_repeated_heads_are_read_in_place(bench):
    def body(b, q, k, v, dy):
        def repeat(x):
            wide = b.op("Expand", b.op("Unsqueeze", x, b.ints([2])), b.ints([B, 2, 2, T, x.shape[-1]]))
            return b.op("Reshape", wide, b.ints([B, H, T, x.shape[-1]]))

        y, dv, dq, dk = forms(b, q, repeat(k), repeat(v), dy)
        sums = [
            b.op("ReduceSum", b.op("Reshape", g, b.ints([B, 2, 2, T, g.shape[-1]])), b.ints([2]), keepdims=keep)
            for g, keep in ((dv, 1), (dk, 0))
        ]
        return [y, dq, *sums]

    graph = bench.make(body, {**INPUTS, "k": (B, 2, T, D), "v": (B, 2, T, E)})
    bench.apply(graph, FuseAttention())
    assert whole(bench, graph)[-2:] == ["ortgraph.Attention", "ortgraph.AttentionGrad"]
    node = next(n for n in graph.graph if n.op_type == "AttentionGrad")
    assert [tuple(v.shape) for v in node.inputs[2:4]] == [(B, 2, T, D), (B, 2, T, E)]
    assert "ReduceSum" not in bench.ops(graph)


def test_three_dimensions(bench):
    inputs = {n: (B * H, *s[2:]) for n, s in INPUTS.items()}
    graph = make(bench, inputs)
    assert bench.apply(graph, FuseAttention()) == {"attentions": 1}


def test_symbolic_batch(bench):
    inputs = {n: ("batch", *s[1:]) for n, s in INPUTS.items()}
    graph = make(bench, inputs)
    assert bench.apply(graph, FuseAttention()) == {"attentions": 1}


def test_views_whose_sizes_are_all_symbolic(bench, monkeypatch):
    def view(b, x, lead, *shape):
        inputs = {v.name: v for v in b.graph.inputs}
        owners = {"rows": inputs["q"], "keys": inputs["k"]}
        sizes = [
            b.ints([d]) if isinstance(d, int) else b.op("Shape", owners[d.value], start=2, end=3) for d in shape[-2:]
        ]
        made = b.op("Reshape", x, b.op("Concat", b.ints(lead), *sizes, axis=0))
        made.shape = ir.Shape(shape)
        return made

    monkeypatch.setitem(globals(), "_three", lambda b, x: view(b, x, [-1], x.shape[0] * H, *x.shape[2:]))
    monkeypatch.setitem(globals(), "_four", lambda b, x: view(b, x, [-1, H], "batch", H, *x.shape[1:]))
    inputs = {"q": ("batch", H, "rows", D), "k": ("batch", H, "keys", D), "v": ("batch", H, "keys", E)}
    graph = make(bench, {**inputs, "dy": ("batch", H, "rows", E)}, views=True)
    assert bench.apply(graph, FuseAttention()) == {"attentions": 1}
    verify(graph, "types")


def test_every_inner_value_may_be_a_graph_output(bench):
    seen = bench.expose_each(lambda: make(bench, views=True), FuseAttention())
    assert ("Softmax", {}) in seen and ("SoftmaxGrad", {}) in seen


def wrong_dy(b, q, k, v, dy):
    y, dv, dq, dk = forms(b, q, k, v, dy)
    p = next(n for n in b.made if n.op_type == "Softmax").outputs[0]
    return [y, dv, dq, dk, b.op("ReduceSum", p, b.ints([-1]), keepdims=0)]


def other_values(b, q, k, v, dy):
    """dP is taken with other values than Y."""
    p = b.op("Softmax", b.op("MatMul", q, _swap(b, k)), axis=-1)
    y = b.op("MatMul", p, v)
    dp = b.op("MatMul", dy, _swap(b, b.op("Abs", v)))
    ds = b.op("SoftmaxGrad", dp, p, domain="ortgraph", axis=-1)
    return [y, b.op("MatMul", ds, k)]


def bias_gradient(b, q, k, v, dy, m):
    """A learned bias on the scores wants their gradient."""
    results = forms(b, q, k, v, dy, masks=[added(m)], scale="none")
    ds = next(n for n in b.made if n.op_type == "SoftmaxGrad").outputs[0]
    return [*results, b.op("ReduceSum", ds, b.ints([0]), keepdims=1)]


def scaled_behind_mask(b, q, k, v, dy, m):
    return forms(b, q, k, v, dy, masks=[added(m), lambda b, s: b.op("Mul", s, b.scalar(0.5, s))], gradients="")


def other_axis(b, q, k, v, dy):
    p = b.op("Softmax", b.op("MatMul", q, _swap(b, k)), axis=2)
    return [b.op("MatMul", p, v)]


@pytest.mark.parametrize(
    ("body", "words", "mask"),
    [
        (wrong_dy, "also read by ReduceSum", False),
        (other_values, "is not taken with", False),
        (bias_gradient, "also read by ReduceSum", True),
        (scaled_behind_mask, "scaled after the mask", True),
        (other_axis, "last axis", False),
    ],
)
def test_near_misses(bench, body, words, mask):
    graph = bench.make(body, {**INPUTS, **({"m": (1, H, S, T)} if mask else {})})
    assert any(words in reason for reason in bench.refusals(graph, FuseAttention()))


def test_wrong_factor_in_the_backward_half_is_kept(bench):
    """What is not the gradient is still computed as it was: the difference becomes a factor."""

    def body(b, q, k, v, dy):
        y, dv, dq, dk = forms(b, q, k, v, dy, scale="scores")
        ds = next(n for n in b.made if n.op_type == "SoftmaxGrad").outputs[0]
        scaled = next(u.node for u in ds.uses())
        scaled.replace_input_with(1, b.scalar(0.11, ds))
        return [y, dv, dq, dk]

    graph = bench.make(body, INPUTS)
    assert bench.apply(graph, FuseAttention()) == {"attentions": 1}


def test_queries_from_elsewhere_in_the_backward_half(bench):
    def body(b, q, k, v, dy, other):
        y, dv, dq, dk = forms(b, q, k, v, dy)
        dk.producer().replace_input_with(1, other)
        return [y, dv, dq, dk]

    graph = bench.make(body, {**INPUTS, "other": (B, H, S, D)})
    assert any("no gradient of queries or keys" in r for r in bench.refusals(graph, FuseAttention()))
