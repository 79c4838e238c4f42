"""Convolution kernels against PyTorch in float64, and in low precision against rounded operands."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")


from ortgraph.ops import kernels  # noqa: E402
from ortgraph.ops.kernels.windows import (  # noqa: E402
    Window,
    conv_grad_scratch,
    conv_grad_thread_scratch,
    conv_scratch,
    conv_thread_scratch,
)

F = torch.nn.functional
RNG = np.random.default_rng(17)

# batch, channels, size, filters, window, strides, pads, dilations, group
FORMS = {
    "plain": (2, 3, (11, 13), 5, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "whole tiles": (2, 64, (24, 24), 64, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "tiles beyond the picture": (4, 48, (13, 11), 80, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "tiles without pads": (3, 32, (12, 15), 48, (3, 3), (1, 1), (0, 0), (1, 1), 1),
    "tiles with wide pads": (5, 64, (7, 8), 32, (3, 3), (1, 1), (3, 2), (1, 1), 1),
    "several rounds of tiles": (9, 144, (14, 14), 96, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "stem": (2, 3, (40, 40), 64, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    "strided": (3, 16, (9, 7), 24, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "strided point": (2, 16, (9, 7), 32, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "dilated groups": (2, 32, (10, 10), 16, (3, 3), (1, 1), (2, 2), (2, 2), 2),
    "uneven": (2, 32, (10, 9), 16, (3, 2), (3, 2), (1, 1), (1, 1), 4),
    "three columns a line": (8, 40, (3, 3), 70, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "stride beyond the window": (1, 4, (9, 9), 4, (2, 3), (3, 5), (0, 1), (1, 1), 1),
    "stride with dilation": (2, 8, (15, 14), 9, (3, 3), (2, 3), (2, 1), (2, 2), 1),
    "several groups of images": (70, 17, (5, 6), 19, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "big pads": (1, 2, (2, 2), 3, (5, 5), (1, 1), (4, 4), (1, 1), 1),
    "rest of the picture unseen": (1, 3, (8, 9), 4, (3, 3), (4, 4), (0, 0), (1, 1), 1),
    "one dimension": (3, 12, (37,), 10, (5,), (2,), (2,), (1,), 1),
    "depthwise": (3, 20, (14, 13), 20, (3, 3), (1, 1), (1, 1), (1, 1), 20),
    "depthwise with stride": (2, 9, (15, 34), 9, (3, 3), (2, 2), (1, 1), (1, 1), 9),
    "depthwise, several filters": (2, 5, (9, 8), 15, (5, 4), (2, 1), (3, 2), (1, 2), 5),
    "small groups": (2, 12, (17, 20), 8, (3, 3), (3, 2), (1, 0), (1, 1), 4),
    "depthwise, stride beyond the window": (2, 6, (11, 9), 6, (2, 1), (4, 3), (1, 0), (1, 1), 6),
    "depthwise line": (3, 7, (70,), 7, (31,), (1,), (15,), (1,), 7),
    "one channel": (2, 1, (6, 5), 1, (1, 1), (1, 1), (0, 0), (1, 1), 1),
}


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def wide(*arrays):
    return [torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in arrays]


def problem(form):
    n, c, size, m, window, strides, pads, spreads, group = FORMS[form]
    x, w, bias = f32(n, c, *size), f32(m, c // group, *window), f32(m)
    options = {"strides": strides, "pads": [*pads, *pads], "dilations": spreads, "group": group}
    function = F.conv1d if len(size) == 1 else F.conv2d
    return x, w, bias, options, lambda a, b, d: function(a, b, d, strides, pads, spreads, group)


def near(got, expected, depth):
    """Sums of `depth` products of standard normal numbers: within a few roundings of their spread."""
    expected = expected.detach().numpy()
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=8 * 2.0**-24 * max(depth, 1))


@pytest.mark.parametrize("form", FORMS)
def test_convolution_and_gradients(kernel, form):
    x, w, bias, options, function = problem(form)
    wx, ww, wb = wide(x, w, bias)
    y = function(wx, ww, wb)
    dy = f32(*y.shape)
    expected = torch.autograd.grad(y, (wx, ww, wb), torch.tensor(dy, dtype=torch.float64))
    depth, pixels = math.prod(w.shape[1:]), dy.size // dy.shape[1]
    near(kernel("Conv", [x, w, bias], 1, **options).run()[0], y, depth)
    near(kernel("Conv", [x, w], 1, **options).run()[0], function(wx, ww, None), depth)
    every = kernel("ConvGrad", [dy, x, w], 3, **options).run()
    for got, want, length in zip(every, expected, (depth * w.shape[0] // w.shape[1], pixels, pixels), strict=True):
        near(got, want, length)
    for threads in (1, 2):
        bound = kernel("ConvGrad", [dy, x, w], 3, threads=threads, **options).run_inplace((), every)
        assert all(np.array_equal(a, b) for a, b in zip(bound, every, strict=True))
        for outputs, absent in ((2, ("o0",)), (1, ()), (3, ("o0", "o1"))):
            some = kernel("ConvGrad", [dy, x, w], outputs, threads=threads, absent=absent, **options).run()
            kept = [i for i in range(outputs) if f"o{i}" not in absent]
            for i, got in zip(kept, some, strict=True):
                assert np.array_equal(got, every[i])


def test_one_value_that_is_not_finite_stays_in_its_windows(kernel):
    x, w = f32(2, 20, 9, 9), f32(33, 20, 3, 3)
    x[1, 7, 4, 4] = np.inf
    (y,) = kernel("Conv", [x, w], 1, pads=[1] * 4).run()
    touched = np.zeros(y.shape, bool)
    touched[1, :, 3:6, 3:6] = True
    assert np.array_equal(~np.isfinite(y), touched)
    dy = f32(2, 33, 9, 9)
    dy[0, 3, 0, 0] = np.nan
    dx, dw, db = kernel("ConvGrad", [dy, np.nan_to_num(x, posinf=1.0), w], 3, pads=[1] * 4).run()
    assert np.isnan(dx[0, :, :2, :2]).all() and np.isnan(dx).sum() == 20 * 4
    assert np.isnan(dw[3]).all() and np.isnan(dw).sum() == dw[3].size and np.isnan(db).sum() == 1


def test_a_value_that_is_not_finite_reaches_its_tiles_only(kernel):
    """Tiles of 2x2 results: all that see the value are not finite, and nothing is beyond the tiles that see it."""
    x, w = f32(2, 64, 24, 24), f32(64, 64, 3, 3)
    x[1, 7, 5, 4] = np.inf
    (y,) = kernel("Conv", [x, w], 1, pads=[1] * 4).run()
    bad = ~np.isfinite(y)
    assert bad[1, :, 4:7, 3:6].all()
    bad[1, :, 4:8, 2:6] = False
    assert not bad.any()
    dy = f32(*y.shape)
    dy[0, 3, 8, 8] = np.nan
    dx, dw = kernel("ConvGrad", [dy, np.nan_to_num(x, posinf=1.0), w], 2, pads=[1] * 4).run()
    assert np.isnan(dw[3]).all() and np.isnan(dw).sum() == dw[3].size
    bad = ~np.isfinite(dx)
    assert bad[0, :, 7:10, 7:10].all()
    bad[0, :, 6:10, 6:10] = False
    assert not bad.any()


@pytest.mark.parametrize("channels,size", [(64, 24), (128, 12), (256, 8)])
def test_tiles_are_as_accurate_as_direct_products(kernel, channels, size):
    """Within four times the error of PyTorch's float32 gradients, as a whole."""
    x, dy = f32(8, channels, size, size), f32(8, channels, size, size)
    w = f32(channels, channels, 3, 3) / (3 * channels**0.5)
    wx, ww = wide(x, w)
    y = F.conv2d(wx, ww, padding=1)
    exact = [y, *torch.autograd.grad(y, (wx, ww), torch.tensor(dy, dtype=torch.float64))]
    sx, sw = (torch.tensor(a, requires_grad=True) for a in (x, w))
    single = F.conv2d(sx, sw, padding=1)
    theirs = [single, *torch.autograd.grad(single, (sx, sw), torch.tensor(dy))]
    options = {"pads": [1] * 4}
    ours = [*kernel("Conv", [x, w], 1, **options).run(), *kernel("ConvGrad", [dy, x, w], 2, **options).run()]
    for a, b, c in zip(ours, theirs, exact, strict=True):
        norm = c.norm()
        assert (torch.tensor(a) - c).norm() / norm < 4 * (b - c).norm() / norm + 1e-6


def test_empty_convolutions(kernel):
    w = f32(4, 3, 3, 3)
    for shape, out in (((0, 3, 5, 5), (0, 4, 3, 3)), ((2, 3, 2, 5), (2, 4, 0, 3))):
        x = f32(*shape)
        (y,) = kernel("Conv", [x, w], 1).run()
        assert y.shape == out
        dx, dw, db = kernel("ConvGrad", [np.zeros(out, np.float32), x, w], 3).run()
        assert dx.shape == shape and not dx.any() and not dw.any() and not db.any()


def test_a_window_that_does_not_fit_is_refused(kernel):
    x, w = f32(1, 4, 5, 5), f32(6, 3, 3, 3)
    with pytest.raises(Exception, match="W does not fit"):
        kernel("Conv", [x, w], 1).run()
    with pytest.raises(Exception, match="dY does not fit"):
        kernel("ConvGrad", [f32(1, 6, 5, 5), f32(1, 3, 5, 5), w], 3).run()


def rounded(array):
    return torch.tensor(array).bfloat16().float().numpy()


LOW_FORMS = {
    "strided": (20, 33, (3, 3), {"pads": [1] * 4, "strides": [2, 1]}),
    "odd depth": (3, 20, (5, 3), {"pads": [2, 1, 2, 1], "strides": [2, 2]}),
    "groups": (32, 16, (3, 3), {"pads": [1] * 4, "group": 2}),
    "point": (33, 7, (1, 1), {"strides": [2, 2]}),
    "wide": (70, 90, (3, 3), {"pads": [1] * 4}),
    "odd groups": (26, 28, (3, 3), {"pads": [2] * 4, "dilations": [2, 1], "group": 2}),
    "many taps": (13, 29, (7, 5), {"pads": [3, 2, 3, 2], "strides": [3, 2]}),
    "depthwise": (21, 21, (3, 3), {"pads": [1] * 4, "strides": [2, 1], "group": 21}),
    "rest unseen": (17, 48, (2, 2), {"strides": [4, 3]}),
}


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("form", LOW_FORMS)
def test_low_precision_rounds_operands_only(kernel, run_low, low, batch, form):
    """With precision=bf16 float32 operands are rounded; bf16 operands are taken as they are; sums are float32."""
    channels, filters, window, options = LOW_FORMS[form]
    x, w = f32(batch, channels, 9, 8), f32(filters, channels // options.get("group", 1), *window)
    rx, rw = rounded(x), rounded(w)
    (want,) = kernel("Conv", [rx, rw], 1, **options).run()
    dy = f32(*want.shape)
    wanted = kernel("ConvGrad", [rounded(dy), rx, rw], 2, **options).run()
    close = {"rtol": 1e-5, "atol": 8 * 2.0**-24 * math.prod(w.shape[1:])}
    if not low:
        for threads in (1, 2):
            (got,) = kernel("Conv", [x, w], 1, threads=threads, precision="bf16", **options).run()
            np.testing.assert_allclose(got, want, **close)
            got = kernel("ConvGrad", [dy, x, w], 2, threads=threads, precision="bf16", **options).run()
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
        return
    (got,) = run_low("Conv", [x, w], [True, True], [False], options)
    np.testing.assert_allclose(got, want, **close)
    (exact,) = kernel("Conv", [x, w], 1, precision="bf16", **options).run()
    assert np.array_equal(got, exact)
    (got,) = run_low("Conv_b", [x, w], [True, True], [True], options)
    assert np.array_equal(got, rounded(exact))
    exact = kernel("ConvGrad", [dy, x, w], 2, precision="bf16", **options).run()
    dx, dw = run_low("ConvGrad_b", [dy, x, w], [True] * 3, [True, False], options)
    assert np.array_equal(dx, rounded(exact[0])) and np.array_equal(dw, exact[1])


PAIRED_FORMS = {  # batch, channels, size, filters
    "sums of a thread's own": (3, 128, (3, 3), 256),
    "several rounds of images": (9, 64, (40, 40), 48),
    "several panels": (5, 66, (9, 12), 150),
}


@pytest.mark.parametrize("form", PAIRED_FORMS)
def test_pairs_at_any_number_of_threads(kernel, form):
    batch, channels, size, filters = PAIRED_FORMS[form]
    x, w, dy = f32(batch, channels, *size), f32(filters, channels, 3, 3), f32(batch, filters, *size)
    options = {"pads": [1] * 4, "precision": "bf16"}
    runs = [
        [
            *kernel("Conv", [x, w], 1, threads=threads, **options).run(),
            *kernel("ConvGrad", [dy, x, w], 2, threads=threads, **options).run(),
        ]
        for threads in (1, 2)
    ]
    wx, ww = wide(rounded(x), rounded(w))
    y = F.conv2d(wx, ww, padding=1)
    exact = [y, *torch.autograd.grad(y, (wx, ww), torch.tensor(rounded(dy), dtype=torch.float64))]
    for a, b, c, length in zip(*runs, exact, (9 * channels, 9 * filters, batch * math.prod(size)), strict=True):
        assert np.array_equal(a, b)
        near(a, c, length)


@pytest.mark.parametrize("image,channel", [(0, 6), (1, 7), (2, 32)])
def test_a_pair_keeps_what_is_not_finite_to_itself(kernel, image, channel):
    """Neither the other image nor the other channel of a pair, nor zeros beside an odd last one, take part in it."""
    x, w, dy = f32(3, 33, 6, 7), f32(32, 33, 3, 3), f32(3, 32, 6, 7)
    x[image, channel, 4, 4] = np.nan
    options = {"pads": [1] * 4, "precision": "bf16"}
    (y,) = kernel("Conv", [x, w], 1, **options).run()
    touched = np.zeros(y.shape, bool)
    touched[image, :, 3:6, 3:6] = True
    assert np.array_equal(np.isnan(y), touched)
    (dw,) = kernel("ConvGrad", [dy, x, w], 2, absent=("o0",), **options).run()
    assert np.isnan(dw[:, channel]).all() and np.isnan(dw).sum() == dw[:, channel].size
    channel = min(channel, 31)
    dy[image, channel, 0, 0] = np.inf
    (dx,) = kernel("ConvGrad", [dy, x, w], 1, **options).run()
    touched = np.zeros(dx.shape, bool)
    touched[image, :, :2, :2] = True
    assert np.array_equal(~np.isfinite(dx), touched)


def node_of(op, *shapes, outputs=1, **attributes):
    values = [ir.val(f"v{i}", dtype=ir.DataType.FLOAT, shape=list(s)) for i, s in enumerate(shapes)]
    node = ir.node(op, values, attributes=attributes, num_outputs=outputs, domain="" if op == "Conv" else "ortgraph")
    ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 18}, name="g")
    return node


@pytest.mark.parametrize("form", ["plain", "whole tiles", "stem", "several groups of images", "dilated groups"])
def test_sizes_in_the_table_of_low_convolutions(form):
    x, w, _, options, _ = problem(form)
    one = {k: list(v) if k != "group" else v for k, v in options.items()} | {"precision": "bf16"}
    node = node_of("Conv", x.shape, w.shape, **one)
    g = Window.of(node, x.shape, w.shape)
    lanes, depth = -(-g.filters // 16) * 16, -(-g.channels // 2) * math.prod(g.window)
    assert conv_scratch(node) >= 4 * depth * lanes or 4 * g.filters < 3 * lanes
    dy = (x.shape[0], w.shape[0], *g.out)
    node = node_of("ConvGrad", dy, x.shape, w.shape, outputs=2, **one)
    assert conv_grad_scratch(node) > 4 * (g.channels * math.prod(g.padded) + g.filters * math.prod(g.out))
    assert conv_grad_thread_scratch(node) > 0 or 4 * g.channels < 3 * -(-g.channels // 16) * 16


@pytest.mark.parametrize("form", FORMS)
def test_sizes_in_the_table_are_those_of_the_kernel(form):
    x, w, bias, options, function = problem(form)
    y = function(*[torch.tensor(a) for a in (x, w, bias)])
    one = {k: list(v) if k != "group" else v for k, v in options.items()}
    node = node_of("Conv", x.shape, w.shape, **one)
    gradient = node_of("ConvGrad", y.shape, x.shape, w.shape, outputs=3, **one)
    g = Window.of(node, x.shape, w.shape)
    assert g.out == y.shape[2:]
    if g.in_small_groups:
        assert conv_scratch(node) == conv_grad_scratch(gradient) == 0
        assert conv_thread_scratch(node) > 4 * (g.channels * math.prod(g.padded) + math.prod(g.out))
        assert conv_grad_thread_scratch(gradient) > 4 * (math.prod(g.padded) + g.filters * math.prod(g.out))
        return
    tiles = g.filtered()
    assert conv_scratch(node) >= 4 * (16 * w.size // 9 if tiles else g.images * g.channels * math.prod(g.padded))
    assert (conv_thread_scratch(node) > 4 * 16 * tiles.rows * tiles.across * (g.channels + 64)) if tiles else True
    assert conv_grad_scratch(gradient) > 4 * (16 * w.size // 9 if tiles else g.images * g.filters * math.prod(g.out))
    assert conv_grad_thread_scratch(gradient) > 0 or not tiles


def test_which_convolutions_have_a_kernel():
    def why(x, w, **attributes):
        return kernels.reason(node_of("Conv", x, w, **attributes))

    assert why((2, 16, 8, 8), (32, 16, 3, 3)) is None
    assert why((2, 16, 8), (32, 16, 3)) is None
    assert "spatial" in why((2, 16, 8, 8, 8), (32, 16, 3, 3, 3))
    assert "auto_pad" in why((2, 16, 8, 8), (32, 16, 3, 3), auto_pad="SAME_UPPER")
    assert "negative" in why((2, 16, 8, 8), (32, 16, 3, 3), pads=[-1, 0, 0, 0])
    assert why((2, 16, 8, 8), (16, 1, 3, 3), group=16) is None
