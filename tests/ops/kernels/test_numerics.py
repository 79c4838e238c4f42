"""Every kernel against PyTorch in float64, at odd sizes, empty sizes, and with values that are not finite."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

RNG = np.random.default_rng(13)
SHAPES = [(1,), (7,), (16,), (3, 17), (5, 33), (129, 255), (2, 3, 64), (0, 8), (4000, 9)]


def f32(*shape, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def t64(x):
    return torch.tensor(np.asarray(x, dtype=np.float64), requires_grad=True)


def close(got, expected, ulps=4.0, floor=0.0):
    """|got - expected| <= ulps 2^-24 (|expected| + floor), element by element; shapes equal."""
    expected = np.asarray(expected.detach() if torch.is_tensor(expected) else expected)
    assert got.shape == expected.shape
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    error = np.nan_to_num(np.abs(got.astype(np.float64) - expected))
    limit = ulps * 2.0**-24 * (np.nan_to_num(np.abs(expected)) + floor) + 2.0**-149
    worst = float(np.max(error / limit)) if error.size else 0.0
    assert worst <= 1.0, f"{worst:.2f} times the limit"


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu_relative_error(kernel, form):
    """The error is relative to the result itself, deep in the tail too, where 1 + erf(x) would have cancelled."""
    x = np.concatenate([np.linspace(-9, 9, 200001), [0.0, -0.0, 1e-30, -1e-30, 20, -20]]).astype(np.float32)
    wide = x.astype(np.float64)
    if form == "none":
        cdf = 0.5 * torch.special.erfc(torch.tensor(-wide / math.sqrt(2))).numpy()
        expected, slope = wide * cdf, cdf + wide * np.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    else:
        c, a = 2 * math.sqrt(2 / math.pi), 0.044715
        s = 1 / (1 + np.exp(-c * (wide + a * wide**3)))
        expected, slope = wide * s, s + wide * s * (1 - s) * c * (1 + 3 * a * wide * wide)
    # The tanh form rounds its argument, which reaches 60 at the ends, before the exponential.
    deep = 8.0 if form == "none" else 180.0
    close(kernel("Gelu", [x], 1, approximate=form).run()[0], expected, deep)
    ones = np.ones_like(x)
    close(kernel("GeluGrad", [ones, x], 1, approximate=form).run()[0], slope, 12.0, floor=1.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu_with_and_without_bias(kernel, shape, form):
    x, bias, dy = f32(*shape), f32(shape[-1]), f32(*shape)
    wx, wb = t64(x), t64(bias)
    y = F.gelu(wx + wb, approximate=form)
    gx, gb = torch.autograd.grad(y, [wx, wb], torch.tensor(dy, dtype=torch.float64))
    close(kernel("BiasGelu", [x, bias], 1, approximate=form).run()[0], y, 8, floor=1)
    dx, db = kernel("BiasGeluGrad", [dy, x, bias], 2, approximate=form).run()
    close(dx, gx, 16, floor=4)
    close(db, gb, 16, floor=4 * math.sqrt(math.prod(shape[:-1]) + 1))
    plain = kernel("BiasGeluGrad", [dy, x, None], 2, approximate=form).run()
    assert np.array_equal(plain[0], kernel("GeluGrad", [dy, x], 1, approximate=form).run()[0])
    assert np.array_equal(plain[1], kernel("BiasGeluGrad", [dy, x, 0 * bias], 2, approximate=form).run()[1])
    close(kernel("Gelu", [x], 1, approximate=form).run()[0], F.gelu(wx, approximate=form), 8, floor=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_saved_value_gradients(kernel, shape):
    x, dy = f32(*shape), f32(*shape)
    for name, function, from_output in (
        ("ReluGrad", torch.relu, True),
        ("TanhGrad", torch.tanh, True),
        ("SigmoidGrad", torch.sigmoid, True),
        ("SiluGrad", F.silu, False),
    ):
        wide = t64(x)
        y = function(wide)
        saved = y.detach().numpy().astype(np.float32) if from_output else x
        (expected,) = torch.autograd.grad(y, wide, torch.tensor(dy, dtype=torch.float64))
        close(kernel(name, [dy, saved], 1).run()[0], expected, 8, floor=2)
    close(kernel("Silu", [x], 1).run()[0], F.silu(t64(x)), 6)


def test_relu_gradient_is_zero_at_zero_and_for_not_a_number(kernel):
    dy = f32(5)
    (dx,) = kernel("ReluGrad", [dy, np.array([0.0, -0.0, np.nan, -1, 1], np.float32)], 1).run()
    assert np.array_equal(dx, [0, 0, 0, 0, dy[4]])


@pytest.mark.parametrize("name", ["Gelu", "Silu", "Softmax", "BiasGrad"])
def test_not_a_number_is_kept(kernel, name):
    x = f32(40, 50)
    x[13, 21] = np.nan
    (y,) = kernel(name, [x], 1).run()
    assert np.isnan(y[21] if name == "BiasGrad" else y[13, 21])
    untouched = np.isfinite(y)
    assert untouched.sum() >= y.size - 50


def test_gelu_at_infinity(kernel):
    x = np.array([np.inf, 3e38, -3e38, -np.inf], np.float32)
    for form in ("none", "tanh"):
        (y,) = kernel("Gelu", [x], 1, approximate=form).run()
        np.testing.assert_allclose(y, [np.inf, 3e38, 0, np.nan], rtol=1e-6)


@pytest.mark.parametrize("value", [np.inf, -np.inf, 3e38, -3e38])
def test_softmax_at_infinity(kernel, value):
    x = f32(3, 20)
    x[1, 4] = value
    (y,) = kernel("Softmax", [x], 1).run()
    np.testing.assert_allclose(y, torch.softmax(torch.tensor(x), -1).numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "shape,axis",
    [((5, 33), -1), ((129, 255), 1), ((2, 3, 8), -1), ((2, 3, 8), 1), ((0, 8), -1), ((3, 1), -1), ((1, 5000), -1)],
)
def test_layer_norm_and_gradient(kernel, shape, axis):
    tail = shape[axis % len(shape) :]
    x, scale, bias, dy = f32(*shape) + 3, f32(*tail), f32(*tail), f32(*shape)
    wx, ws, wb = t64(x), t64(scale), t64(bias)
    y = F.layer_norm(wx, tail, ws, wb, eps=1e-5)
    got, mean, inv_std = kernel("LayerNorm", [x, scale, bias], 3, axis=axis, epsilon=1e-5).run()
    close(got, y, 16, floor=8)
    stats = tuple(1 if i >= axis % len(shape) else d for i, d in enumerate(shape))
    dims = tuple(range(axis % len(shape), len(shape)))
    close(mean, wx.mean(dims, keepdim=True), 8, floor=3)
    close(inv_std, 1 / torch.sqrt(wx.var(dims, keepdim=True, correction=0) + 1e-5), 64)
    assert mean.shape == inv_std.shape == stats
    expected = torch.autograd.grad(y, [wx, ws, wb], torch.tensor(dy, dtype=torch.float64))
    rows = math.prod(shape) // max(math.prod(tail), 1)
    # InvStdDev multiplies everything: it is large where a row is constant.
    size = float(inv_std.max()) if inv_std.size else 1.0
    for given in (scale, None):
        inputs = [dy, x, mean, inv_std, given]
        if given is None:
            (want,) = torch.autograd.grad(F.layer_norm(wx, tail), wx, torch.tensor(dy, dtype=torch.float64))
            close(kernel("LayerNormGrad", inputs, 3, axis=axis).run()[0], want, 64, floor=8 * size)
            continue
        dx, ds, db = kernel("LayerNormGrad", inputs, 3, axis=axis).run()
        close(dx, expected[0], 64, floor=8 * size)
        close(ds, expected[1], 64, floor=4 * size * math.sqrt(rows + 1))
        close(db, expected[2], 16, floor=4 * math.sqrt(rows + 1))
        residual = f32(*shape)
        fused = kernel("LayerNormGradAdd", [*inputs, residual], 3, axis=axis).run()
        close(fused[0], expected[0] + torch.tensor(residual), 64, floor=8 * size)
        assert np.array_equal(fused[1], ds) and np.array_equal(fused[2], db)
        halves = [dy * np.float32(0.25), *inputs[1:], dy * np.float32(0.75)]
        for a, b in zip(kernel("AddLayerNormGrad", halves, 3, axis=axis).run(), (dx, ds, db), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * size * math.sqrt(rows + 1))


@pytest.mark.parametrize("addend", [True, False])
def test_add_layer_norm(kernel, addend):
    a, b, scale, bias, extra = f32(130, 67), f32(130, 67), f32(67), f32(67), f32(67)
    inputs = [a, b, scale, bias, extra if addend else None]
    total, y, mean, inv_std = kernel("AddLayerNorm", inputs, 4, epsilon=1e-12).run()
    wide = t64(a) + t64(b) + (t64(extra) if addend else 0)
    close(total, wide, 2, floor=4)
    close(y, F.layer_norm(wide, (67,), t64(scale), t64(bias), 1e-12), 16, floor=8)
    again = kernel("LayerNorm", [total, scale, bias], 3, epsilon=1e-12).run()
    assert all(np.array_equal(p, q) for p, q in zip((y, mean, inv_std), again, strict=True))


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (5, 33), (0, 4), (2, 3, 5, 128), (700, 16)])
def test_softmax_and_gradients(kernel, shape):
    x, dy = f32(*shape, scale=4), f32(*shape)
    wide = t64(x)
    y = torch.softmax(wide, -1)
    (got,) = kernel("Softmax", [x], 1).run()
    close(got, y, 24)
    (expected,) = torch.autograd.grad(y, wide, torch.tensor(dy, dtype=torch.float64))
    close(kernel("SoftmaxGrad", [dy, got], 1).run()[0], expected, 32, floor=1)
    close(kernel("ScaledSoftmaxGrad", [dy, got], 1, scale=0.125).run()[0], expected * 0.125, 32, floor=0.125)
    log = torch.log_softmax(wide, -1)
    (expected,) = torch.autograd.grad(log, wide, torch.tensor(dy, dtype=torch.float64))
    saved = log.detach().numpy().astype(np.float32)
    close(kernel("LogSoftmaxGrad", [dy, saved], 1).run()[0], expected, 64, floor=math.sqrt(shape[-1]) + 4)


@pytest.mark.parametrize(
    "mask_shape",
    [(), (1,), (24,), (5, 24), (2, 1, 1, 24), (2, 1, 5, 24), (2, 3, 5, 24), (1, 3, 1, 1), (2, 3, 5, 1), (3, 1, 24)],
)
def test_masked_softmax_broadcasts(kernel, mask_shape):
    x, mask = f32(2, 3, 5, 24), f32(*mask_shape)
    (got,) = kernel("ScaledMaskedSoftmax", [x, mask], 1, scale=0.125).run()
    close(got, torch.softmax(t64(x) * 0.125 + t64(mask), -1), 16)


def test_masked_softmax_drops_masked_positions(kernel):
    x = f32(2, 3, 5, 24)
    mask = np.zeros((5, 24), np.float32)
    mask[:, 11:] = np.finfo(np.float32).min
    mask[3] = -np.inf
    (got,) = kernel("ScaledMaskedSoftmax", [x, mask], 1).run()
    assert (got[..., :3, 11:] == 0).all() and np.isnan(got[..., 3, :]).all()
    (zeros,) = kernel("ScaledMaskedSoftmax", [x, mask], 1, zero_empty_rows=1).run()
    assert (zeros[..., 3, :] == 0).all() and np.array_equal(np.delete(zeros, 3, 2), np.delete(got, 3, 2))
    x[0, 0, 3, 5] = np.nan
    assert np.isnan(kernel("ScaledMaskedSoftmax", [x, mask], 1, zero_empty_rows=1).run()[0][0, 0, 3]).all()
    close(got[..., 0, :11], torch.softmax(t64(x)[..., 0, :11], -1), 16)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows,classes", [(1, 2), (37, 19), (300, 131)])
def test_cross_entropy(kernel, reduction, weighted, rows, classes):
    x, target = f32(rows, classes, scale=3), RNG.integers(0, classes, rows)
    target[5::3] = 1  # ignored
    target[0] = 0
    weight = (RNG.random(classes) + 0.5).astype(np.float32) if weighted else None
    wide = t64(x)
    loss = F.cross_entropy(
        wide, torch.tensor(target), None if weight is None else torch.tensor(weight, dtype=torch.float64),
        reduction=reduction, ignore_index=1,
    )  # fmt: skip
    dloss = np.asarray(f32(rows) if reduction == "none" else 0.7, np.float32)
    (expected,) = torch.autograd.grad(loss, wide, torch.tensor(dloss, dtype=torch.float64))
    options = {"reduction": reduction, "ignore_index": 1}
    got, log_prob, total = kernel("CrossEntropy", [x, target, weight], 3, **options).run()
    close(got, loss, 16, floor=8 * (rows if reduction == "sum" else 1))
    close(log_prob, torch.log_softmax(wide, -1), 16, floor=4)
    kept = target != 1
    close(total, np.asarray((weight[target] if weighted else np.ones(rows))[kept].sum()), 4)
    (dx,) = kernel("CrossEntropyGrad", [dloss, log_prob, target, weight, total], 1, **options).run()
    # p - 1 is as exact as p: the floor is the factor of a whole row.
    factor = 1.5 * float(np.abs(dloss).max()) / (float(total) if reduction == "mean" else 1.0)
    close(dx, expected, 64, floor=factor)
    assert (dx[~kept] == 0).all()
    (sums,) = kernel("LogSumExp", [x], 1).run()
    close(sums, torch.logsumexp(wide, -1, keepdim=True), 16, floor=4)
    (dx,) = kernel("CrossEntropyStatisticsGrad", [dloss, x, target, weight, total, sums], 1, **options).run()
    close(dx, expected, 64, floor=factor)


@pytest.mark.parametrize("shape", [(3, 1), (2, 0, 5), (2, 3, 15), (5, 64), (7, 131), (1, 8193)])
def test_log_sum_exp(kernel, shape):
    x = f32(*shape, scale=30)
    (got,) = kernel("LogSumExp", [x], 1).run()
    assert got.shape == (*shape[:-1], 1)
    close(got, torch.logsumexp(t64(x), -1, keepdim=True), 4, floor=4)


def test_log_sum_exp_of_infinities_and_nan(kernel):
    x = f32(6, 1100)
    x[0, 7], x[1], x[2, 1099], x[3, 3], x[4, :700] = np.nan, -np.inf, np.inf, -np.inf, -np.inf
    x[5] = np.linspace(-90, 80, 1100)  # every block has a larger maximum
    (got,) = kernel("LogSumExp", [x], 1).run()
    assert np.isnan(got[0]) and got[1] == -np.inf and not np.isfinite(got[2])  # x - got is NaN, as in log-softmax
    close(got[3:], torch.logsumexp(t64(x)[3:], -1, keepdim=True), 4, floor=4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows,classes", [(1, 2), (37, 19), (300, 131), (2, 40001)])
def test_cross_entropy_with_its_gradient(kernel, weighted, rows, classes):
    x, target = f32(rows, classes, scale=3), RNG.integers(0, classes, rows)
    target[5::3] = 1  # ignored
    target[0] = 0
    x[0, 0] = 40  # p is 1 as far as float32 knows
    weight = (RNG.random(classes) + 0.5).astype(np.float32) if weighted else None
    wide = t64(x)
    loss = F.cross_entropy(
        wide, torch.tensor(target), None if weight is None else torch.tensor(weight, dtype=torch.float64),
        reduction="sum", ignore_index=1,
    )  # fmt: skip
    (expected,) = torch.autograd.grad(loss, wide, torch.tensor(0.37, dtype=torch.float64))
    got, dx = kernel("CrossEntropyAndGrad", [np.float32(0.37), x, target, weight], 2, ignore_index=1).run()
    close(got, loss, 16, floor=8 * rows)
    close(dx, expected, 64, floor=0.6)
    assert (dx[target == 1] == 0).all()
    dx[:] = kernel("CrossEntropyAndGrad", [np.float32(np.nan), x, target, weight], 2, ignore_index=1).run()[1]
    assert (dx[target == 1] == 0).all() and np.isnan(dx[target != 1]).all()


def test_cross_entropy_of_ignored_rows_only(kernel):
    x, target = f32(4, 6), np.full(4, -100)
    loss, log_prob, total = kernel("CrossEntropy", [x, target], 3).run()
    assert np.isnan(loss) and total == 0
    (dx,) = kernel("CrossEntropyGrad", [np.float32(1), log_prob, target, None, total], 1).run()
    assert (dx == 0).all()


def test_wrong_class_or_index_is_refused(kernel):
    with pytest.raises(Exception, match="Target 6 is outside 6 classes"):
        kernel("CrossEntropy", [f32(2, 6), np.array([0, 6])], 3).run()
    with pytest.raises(Exception, match="index 9 is outside a table of 9 rows"):
        kernel("EmbeddingGrad", [f32(2, 6), np.array([0, 9])], 1, rows=9).run()


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (1, 3000), (700, 1), (129, 255), (33, 2049), (3, 4, 65)])
def test_bias_gradient(kernel, shape):
    dy = f32(*shape)
    expected = dy.astype(np.float64).reshape(-1, shape[-1]).sum(0)
    (got,) = kernel("BiasGrad", [dy], 1).run()
    close(got, expected, 16, floor=math.sqrt(math.prod(shape[:-1])))
    (kept,) = kernel("BiasGrad", [dy], 1, keepdims=1).run()
    assert kept.shape == (1,) * (len(shape) - 1) + shape[-1:] and np.array_equal(kept.reshape(-1), got)


@pytest.mark.parametrize(
    "shape",
    [(), (4,), (0, 3), (1, 1), (17, 33), (2, 5, 7), (8, 19, 4, 16), (3, 1, 18, 20), (2, 3, 4, 5, 6), (40, 1, 300)],
)
def test_transpose_every_order(kernel, shape):
    x = f32(*shape)
    assert np.array_equal(kernel("Transpose", [x], 1).run()[0], x.T)
    if not shape:
        return
    for perm in list(itertools.permutations(range(len(shape))))[::-1][:24]:
        (y,) = kernel("Transpose", [x], 1, perm=perm).run()
        assert np.array_equal(y, x.transpose(perm)), perm


def test_transpose_refuses_what_is_no_order(kernel):
    for perm in ([0], [0, 0], [0, 2], [-1, 0]):
        with pytest.raises(Exception, match="perm"):
            kernel("Transpose", [f32(2, 3)], 1, perm=perm).run()


def test_squared_norm(kernel):
    tensors = [f32(*s) for s in ((100003,), (), (3, 5), (0, 4), (32768,))]
    expected = sum(float((t.astype(np.float64) ** 2).sum()) for t in tensors)
    close(kernel("SquaredNorm", tensors, 1).run()[0], np.asarray(expected), 8)
    tensors[2][1, 1] = np.inf
    assert kernel("SquaredNorm", tensors, 1).run()[0] == np.inf
