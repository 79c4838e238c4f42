"""Functions of PyTorch: loss and gradients against PyTorch and float64, many in one graph. Alone: ``-m slow``."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F


def by_experts(w):
    """Rows 0 and 1 belong to the first matrix, none to the second, the others to the third."""
    rows, ends = w.reshape(-1, 4)[:6], torch.tensor([2, 2, 6], dtype=torch.int32)
    if w.dtype == torch.float64:  # PyTorch has it in float32 only
        return rows.unsqueeze(1).matmul(w[torch.tensor([0, 0, 2, 2, 2, 2])]).squeeze(1)
    return F.grouped_mm(rows, w, offs=ends)


M, I, T = (4, 6), (2, 4, 9, 8), (3, 4, 4)  # noqa: E741
index = torch.tensor([[1, 3, 1], [0, 1, 2]])
ids = torch.tensor([[1, 3, 1], [0, 6, 2]])


def written(w):
    y = w.clone()
    y[1] = 2.0
    y[:, 2] = w[:, 3] * 2
    y[:, 1::2] = w[:, ::2] * 3
    y[1::2] += 1.0
    y[::3, :4:2] = w[:2, :2]
    y[w > 1] = 0.5
    y[torch.tensor([0, 2])] = w[torch.tensor([1, 3])] * 2
    return y


ORDER = {
    "median": ((4, 7), lambda w: w.median()),
    "median_ties": ((4, 7), lambda w: (w.detach().round() + w * 0).median()),
    "median_dim": (M, lambda w: w.median(1).values + w.median(0, keepdim=True).values.sum()),
    "kthvalue": (M, lambda w: w.kthvalue(2, 1).values),
    "quantile": (M, lambda w: torch.quantile(w, 0.3, dim=1)),
    "cummax": ((5, 7), lambda w: w.cummax(1).values + w.cummin(0).values),
    "cummax_ties": ((3, 8), lambda w: w * w.detach().round().cummax(1).indices),
    "logcumsumexp": ((5, 7), lambda w: torch.logcumsumexp(w * 5, 1)),
    "cumprod": (M, lambda w: w.cumprod(0)),
    "searchsorted": (M, lambda w: w * torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype=w.dtype), w)),
    "searchsorted_rows": (M, lambda w: w * torch.searchsorted(w.detach().sort(1).values, w.detach(), right=True)),
    "bucketize": (M, lambda w: w * torch.bucketize(w, torch.tensor([-1.0, 0.0], dtype=w.dtype), right=True)),
    "repeats": (M, lambda w: w.repeat_interleave(torch.tensor([1, 2, 0, 3]), 0, output_size=6)),
    "var_mean": (M, lambda w: torch.cat([*torch.var_mean(w, 1), *torch.std_mean(w, 0)])),
    "sort": (M, lambda w: w.sort(0, descending=True).values * w.argsort(1)),
    "prod_zero": ((3, 4), lambda w: (w * (torch.arange(4) != 2)).prod(1)),
    "counts": (M, lambda w: w[:, :4] * torch.histc(w.detach(), 4, -0.75, 1.0)),
    "experts": ((3, 4, 8), by_experts),
    "logsumexp": (M, lambda w: torch.logsumexp(w, (0, 1)) + torch.logaddexp(w, w.flip(0))),
}
DISTANCE = {
    **{
        f"norm_{p}".replace(".", "_"): (M, lambda w, p=p: torch.linalg.vector_norm(w, p, dim=1))
        for p in (0.5, 1, 2, 3, math.inf, 0)
    },
    "norm_zero": (M, lambda w: torch.linalg.vector_norm(w * 0, dim=1)),
    **{
        f"cdist_{p}".replace(".", "_"): (T, lambda w, p=p: torch.cdist(w, w[:, :3] * 2 + 1, p=p))
        for p in (1.0, 2.0, 3.0, math.inf)
    },
    "cdist_same": (M, lambda w: torch.cdist(w, w) + torch.cdist(w, w, p=1.5)),
    "cdist_product": ((30, 3), lambda w: torch.cdist(w, w.flip(0) * 2 + 1)),
    "pdist": ((5, 3), lambda w: F.pdist(w)),
    "cov": (M, torch.cov),
    "dist": (M, lambda w: torch.dist(w, w * w, 3)),
    "hypot": (M, lambda w: torch.hypot(w * 1e20, w.flip(0) * 1e20) * 1e-20),
    "cosine": (M, lambda w: F.cosine_similarity(w, w.flip(0))),
    "einsum": (T, lambda w: torch.einsum("...ij,...kj->...ik", w, w) + torch.einsum("bii->b", w).sum()),
    "bilinear": (M, lambda w: F.bilinear(w[:, :3], w[:, 3:], w[:2, :3].unsqueeze(2) * w[0, :3])),
}
PLACES = {
    "written": (M, written),
    **{
        f"scatter_{r}_{s}": (M, lambda w, r=r, s=s: w.scatter_reduce(0, index, w[:2, :3] * 2 + 3, r, include_self=s))
        for r in ("sum", "prod", "mean", "amax", "amin")
        for s in (True, False)
    },
    "index_add": (M, lambda w: w.index_add(0, torch.tensor([0, 2, 0]), w[:3] * 2, alpha=0.5)),
    "index_copy": (M, lambda w: w.index_copy(0, torch.tensor([0, 2]), w[:2] * 3).index_fill(1, index[0, :2], 0.5)),
    "take": (M, lambda w: torch.take(w, torch.tensor([1, 5, 9, 1, -1]))),
    "triangle": ((4, 4), lambda w: w[torch.tril_indices(4, 4)[0], torch.tril_indices(4, 4)[1]]),
    "diagonals": ((4, 4), lambda w: torch.diag_embed(w).sum(0) + torch.diag(w[0]) + torch.trace(w)),
    "unfold": ((3, 9), lambda w: w.unfold(1, 3, 2)),
    "rotated": (M, lambda w: torch.rot90(w).roll(3).fliplr()),
    **{f"bag_{m}": ((7, 5), lambda w, m=m: F.embedding_bag(ids, w, mode=m, padding_idx=3)) for m in ("sum", "mean")},
    "bag_max": ((7, 5), lambda w: F.embedding_bag(torch.tensor([[1, 3], [0, 6]]), w, mode="max")),
    **{
        f"bag_offsets_{m}": ((7, 5), lambda w, m=m: F.embedding_bag(ids.flatten(), w, torch.tensor([0, 2, 2]), mode=m))
        for m in ("sum", "mean", "max")
    },
    "bag_weights": ((7, 5), lambda w: F.embedding_bag(ids, w, mode="sum", per_sample_weights=w[:2, :3])),
    "windows": (M, lambda w: w * torch.hamming_window(6, dtype=w.dtype) + w * torch.hann_window(6, dtype=w.dtype)),
    "copysign": (M, lambda w: torch.copysign(w, w.flip(0)) + torch.fmax(w, w.flip(1)) + torch.fmin(w, w.flip(0))),
    "ldexp": (M, lambda w: torch.ldexp(w, torch.tensor([2]))),
    "broadcast": ((4, 1), lambda w: w * w.T[:, :3] + w / (w.T**2 + 1)[:, :3] - torch.maximum(w, w.T[:, :3])),
    "empty": ((0, 4), lambda w: w.softmax(1) * 2),
    "empty_sum": ((3, 0), lambda w: w.sum(1)),
}


def sampled(mode, padding, align=False):
    def apply(w):
        grid = w[:, :2, :4, :3].permute(0, 2, 3, 1).tanh() * 1.3
        return F.grid_sample(w, grid, mode=mode, padding_mode=padding, align_corners=align)

    return apply


VISION = {
    **{
        f"grid_{m}_{p}": (I, sampled(m, p))
        for m in ("bilinear", "nearest", "bicubic")
        for p in ("zeros", "border", "reflection")
    },
    "grid_corners": (I, sampled("bilinear", "reflection", True)),
    "grid_3d": (
        (2, 3, 4, 5, 6),
        lambda w: F.grid_sample(w, w.permute(0, 2, 3, 4, 1).tanh(), align_corners=False),
    ),
    **{f"resize_{m}": (I, lambda w, m=m: F.interpolate(w, (5, 13), mode=m)) for m in ("bilinear", "bicubic", "area")},
    **{
        f"antialias_{m}": (I, lambda w, m=m: F.interpolate(w, (4, 5), mode=m, antialias=True))
        for m in ("bilinear", "bicubic")
    },
    "trilinear": ((2, 3, 3, 4, 5), lambda w: F.interpolate(w, (4, 5, 7), mode="trilinear", align_corners=True)),
    "affine_grid": ((2, 2, 3), lambda w: F.affine_grid(w, (2, 3, 4, 5), align_corners=False)),
    "adaptive_max": (I, lambda w: F.adaptive_max_pool2d(w, (4, 3)) + F.adaptive_max_pool2d(w, (4, 3), True)[1]),
    "adaptive_max_1": ((2, 3, 9), lambda w: F.adaptive_max_pool1d(w, 2)),
    "adaptive_max_3": ((2, 3, 5, 6, 4), lambda w: F.adaptive_max_pool3d(w, 3)),
    "adaptive_average_3": ((2, 3, 5, 6, 4), lambda w: F.adaptive_avg_pool3d(w, (3, 2, None))),
    "average_3_alone": ((3, 4, 4, 4), lambda w: F.avg_pool3d(w, 2)),
    "replicate": (I, lambda w: F.pad(w, (1, 2, 0, 3), mode="replicate")),
    "replicate_crop": ((2, 3, 6), lambda w: F.pad(w, (-1, 2), mode="replicate")),
    "replicate_one": ((2, 3, 1), lambda w: F.pad(w, (2, 1), mode="replicate")),
    "replicate_3": ((2, 2, 3, 4, 5), lambda w: F.pad(w, (1, 2, 0, 1, 2, 0), mode="replicate")),
    "circular": (I, lambda w: F.pad(w, (1, 2, 2, 1), mode="circular") + F.pad(w, (1, 2, 2, 1), mode="reflect")),
    "grouped_heads": ((2, 4, 5, 4), lambda w: F.scaled_dot_product_attention(w, w[:, :2], w[:, 2:], enable_gqa=True)),
}
whole = torch.tensor([3, -5, 12, 7, 0, 1])
LIBRARY = {  # what the exporter's function library translates
    "shifts": (M, lambda w: w * ((whole << 2) + (whole >> 1))),
    "shifts_by": (M, lambda w: w * (torch.bitwise_left_shift(whole, whole.abs() % 3) + whole.bitwise_right_shift(1))),
    "shifts_more": (M, lambda w: w * (torch.bitwise_right_shift(whole, whole.abs() % 3) + whole.bitwise_left_shift(2))),
    "bits": (M, lambda w: w * ((5 & whole) + (5 | whole) + (5 ^ whole))),
    "addbmm": ((3, 4, 4), lambda w: torch.addbmm(w[0], w, w, beta=0.5, alpha=2)),
    "angle": (M, lambda w: w * torch.angle(w) + w * torch.signbit(w)),
    "blackman": (M, lambda w: w * torch.blackman_window(6, dtype=w.dtype)),
    "exp2": (M, torch.exp2),
    "remainder": (M, lambda w: w * torch.remainder(2.5, w.detach().abs() + 0.4)),
    "rounded": (M, lambda w: w * torch.round(w, decimals=1)),
    "windows": ((3, 9), lambda w: w.unfold(1, 3, 2)),
    "bicubic": (I, lambda w: F.interpolate(w, scale_factor=1.7, mode="bicubic")),
    "bicubic_corners": (I, lambda w: F.interpolate(w, (5, 13), mode="bicubic", align_corners=True)),
    "bilinear": (I, lambda w: F.interpolate(w, scale_factor=1.7, mode="bilinear")),
    "bilinear_corners": (I, lambda w: F.interpolate(w, (5, 13), mode="bilinear", align_corners=True)),
    "trilinear": ((2, 3, 3, 4, 5), lambda w: F.interpolate(w, scale_factor=2, mode="trilinear")),
}
GROUPS = {"order": ORDER, "distance": DISTANCE, "places": PLACES, "vision": VISION, "library": LIBRARY}


@pytest.mark.parametrize("group", GROUPS)
def test_many_in_one_graph(check_together, group):
    check_together(GROUPS[group])


@pytest.mark.slow
@pytest.mark.parametrize("name", [(g, n) for g, cases in GROUPS.items() for n in cases], ids=lambda v: v[1])
def test_alone(check_together, name):
    group, case = name
    check_together({case: GROUPS[group][case]})
