"""Operators: loss and gradients of small expressions against PyTorch and float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F


class Expression(nn.Module):
    """The weighted sum of a function of one parameter."""

    def __init__(self, shape: tuple[int, ...], function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.w = nn.Parameter(torch.randn(shape, generator=generator))
        self.function = function
        with torch.no_grad():
            shape = function(self.w).shape
        self.register_buffer("c", torch.randn(shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.function(self.w * x) * self.c).sum()


M = (4, 6)
I = (2, 4, 9, 8)  # noqa: E741
index = torch.tensor([[1, 3, 1], [0, 1, 2]])
EXPRESSIONS = {
    "gelu": (M, F.gelu),
    "gelu_tanh": (M, lambda w: F.gelu(w, approximate="tanh")),
    "silu": (M, F.silu),
    "elu": (M, F.elu),
    "selu": (M, F.selu),
    "celu": (M, lambda w: F.celu(w, 0.7)),
    "leaky": (M, lambda w: F.leaky_relu(w, 0.2)),
    "softplus": (M, lambda w: F.softplus(w, 2.0)),
    "mish": (M, F.mish),
    "hardswish": (M, F.hardswish),
    "hardsigmoid": (M, F.hardsigmoid),
    "hardtanh": (M, F.hardtanh),
    "relu6": (M, F.relu6),
    "logsigmoid": (M, F.logsigmoid),
    "softsign": (M, F.softsign),
    "tanhshrink": (M, F.tanhshrink),
    "glu": (M, lambda w: F.glu(w, -1)),
    "threshold": (M, lambda w: F.threshold(w, 0.3, 0.0)),
    "sigmoid": (M, torch.sigmoid),
    "erf": (M, torch.erf),
    "pow3": (M, lambda w: w**3),
    "pow_tensor": (M, lambda w: (w * w + 1) ** (w * 0.5)),
    "sqrt": (M, lambda w: (w * w + 1).sqrt()),
    "rsqrt": (M, lambda w: torch.rsqrt(w * w + 1)),
    "log1p": (M, lambda w: torch.log1p(w * w)),
    "expm1": (M, torch.expm1),
    "lgamma": (M, torch.lgamma),
    "lgamma_large": (M, lambda w: torch.lgamma(w.abs() * 1e4 + 1)),
    "lgamma_near_one": (M, lambda w: torch.lgamma(1.5 + w.tanh() / 2)),
    "digamma": (M, lambda w: torch.distributions.StudentT(w.exp() + 1).log_prob(w)),
    "argmax_int": (M, lambda w: w * (w * 100).long().argmax(-1, keepdim=True)),
    "logs": (M, lambda w: torch.log2(w * w + 1) + torch.log10(w * w + 2)),
    "trig": (M, lambda w: w.sin() * w.cos() + w.atan()),
    "atan2": (M, lambda w: torch.atan2(w, w.flip(0))),
    "clamp": (M, lambda w: w.clamp(-0.5, 0.7)),
    "clamp_min": (M, lambda w: w.clamp(min=0.1)),
    "maximum": (M, lambda w: torch.maximum(w, w.flip(1))),
    "where": (M, lambda w: torch.where(w > 0, w, w * w)),
    "masked_fill": (M, lambda w: w.masked_fill(w < 0, 2.0)),
    "lerp": (M, lambda w: torch.lerp(w, w * w, 0.3)),
    "addcmul": (M, lambda w: torch.addcmul(w, w, w, value=0.5)),
    "alpha": (M, lambda w: torch.add(w, w * w, alpha=3) - torch.sub(w, w.exp(), alpha=2) + torch.rsub(w, 1.0)),
    "remainder": (M, lambda w: torch.remainder(w, 0.7)),
    "floor": (M, lambda w: w * w.floor() + w.trunc()),
    "sum": (M, lambda w: (w * w).sum(0, keepdim=True) + w.mean(1, keepdim=True)),
    "var": (M, lambda w: w.var(1) + w.std(1)),
    "amax": (M, lambda w: w.amax(1) + w.amin(0).sum()),
    "max_dim": (M, lambda w: w.max(1).values * w.min(1).values),
    "norm": (M, lambda w: w.norm() + w.norm(dim=1)),
    "logsumexp": (M, lambda w: torch.logsumexp(w, 1)),
    "prod": (M, lambda w: (w + 2).prod(1)),
    "cumsum": (M, lambda w: w.cumsum(1)),
    "cumprod": (M, lambda w: w.cumprod(1)),
    "topk": (M, lambda w: w.topk(2, 1).values),
    "sort": (M, lambda w: w.sort(1, descending=True).values),
    "softmax": (M, lambda w: w.softmax(0)),
    "log_softmax": (M, lambda w: w.log_softmax(0)),
    "normalize": (M, lambda w: F.normalize(w, dim=1)),
    "layer_norm_plain": (M, lambda w: F.layer_norm(w, (6,))),
    "layer_norm_2": (I, lambda w: F.layer_norm(w, (9, 8))),
    "group_norm": (I, lambda w: F.group_norm(w, 2)),
    "instance_norm": (I, F.instance_norm),
    "rms_norm": (M, lambda w: F.rms_norm(w, (6,))),
    "slice": (M, lambda w: w[1:3, ::2]),
    "slice_end": (M, lambda w: w[:, -4:-1]),
    "select": (M, lambda w: w[:, -2] * w[1, 0]),
    "cat": (M, lambda w: torch.cat([w, w * w], 1)),
    "stack": (M, lambda w: torch.stack([w, w.exp()], 1)),
    "split": (M, lambda w: w.split([1, 2, 3], 1)[1] * w.chunk(3, 1)[0]),
    "unbind": (M, lambda w: w.unbind(0)[1] * w.unbind(0)[3]),
    "repeat": (M, lambda w: w.repeat(2, 1, 2)),
    "expand": (M, lambda w: w[:, None].expand(4, 3, 6)),
    "flip": (M, lambda w: w.flip(0, 1)),
    "roll": (M, lambda w: w.roll(2, 1) * w.roll((1, -1), (0, 1))),
    "pad": (M, lambda w: F.pad(w, (1, 2, 0, 1), value=3.0)),
    "crop": (M, lambda w: F.pad(w, (-1, 2))),
    "reflect": (M, lambda w: F.pad(w[None], (2, 1), mode="reflect")),
    "tril": (M, lambda w: w.tril(1) + w.triu(-1)),
    "gather": (M, lambda w: w.gather(0, index)),
    "index_select": (M, lambda w: w.index_select(1, index[0])),
    "index": (M, lambda w: w[index]),
    "index_two": ((4, 6, 3), lambda w: w[index, index + 1]),
    "index_middle": ((2, 4, 6, 3), lambda w: w[:, index, index]),
    "index_apart": ((4, 3, 4), lambda w: w[index[0], :, index[1]]),
    "index_negative": (M, lambda w: w[torch.tensor([-1, 0, -1])]),
    "scatter": (M, lambda w: w.scatter(0, index, 0.5)),
    "scatter_add": (M, lambda w: w.scatter_add(0, index, w[:2, :3] * 2)),
    "index_put": (M, lambda w: w.index_put((torch.tensor([1, 1, 3]),), w[:3] * 2, accumulate=True)),
    "permute": ((2, 3, 4), lambda w: w.permute(2, 0, 1).reshape(4, 6)),
    "diagonal": (M, lambda w: w.diagonal()),
    "matmul": ((3, 4, 4), lambda w: w @ w.transpose(1, 2)),
    "baddbmm": ((3, 4, 4), lambda w: torch.baddbmm(w, w, w, beta=0.5, alpha=2)),
    "einsum": ((3, 4, 4), lambda w: torch.einsum("bij,bkj->bik", w, w)),
    "addmm": ((4, 4), lambda w: torch.addmm(w, w, w, beta=2, alpha=0.5)),
    "outer": ((5,), lambda w: torch.outer(w, w) @ w),
    "dot": ((5,), lambda w: w.dot(w * 2)),
    "max_pool_ceil": (I, lambda w: F.max_pool2d(w, 2, 2, ceil_mode=True)),
    "max_pool_pad": (I, lambda w: F.max_pool2d(w, 3, 2, 1, 1)),
    "max_pool_dilated": (I, lambda w: F.max_pool2d(w, 2, 1, dilation=2)),
    "max_pool_1d": ((2, 3, 9), lambda w: F.max_pool1d(w, 2)),
    "average_pool": (I, lambda w: F.avg_pool2d(w, 3, 2, 1)),
    "average_uncounted": (I, lambda w: F.avg_pool2d(w, 3, 2, 1, count_include_pad=False)),
    "average_ceil": (I, lambda w: F.avg_pool2d(w, 2, 2, ceil_mode=True)),
    "average_1d": ((2, 3, 9), lambda w: F.avg_pool1d(w, 3)),
    "adaptive_uneven": (I, lambda w: F.adaptive_avg_pool2d(w, (4, 3))),
    "adaptive_one": (I, lambda w: F.adaptive_avg_pool2d(w, 1)),
    "adaptive_max": (I, lambda w: F.adaptive_max_pool2d(w, (3, 4))),
    "max_unpool": (I, lambda w: F.max_pool2d(w, 2, return_indices=True)[1] * w.mean()),
    "mse": (M, lambda w: F.mse_loss(w, w * w) + F.mse_loss(w, w.exp(), reduction="sum")),
    "l1": (M, lambda w: F.l1_loss(w, w * w)),
    "smooth_l1": (M, lambda w: F.smooth_l1_loss(w, w * w)),
    "huber": (M, lambda w: F.huber_loss(w, w * w)),
    "bce": (M, lambda w: F.binary_cross_entropy_with_logits(w, torch.full((4, 6), 0.3, dtype=w.dtype))),
    "bce_plain": (M, lambda w: F.binary_cross_entropy(w.sigmoid(), torch.full((4, 6), 0.3, dtype=w.dtype))),
    "kl": (M, lambda w: F.kl_div(w.log_softmax(1), torch.full((4, 6), 1 / 6, dtype=w.dtype), reduction="batchmean")),
    "smoothing": (M, lambda w: F.cross_entropy(w, torch.tensor([0, 5, 2, 2]), label_smoothing=0.1)),
    "weights": (
        M,
        lambda w: F.cross_entropy(w, torch.tensor([0, 5, 2, -100]), weight=torch.arange(1, 7, dtype=w.dtype)),
    ),
    "nll_none": (M, lambda w: F.nll_loss(w.log_softmax(1), torch.tensor([0, 5, 2, 2]), reduction="none")),
    "nll_sum": (
        M,
        lambda w: F.nll_loss(w.log_softmax(1), torch.tensor([0, 5, -1, 2]), reduction="sum", ignore_index=-1),
    ),
    "nll_single": ((6,), lambda w: F.cross_entropy(w, torch.tensor(2))),
    "soft_target": (M, lambda w: F.cross_entropy(w, w.detach().softmax(1))),
    "nll_2d": (I, lambda w: F.cross_entropy(w, torch.arange(144).reshape(2, 9, 8) % 4)),
    "cosine": (M, lambda w: F.cosine_similarity(w, w.flip(0))),
    "pairwise": (M, lambda w: F.pairwise_distance(w, w.flip(0))),
    "nearest": (I, lambda w: F.interpolate(w, scale_factor=2)),
    "bilinear": (I, lambda w: F.interpolate(w, (5, 13), mode="bilinear")),
    "pixel_shuffle": (I, lambda w: F.pixel_shuffle(w, 2)),
    "unfold": (I, lambda w: F.unfold(w, 3, padding=1)),
    "causal": ((2, 2, 5, 4), lambda w: F.scaled_dot_product_attention(w, w * 2, w + 1, is_causal=True)),
    "masked_sdpa": (
        (2, 2, 5, 4),
        lambda w: F.scaled_dot_product_attention(w, w * 2, w + 1, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril()),
    ),
    "sdpa_scale": (
        (2, 2, 5, 4),
        lambda w: F.scaled_dot_product_attention(w, w[:, :, :3] * 2, w[:, :, :3] + 1, scale=0.3),
    ),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expression(check_capture, name):
    shape, function = EXPRESSIONS[name]
    torch.manual_seed(1)
    check_capture(Expression(shape, function), {"x": torch.rand(shape) + 0.5}, repeats=2)
