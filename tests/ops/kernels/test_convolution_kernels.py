"""Convolution, batch norm and pooling kernels against PyTorch in float64, and in low precision against rounded operands."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

from onnx import TensorProto, helper  # noqa: E402

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
def test_low_precision_rounds_operands_only(kernel, low, batch, form):
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


def run_low(op, inputs, low_inputs, low_outputs, options):
    """A kernel between casts to and from bfloat16."""
    import onnxruntime

    nodes, names = [], []
    for i, low in enumerate(low_inputs):
        names.append(f"c{i}" if low else f"i{i}")
        if low:
            nodes.append(helper.make_node("Cast", [f"i{i}"], [f"c{i}"], to=TensorProto.BFLOAT16))
    made = [f"k{o}" if low else f"o{o}" for o, low in enumerate(low_outputs)]
    nodes.append(helper.make_node(op, names, made, domain="ortgraph.kernels", **options))
    nodes += [
        helper.make_node("Cast", [f"k{o}"], [f"o{o}"], to=TensorProto.FLOAT) for o, low in enumerate(low_outputs) if low
    ]
    graph = helper.make_graph(
        nodes,
        "low",
        [helper.make_tensor_value_info(f"i{i}", TensorProto.FLOAT, a.shape) for i, a in enumerate(inputs)],
        [helper.make_empty_tensor_value_info(f"o{o}") for o in range(len(low_outputs))],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ortgraph.kernels", 1)]
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.register_custom_ops_library(str(kernels.library_path()))
    model = helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    return session.run(None, {f"i{i}": a for i, a in enumerate(inputs)})


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


# -- batch norm --------------------------------------------------------------------------------------------------------

SHAPES = [(4, 3, 5, 7), (2, 64, 24, 24), (9, 5), (3, 2, 33), (2, 3, 2, 3, 4), (1, 2, 2, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_and_gradient(kernel, shape):
    c = shape[1]
    x, dy, scale, bias = f32(*shape) * 2 + 3, f32(*shape), f32(c), f32(c)
    mean, var = f32(c), f32(c) ** 2
    wx, ws, wb = wide(x, scale, bias)
    new_mean, new_var = (torch.tensor(a, dtype=torch.float64) for a in (mean, var))
    y = F.batch_norm(wx, new_mean, new_var, ws, wb, training=True, momentum=0.3, eps=1e-3)
    expected = torch.autograd.grad(y, (wx, ws, wb), torch.tensor(dy, dtype=torch.float64))
    got = kernel("BatchNorm", [x, scale, bias, mean, var], 5, momentum=0.3, epsilon=1e-3).run()
    axes = [i for i in range(len(shape)) if i != 1]
    inv_std = 1 / np.sqrt(x.astype(np.float64).var(tuple(axes)) + 1e-3)
    near(got[0], y, 8)
    for a, b in zip(got[1:], (new_mean, new_var, x.astype(np.float64).mean(tuple(axes)), inv_std), strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=2e-6, atol=1e-6)
    grads = kernel("BatchNormGrad", [dy, x, scale, got[3], got[4]], 3).run()
    limit = max(1.0, np.abs(expected[0].numpy()).max())
    for a, b, length in zip(grads, expected, (8 * limit, x.size // c, x.size // c), strict=True):
        near(a, b, 4 * length)
    for i in range(3):
        some = kernel(
            "BatchNormGrad",
            [dy, x, scale, got[3], got[4]],
            3,
            threads=1,
            absent=tuple(f"o{j}" for j in range(3) if j != i),
        )
        assert np.array_equal(some.run()[0], grads[i])


@pytest.mark.parametrize("low_x", [False, True])
@pytest.mark.parametrize("low_y", [False, True])
@pytest.mark.parametrize("low_dy", [False, True])
def test_batch_norm_in_low_precision(kernel, low_x, low_y, low_dy):
    """Reads and writes either type; what is between is float32, so it is the float32 kernel on the rounded values."""
    c = 19
    x, dy, scale, bias, mean, var = f32(3, c, 5, 7), f32(3, c, 5, 7), f32(c), f32(c), f32(c), f32(c) ** 2
    given = rounded(x) if low_x else x
    plain = kernel("BatchNorm", [given, scale, bias, mean, var], 5).run()
    want = [rounded(plain[0]) if low_y else plain[0], *plain[1:]]
    inputs = [low_x, False, False, False, False]
    name = "BatchNorm_b" if low_y else "BatchNorm"
    got = run_low(name, [x, scale, bias, mean, var], inputs, [low_y, False, False, False, False], {})
    statistics = plain[3:]
    plain = kernel("BatchNormGrad", [rounded(dy) if low_dy else dy, given, scale, *statistics], 3).run()
    want += [rounded(plain[0]) if low_y else plain[0], *plain[1:]]
    name = "BatchNormGrad_b" if low_y else "BatchNormGrad"
    inputs = [low_dy, low_x, False, False, False]
    got += run_low(name, [dy, x, scale, *statistics], inputs, [low_y, False, False], {})
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b)


def test_batch_norm_far_from_zero(kernel):
    """The variance is that of the differences: nothing cancels at a mean of 1000."""
    x = (f32(4, 2, 30, 30) + 1000).astype(np.float32)
    one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    y, _, _, _, inv_std = kernel("BatchNorm", [x, one, zero, zero, one], 5).run()
    np.testing.assert_allclose(inv_std, 1 / np.sqrt(x.astype(np.float64).var((0, 2, 3)) + 1e-5), rtol=1e-5)
    assert abs(float(y.mean())) < 1e-4 and float(y.std()) == pytest.approx(1, rel=1e-4)


def test_batch_norm_keeps_not_a_number_in_its_channel(kernel):
    x = f32(3, 4, 5, 5)
    x[1, 2, 3, 3] = np.nan
    one, zero = np.ones(4, np.float32), np.zeros(4, np.float32)
    y, mean, *_ = kernel("BatchNorm", [x, one, zero, zero, one], 5).run()
    assert np.isnan(y[:, 2]).all() and np.isfinite(np.delete(y, 2, 1)).all()
    assert np.isnan(mean).tolist() == [False, False, True, False]


# -- pooling -----------------------------------------------------------------------------------------------------------

POOLS = [((3, 3), (2, 2), (1, 1)), ((2, 3), (1, 2), (0, 1)), ((4, 4), (4, 4), (0, 0)), ((3,), (2,), (1,))]


@pytest.mark.parametrize("window,strides,pads", POOLS)
def test_max_pool_gradient(kernel, window, strides, pads):
    dims = len(window)
    x = f32(3, 20, *(19, 14)[:dims])
    (wx,) = wide(x)
    y, at = (F.max_pool2d if dims == 2 else F.max_pool1d)(wx, window, strides, pads, return_indices=True)
    dy = f32(*y.shape)
    (expected,) = torch.autograd.grad(y, wx, torch.tensor(dy, dtype=torch.float64))
    planes = np.arange(60).reshape(3, 20, *[1] * dims) * math.prod(x.shape[2:])
    (dx,) = kernel("MaxPoolGrad", [dy, at.numpy() + planes, x], 1).run()
    near(dx, expected, 4)


@pytest.mark.parametrize("window,strides,pads", POOLS)
@pytest.mark.parametrize("size", [(19, 14), (48, 51), (4, 4)])
def test_max_pool(kernel, window, strides, pads, size):
    dims = len(window)
    x = np.round(f32(3, 20, *size[:dims]) * 4) / 4  # equal values: the first one counts
    x[0, 3].flat[1:3] = np.nan
    x[1, 4] = -np.inf
    x[2, 5].flat[2] = np.inf
    want, at = (F.max_pool2d if dims == 2 else F.max_pool1d)(
        torch.tensor(x), window, strides, pads, return_indices=True
    )
    planes = np.arange(60).reshape(3, 20, *[1] * dims) * math.prod(x.shape[2:])
    options = {"kernel_shape": window, "strides": strides, "pads": [*pads, *pads]}
    for threads in (1, 2):
        y, indices = kernel("MaxPool", [x], 2, threads=threads, **options).run()
        assert np.array_equal(y, want.numpy(), equal_nan=True)
        assert np.array_equal(indices, at.numpy() + planes)
    assert np.array_equal(kernel("MaxPool", [x], 1, **options).run()[0], y, equal_nan=True)


def test_max_pools_that_have_no_kernel():
    def why(x, **attributes):
        value = ir.val("x", dtype=ir.DataType.FLOAT, shape=x)
        return kernels.reason(ir.node("MaxPool", [value], attributes=attributes, num_outputs=2))

    assert why((2, 3, 8, 8), kernel_shape=[3, 3], pads=[1] * 4) is None
    assert "spatial" in why((2, 3, 8, 8, 8), kernel_shape=[3, 3, 3])
    assert "ceil_mode" in why((2, 3, 8, 8), kernel_shape=[3, 3], ceil_mode=1)
    assert "dilations" in why((2, 3, 8, 8), kernel_shape=[3, 3], dilations=[2, 2])
    assert "pads" in why((2, 3, 8, 8), kernel_shape=[2, 2], pads=[2, 0, 0, 0])


def test_max_pool_index_outside_its_plane_is_refused(kernel):
    at = np.array([[[[0]], [[3]]]])
    with pytest.raises(Exception, match="index 3 is outside its plane"):
        kernel("MaxPoolGrad", [f32(1, 2, 1, 1), at, f32(1, 2, 2, 2)], 1).run()


@pytest.mark.parametrize("window,strides,pads", POOLS)
@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("ceil", [False, True])
def test_average_pool_gradient(kernel, window, strides, pads, include, ceil):
    dims = len(window)
    x = f32(2, 5, *(19, 14)[:dims])
    (wx,) = wide(x)
    function = F.avg_pool2d if dims == 2 else F.avg_pool1d
    y = function(wx, window, strides, pads, ceil, bool(include))
    dy = f32(*y.shape)
    (expected,) = torch.autograd.grad(y, wx, torch.tensor(dy, dtype=torch.float64))
    options = {"kernel_shape": window, "strides": strides, "pads": [*pads, *pads], "count_include_pad": include}
    (dx,) = kernel("AveragePoolGrad", [dy, x], 1, **options).run()
    near(dx, expected, 8)
