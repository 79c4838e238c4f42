"""Normalization gradients against PyTorch autograd in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F


def sample(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape,axis", [((5, 7), -1), ((2, 3, 33), -1), ((2, 3, 4, 5), -2), ((6,), 0), ((1, 3), -1)])
def test_layer_norm_gradient(operator_case, shape, axis, affine):
    tail = shape[axis:]
    x = torch.tensor(sample(shape) * 2 + 3, requires_grad=True)
    scale = torch.tensor(sample(tail, 1), requires_grad=True)
    bias = torch.zeros(tail, dtype=torch.float64, requires_grad=True)
    dy = sample(shape, 2)
    F.layer_norm(x, tail, scale if affine else None, bias if affine else None, 1e-5).backward(torch.tensor(dy))
    inner = tuple(range(len(shape) + axis if axis < 0 else axis, len(shape)))
    with torch.no_grad():
        mean = x.mean(inner, keepdim=True)
        inv_std = 1 / torch.sqrt(x.var(inner, unbiased=False, keepdim=True) + 1e-5)
    inputs = [dy, *(t.detach().numpy() for t in (x, mean, inv_std))]
    if not affine:
        operator_case("LayerNormGrad", inputs, 1, axis=axis).check([x.grad.numpy()])
        return
    expected = [t.grad.numpy() for t in (x, scale, bias)]
    operator_case("LayerNormGrad", [*inputs, scale.detach().numpy()], 3, axis=axis).check(expected)


def test_layer_norm_gradient_is_as_accurate_as_pytorch_float32(operator_case):
    shape = (64, 257)
    x, scale, dy = sample(shape) + 10.0, sample(shape[-1:], 1), sample(shape, 2)

    def gradients(dtype):
        xt = torch.tensor(x.astype(np.float32)).to(dtype).requires_grad_()
        st = torch.tensor(scale.astype(np.float32)).to(dtype).requires_grad_()
        bt = torch.zeros(shape[-1:], dtype=dtype, requires_grad=True)
        F.layer_norm(xt, shape[-1:], st, bt, 1e-5).backward(torch.tensor(dy.astype(np.float32)).to(dtype))
        return [t.grad.double().numpy() for t in (xt, st, bt)]

    exact, torch32 = gradients(torch.float64), gradients(torch.float32)
    x32 = torch.tensor(x.astype(np.float32))
    _, mean, inv_std = torch.native_layer_norm(x32, shape[-1:], None, None, 1e-5)
    case = operator_case("LayerNormGrad", [dy, x32.numpy(), mean.numpy(), inv_std.numpy(), scale], 3, axis=-1)
    for result, want, peer in zip(case.runtime(2), exact, torch32, strict=True):
        own, theirs = np.linalg.norm(result - want), np.linalg.norm(peer - want)
        assert own <= 2 * theirs + 1e-7 * np.linalg.norm(want), (own, theirs)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (3, 4, 5, 7), (2, 1, 1, 1)])
def test_batch_norm(operator_case, shape):
    channels = shape[1]
    x = torch.tensor(sample(shape) * 2 + 1, requires_grad=True)
    scale, bias = (torch.tensor(sample((channels,), s), requires_grad=True) for s in (1, 2))
    old_mean, old_var = sample((channels,), 3), np.abs(sample((channels,), 4))
    mean, var = torch.tensor(old_mean), torch.tensor(old_var)
    y = F.batch_norm(x, mean, var, scale, bias, training=True, momentum=0.2, eps=1e-3)
    dy = sample(shape, 5)
    y.backward(torch.tensor(dy))
    axes = tuple(i for i in range(len(shape)) if i != 1)
    saved_mean = x.detach().numpy().mean(axes)
    saved_inv = 1 / np.sqrt(x.detach().numpy().var(axes) + 1e-3)
    inputs = [t.detach().numpy() for t in (x, scale, bias)]
    expected = [y.detach().numpy(), mean.numpy(), var.numpy(), saved_mean, saved_inv]
    operator_case("BatchNorm", [*inputs, old_mean, old_var], 5, epsilon=1e-3, momentum=0.2).check(expected)
    gradients = [t.grad.numpy() for t in (x, scale, bias)]
    case = operator_case("BatchNormGrad", [dy, inputs[0], inputs[1], saved_mean, saved_inv], 3)
    case.check(gradients, rtol=1e-4)
