"""Batch norm and pooling kernels against PyTorch in float64."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")


from ortgraph.ops import kernels  # noqa: E402

F = torch.nn.functional
RNG = np.random.default_rng(18)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def wide(*arrays):
    return [torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in arrays]


def rounded(array):
    return torch.tensor(array).bfloat16().float().numpy()


def near(got, expected, depth):
    """Sums of `depth` products of standard normal numbers: within a few roundings of their spread."""
    expected = expected.detach().numpy()
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=8 * 2.0**-24 * max(depth, 1))


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
def test_batch_norm_in_low_precision(kernel, run_low, low_x, low_y, low_dy):
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
