"""AdamW, its multi-tensor and embedding forms, and the embedding gradient."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(12)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("decay", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95), (0.0, 0.9)])
def test_adamw_follows_pytorch(kernel, decay, betas):
    """Twelve steps from zero moments: as near to float64 as PyTorch's fused form, which rounds in another order."""
    shape, rate, epsilon = (37, 53), 3e-3, 1e-8
    w, m, v = f32(*shape), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    parameter = torch.nn.Parameter(torch.tensor(w))
    double = torch.nn.Parameter(torch.tensor(w, dtype=torch.float64))
    optimizers = [
        torch.optim.AdamW([p], lr=rate, betas=betas, eps=epsilon, weight_decay=decay, fused=p.dtype == torch.float32)
        for p in (parameter, double)
    ]
    attributes = {"beta1": betas[0], "beta2": betas[1], "epsilon": epsilon, "weight_decay": decay}
    for step in range(1, 13):
        g = f32(*shape)
        for p, optimizer in zip((parameter, double), optimizers, strict=True):
            p.grad = torch.tensor(g).to(p.dtype)
            optimizer.step()
        inputs = [np.float32(rate), np.int64(step), w, g, m, v]
        w, m, v = kernel("AdamW", inputs, 3, **attributes).run()
    state = optimizers[1].state[double]
    ours = np.abs(w - double.detach().numpy()).max()
    theirs = np.abs(parameter.detach().numpy() - double.detach().numpy()).max()
    assert ours <= 1.5 * theirs + 1e-9
    np.testing.assert_allclose(m, state["exp_avg"].numpy(), rtol=1e-5, atol=2e-7)
    np.testing.assert_allclose(v, state["exp_avg_sq"].numpy(), rtol=2e-6)


def test_gradient_scale_multiplies_the_gradient(kernel):
    w, g, m, v = f32(70), f32(70), f32(70), f32(70) ** 2
    head = [np.float32(1e-2), np.int64(5)]
    scaled = kernel("AdamW", [*head, w, g, m, v, np.float32(0.25)], 3).run()
    plain = kernel("AdamW", [*head, w, g * np.float32(0.25), m, v], 3).run()
    assert all(np.array_equal(a, b) for a, b in zip(scaled, plain, strict=True))
    assert not np.array_equal(scaled[0], kernel("AdamW", [*head, w, g, m, v], 3).run()[0])


def test_attributes_stand_for_their_decimals(kernel):
    """1 - 0.999 in float32 is off by 1.3e-5; the second moment must not be."""
    g = f32(64)
    zero = np.zeros(64, np.float32)
    _, _, v = kernel("AdamW", [np.float32(1e-3), np.int64(1), f32(64), g, zero, zero], 3, beta2=0.999).run()
    np.testing.assert_allclose(v, 0.001 * g.astype(np.float64) ** 2, rtol=3e-7)


def test_multi_tensor_form_equals_single_tensors(kernel):
    head, scale = [np.float32(1e-2), np.int64(9)], np.float32(0.5)
    tensors = [[f32(*s), f32(*s), f32(*s), f32(*s) ** 2] for s in ((100003,), (), (3, 5), (0, 4), (256, 256))]
    got = kernel("MultiAdamW", [*head, scale, None, *sum(tensors, [])], 15).run()
    for t, tensor in enumerate(tensors):
        for a, b in zip(kernel("AdamW", [*head, *tensor, scale], 3).run(), got[3 * t : 3 * t + 3], strict=True):
            assert np.array_equal(a, b) and a.shape == tensor[0].shape


@pytest.mark.parametrize(
    "rows,width,shape", [(50, 8, (4, 9)), (1900, 67, (300,)), (3, 1, (500,)), (10, 5, (0,)), (40, 256, ())]
)
def test_embedding_gradient(kernel, rows, width, shape):
    indices, dy = RNG.integers(0, rows, shape), f32(*shape, width)
    if indices.size:
        indices = np.where(RNG.random(shape) < 0.3, 2, indices)  # repeated rows
    for padding in (-1, 2):
        expected = np.zeros((rows, width))
        flat = indices.reshape(-1)
        kept = flat != padding
        np.add.at(expected, flat[kept], dy.astype(np.float64).reshape(-1, width)[kept])
        (got,) = kernel("EmbeddingGrad", [dy, indices], 1, rows=rows, padding_idx=padding).run()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        assert (got[np.setdiff1d(np.arange(rows), flat[kept])] == 0).all()


def test_negative_indices_count_from_the_end(kernel):
    dy = f32(3, 4)
    (got,) = kernel("EmbeddingGrad", [dy, np.array([-1, 0, 4])], 1, rows=5).run()
    np.testing.assert_allclose(got[4], dy[0] + dy[2], rtol=1e-6)


@pytest.mark.parametrize("scale", [None, 0.5, np.inf])
@pytest.mark.parametrize("rows,width", [(1900, 67), (30, 256), (7, 1)])
def test_embedding_update_equals_dense_update_bit_for_bit(kernel, rows, width, scale):
    dy, indices = f32(4, 25, width), RNG.integers(0, rows, (4, 25))
    w, m, v = f32(rows, width), f32(rows, width), f32(rows, width) ** 2
    head, tail = [np.float32(1e-2), np.int64(9)], [] if scale is None else [np.float32(scale)]
    (dense,) = kernel("EmbeddingGrad", [dy, indices], 1, rows=rows, padding_idx=3).run()
    expected = kernel("AdamW", [*head, w, dense, m, v, *tail], 3).run()
    got = kernel("EmbeddingAdamW", [*head, w, dy, indices, m, v, *tail], 3, padding_idx=3).run()
    for a, b in zip(expected, got, strict=True):
        assert np.array_equal(a, b, equal_nan=True)
