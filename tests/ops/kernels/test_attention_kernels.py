"""Attention and its gradient against float64: layouts, groups, masks, dropout, odd sizes, bf16, values not finite."""

from __future__ import annotations

import functools

import numpy as np
import pytest

onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from ortgraph.ops import kernels  # noqa: E402
from ortgraph.ops.random import reference_mask  # noqa: E402

RNG = np.random.default_rng(3)
F32 = {"": (2e-6, 2e-6), "bf16": (8e-3, 2e-2)}  # of the norm: results, gradients
SIZES = [  # batch, heads, key heads, queries, keys, width, value width
    (2, 3, 3, 5, 5, 4, 4),
    (1, 2, 2, 7, 3, 5, 2),
    (1, 1, 1, 1, 129, 16, 16),
    (2, 4, 2, 129, 129, 33, 48),
    (1, 3, 1, 300, 197, 24, 80),
    (1, 1, 1, 1, 1, 1, 1),
]


def bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def numbers(sizes, low=False):
    b, h, g, s, t, d, e = sizes
    shapes = {"q": (b, h, s, d), "k": (b, g, t, d), "v": (b, g, t, e), "dy": (b, h, s, e)}
    made = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: bf16(x) for name, x in made.items()} if low else made


def reference(q, k, v, dy, mask=None, causal=False, scale=None, keep=None):
    """Y, LogSumExp, dQ, dK, dV in float64."""
    groups = k.shape[1]
    share = q.shape[1] // groups
    q, dy, k, v = (x.astype(np.float64) for x in (q, dy, np.repeat(k, share, 1), np.repeat(v, share, 1)))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.swapaxes(-1, -2) * scale + (0.0 if mask is None else mask.astype(np.float64))
    if causal:
        scores = scores + np.where(np.tri(*scores.shape[-2:], dtype=bool), 0.0, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        logarithm = (top + np.log(total))[..., 0]
    p = p / np.where(total == 0, 1.0, total)
    kept = 1.0 if keep is None else keep
    y = (p * kept) @ v
    slope = (dy @ v.swapaxes(-1, -2)) * kept
    ds = p * (slope - (dy * y).sum(-1, keepdims=True)) * scale
    grouped = [(ds.swapaxes(-1, -2) @ q), ((p * kept).swapaxes(-1, -2) @ dy)]
    dk, dv = (x.reshape(x.shape[0], groups, share, *x.shape[2:]).sum(2) for x in grouped)
    return y, logarithm, ds @ k, dk, dv


class LowRunner:
    """A kernel on bf16 values: casts before and behind it, since NumPy has no such type."""

    def __init__(self, op, inputs, outputs, low, low_outputs, threads, **attributes):
        if not kernels.available():
            pytest.skip(kernels.reason())
        self.feeds = {f"i{i}": np.array(x, order="C") for i, x in enumerate(inputs) if x is not None}
        nodes = [helper.make_node("Cast", [f"i{i}"], [f"c{i}"], to=TensorProto.BFLOAT16) for i in low]
        given = [(f"c{i}" if i in low else f"i{i}") if x is not None else "" for i, x in enumerate(inputs)]
        made = [f"r{o}" if o in low_outputs else f"o{o}" for o in range(outputs)]
        nodes.append(helper.make_node(f"{op}_b", given, made, domain="ortgraph.kernels", **attributes))
        nodes += [helper.make_node("Cast", [f"r{o}"], [f"o{o}"], to=TensorProto.FLOAT) for o in low_outputs]
        types = {"f": TensorProto.FLOAT, "i": TensorProto.INT64}
        graph = helper.make_graph(
            nodes,
            "kernel",
            [helper.make_tensor_value_info(k, types[x.dtype.kind], x.shape) for k, x in self.feeds.items()],
            [helper.make_empty_tensor_value_info(f"o{o}") for o in range(outputs)],
        )
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("ortgraph.kernels", 1)]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.register_custom_ops_library(str(kernels.library_path()))
        model = helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self):
        return self.session.run(None, self.feeds)


def both(kernel, x, mask=None, extra=(), low=False, **attributes):
    """Y, LogSumExp, dQ, dK, dV of the kernels, the same at 1 and 2 threads; heads second in all of them."""
    words = attributes.get("layout", "bhsd").split(",")
    lay = {n: (lambda a: a.swapaxes(1, 2)) if w == "bshd" else (lambda a: a) for n, w in zip("qkvy", words * 4)}  # noqa: B905
    q, k, v, dy = (lay[name[-1]](x[name]) for name in ("q", "k", "v", "dy"))
    make = functools.partial(LowRunner, low=(0, 1, 2), low_outputs=(0,)) if low else kernel
    make_grad = functools.partial(LowRunner, low=(0, 1, 2, 3, 4), low_outputs=(0, 1, 2)) if low else kernel
    results = []
    for threads in (1, 2):
        y, total = make("Attention", [q, k, v, mask, *extra], 2, threads=threads, **attributes).run()
        inputs = [dy, q, k, v, y, total, mask, *extra]
        gradients = make_grad("AttentionGrad", inputs, 3, threads=threads, **attributes).run()
        results.append([lay["y"](y), total, *(lay[n](g) for n, g in zip("qkv", gradients, strict=True))])
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b, equal_nan=True)
    return results[0]


def close(got, want, bounds=F32[""]):
    seen = np.isfinite(want[1])  # nobody can use the value of a row without keys
    for i, (a, w) in enumerate(zip(got, want, strict=True)):
        a, w = (a[seen], w[seen]) if i == 1 else (a, w)
        assert a.shape == w.shape
        error = np.linalg.norm((a - w).ravel()) / max(np.linalg.norm(w.ravel()), 1.0)
        assert error <= bounds[i > 1], f"output {i}: {error:.1e}"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_sizes(kernel, sizes, causal):
    x = numbers(sizes)
    close(both(kernel, x, is_causal=int(causal)), reference(**x, causal=causal))
    for layout in ("bshd", "bhsd,bshd,bshd,bhsd", "bshd,bhsd,bhsd,bshd"):
        close(both(kernel, x, is_causal=int(causal), layout=layout), reference(**x, causal=causal))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_low_precision(kernel, sizes, layout):
    x = numbers(sizes)
    want = reference(**x, causal=True)
    close(both(kernel, x, precision="bf16", is_causal=1, layout=layout), want, F32["bf16"])
    x = numbers(sizes, low=True)
    want = reference(**x, causal=True)
    close(both(kernel, x, low=True, is_causal=1, layout=layout), want, F32["bf16"])
    close(both(kernel, x, low=True, is_causal=1, layout=layout, precision="fp32"), want, F32["bf16"])


def test_low_precision_rounds_operands_only(kernel):
    """With operands that bf16 holds exactly, only probabilities and their slopes are rounded: one key, no rounding."""
    x = {name: np.round(a * 4) / 4 for name, a in numbers((2, 2, 2, 9, 1, 8, 8)).items()}
    y, _, _, _, dv = both(kernel, x, precision="bf16")
    assert np.array_equal(y, np.broadcast_to(x["v"], y.shape))
    assert np.array_equal(dv, x["dy"].sum(2, keepdims=True))


@pytest.mark.parametrize("low", [-np.inf, -3.4e38, -2.0])
@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 150), (2, 1, 140, 150), (140, 150), (150,), (1, 4, 140, 150), (2, 4, 140, 1)]
)
def test_masks(kernel, low, shape):
    x = numbers((2, 4, 2, 140, 150, 16, 8))
    mask = np.where(RNG.random(shape) < 0.3, low, RNG.standard_normal(shape)).astype(np.float32)
    if len(shape) > 1 and shape[-2] > 1:
        mask[..., 3, :] = low  # all keys: zeros for minus infinity, the mean of all values for a large number
    for causal in (False, True):
        got = both(kernel, x, mask, is_causal=int(causal), scale=0.4)
        with np.errstate(invalid="ignore"):
            close(got, reference(**x, mask=mask, causal=causal, scale=0.4))
        if low == -np.inf and len(shape) > 1 and shape[-2] > 1:
            assert not got[0][:, :, 3].any() and not got[2][:, :, 3].any()


def test_large_finite_masks_of_whole_rows_keep_their_gradient(kernel):
    """LogSumExp absorbs log(keys) there: the backward half cannot use it."""
    x = numbers((1, 2, 2, 40, 200, 8, 8))
    mask = np.full((40, 200), np.finfo(np.float32).min, np.float32)
    mask[::2] = 0
    close(both(kernel, x, mask), reference(**x, mask=mask))


@pytest.mark.parametrize("sizes", [(2, 4, 2, 70, 300, 16, 24), (1, 2, 2, 33, 7, 8, 8)], ids=str)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_dropout_draws_the_masks_of_the_generator(kernel, sizes, ratio):
    x = numbers(sizes)
    b, h, _, s, t, *_ = sizes
    keep = reference_mask(5, 7, 3, (b, h, s, t), ratio) / (1 - ratio if ratio < 1 else 1.0)
    extra = [np.int64(5), np.int64(7)]
    for options in ({}, {"precision": "bf16"}, {"layout": "bshd", "is_causal": 1}):
        want = reference(**x, keep=keep, causal="is_causal" in options)
        bounds = F32[options.get("precision", "")]
        close(both(kernel, x, None, extra, ratio=ratio, node=3, **options), want, bounds)


@pytest.mark.parametrize("sizes", [(0, 2, 2, 3, 3, 4, 4), (1, 2, 2, 0, 5, 4, 4), (2, 2, 1, 5, 0, 4, 4)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_empty(kernel, sizes, precision):
    x = numbers(sizes)
    close(both(kernel, x, precision=precision), reference(**x))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_not_finite_values_reach_what_they_reach_in_the_definition(kernel, precision):
    x = numbers((1, 1, 1, 40, 40, 16, 16))
    x["q"][0, 0, 5, 2] = np.nan
    x["v"][0, 0, 7, 3] = np.inf
    with np.errstate(invalid="ignore"):
        want = reference(**x)
    got = both(kernel, x, precision=precision)
    for i in (0, 2, 3, 4):
        assert np.array_equal(np.isfinite(got[i]), np.isfinite(want[i])), i
    assert np.isnan(got[0][0, 0, 5]).all() and np.isposinf(got[0][0, 0, 6, 3])


def test_hidden_keys_are_not_read_behind_the_diagonal(kernel):
    x = numbers((1, 1, 1, 10, 300, 16, 16))
    want = both(kernel, x, is_causal=1)
    x["v"][:, :, 128:] = np.nan
    got = both(kernel, x, is_causal=1)
    for a, b in zip(want[:3], got[:3], strict=True):
        assert np.array_equal(a, b)
    assert not got[3][:, :, 10:].any() and not got[4][:, :, 10:].any()


def test_left_out_outputs(kernel):
    x = numbers((1, 2, 1, 20, 30, 8, 8))
    y, total, *gradients = both(kernel, x)
    inputs = [x["q"], x["k"], x["v"]]
    assert np.array_equal(kernel("Attention", inputs, 1).run()[0], y)
    for left_out in (("o0", "o1"), ("o2",)):
        runner = kernel("AttentionGrad", [x["dy"], *inputs, y, total], 3, absent=left_out)
        for name, result in zip(runner.names, runner.run(), strict=True):
            assert np.array_equal(result, gradients[int(name[1])])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": (1, 2, 9, 7)}, "do not fit"),
        ({"k": (2, 2, 9, 8), "v": (2, 2, 9, 8)}, "batch"),
        ({"k": (1, 3, 9, 8), "v": (1, 3, 9, 8)}, "do not divide"),
        ({"mask": (2, 1, 5, 9)}, "does not broadcast"),
    ],
)
def test_wrong_shapes_are_refused(kernel, change, words):
    shapes = {"q": (1, 2, 5, 8), "k": (1, 2, 9, 8), "v": (1, 2, 9, 8), **change}
    inputs = [np.zeros(s, np.float32) for s in shapes.values()]
    with pytest.raises(Exception, match=words):
        kernel("Attention", inputs, 2).run()


@pytest.mark.parametrize("width", [8, 24, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_saturated_scores_leave_no_rounding_in_the_gradient(kernel, width, masked):
    """One key has all the weight: dQ and dK are what is left of sum(dY Y) - dY V, times scores of the order of 1e5."""
    rng = np.random.default_rng(3)
    shape = (2, 2, 150, width)
    q, k, v, dy = (rng.standard_normal(shape).astype(np.float32) for _ in range(4))
    best = rng.integers(0, shape[2], shape[:3])
    k *= 1000 / np.linalg.norm(k, axis=-1, keepdims=True)
    q = np.take_along_axis(k, best[..., None], 2)  # each query is its key: all other scores are far below
    mask = np.where(rng.random((2, 1, 1, 150)) < 0.3, np.float32(-3e38), np.float32(0)) if masked else None
    inputs = [q, k, v, mask]
    y, total = kernel("Attention", inputs, 2).run()
    dq, dk, dv = kernel("AttentionGrad", [dy, q, k, v, y, total, mask], 3).run()
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) / np.sqrt(width) + (
        0 if mask is None else mask
    )
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dy.astype(np.float64) @ v.astype(np.float64).swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(width)
    sure = p.max(-1) == 1.0  # in float64, too
    assert sure.mean() > 0.5
    exact = ds @ k.astype(np.float64)
    assert np.abs(dq[sure]).max() < 1e-20 and np.abs(exact[sure]).max() < 1e-9
    np.testing.assert_allclose(dv, p.swapaxes(-1, -2) @ dy, rtol=1e-3, atol=2e-2)
