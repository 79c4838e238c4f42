"""Sampling at computed places: grids, single elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ortgraph.capture.torch_substitutes import substitute

_CUBIC = -0.75  # PyTorch's coefficient


@substitute(F.grid_sample)
def grid_sample(
    input: torch.Tensor, grid: torch.Tensor, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """``torch.nn.functional.grid_sample`` of [N, C, (D,) H, W]: one look-up of all neighbours, and their weights."""
    corners = bool(align_corners)
    sizes = input.shape[2:]
    n = len(sizes)
    raw = [_unscaled(grid[..., n - 1 - i], sizes[i], corners) for i in range(n)]

    def inside(place: torch.Tensor, size: Any) -> torch.Tensor:
        return _bounded(place, size, padding_mode, corners)

    if mode == "bicubic":
        taps = [_cubic_taps(x, size, inside) for x, size in zip(raw, sizes, strict=True)]
    else:
        places = [inside(x, size) for x, size in zip(raw, sizes, strict=True)]
        taps = [_nearest_taps(x) if mode == "nearest" else _linear_taps(x) for x in places]
    table = input.movedim(1, -1).reshape(-1, input.shape[1])
    start = torch.arange(input.shape[0]).reshape([-1] + [1] * (grid.dim() - 2))
    rows, weights = [], []
    for chosen in itertools.product(*taps):
        row: Any = start
        weight: Any = 1
        for (place, factor), size in zip(chosen, sizes, strict=True):
            whole = place.detach()
            outside = (whole < 0) | (whole > size - 1)
            weight = weight * torch.where(outside, 0, factor)
            row = row * size + whole.clamp(0, size - 1).to(torch.int64)
        rows.append(row)
        weights.append(weight)
    near = F.embedding(torch.stack(rows, -1), table)
    return (near * torch.stack(weights, -1).unsqueeze(-1)).sum(-2).movedim(-1, 1)


def _unscaled(x: torch.Tensor, size: Any, corners: bool) -> torch.Tensor:
    """From -1 ... 1 to places along an axis."""
    return (x + 1) / 2 * (size - 1) if corners else ((x + 1) * size - 1) / 2


def _bounded(x: torch.Tensor, size: Any, padding: str, corners: bool) -> torch.Tensor:
    if padding == "border":
        return x.clamp(0, size - 1)
    if padding != "reflection":
        return x
    low, span = (0.0, size - 1) if corners else (-0.5, size)
    if corners and size == 1:
        return x * 0
    beyond = (x - low).abs()
    turns = (beyond.detach() / span).floor()
    rest = beyond - turns * span
    folded = torch.where(torch.remainder(turns, 2) == 0, rest + low, span - rest + low)
    return folded.clamp(0, size - 1)


Tap = tuple[torch.Tensor, torch.Tensor]


def _linear_taps(x: torch.Tensor) -> Sequence[Tap]:
    low = x.detach().floor()
    return (low, low + 1 - x), (low + 1, x - low)


def _nearest_taps(x: torch.Tensor) -> Sequence[Tap]:
    return ((x.detach().round(), x * 0 + 1),)  # the grid has a gradient of zeros, as in PyTorch


def _cubic_taps(x: torch.Tensor, size: Any, inside: Callable[[torch.Tensor, Any], torch.Tensor]) -> Sequence[Tap]:
    low = x.detach().floor()
    t = x - low

    def near(d: torch.Tensor) -> torch.Tensor:
        return ((_CUBIC + 2) * d - (_CUBIC + 3)) * d * d + 1

    def far(d: torch.Tensor) -> torch.Tensor:
        return ((_CUBIC * d - 5 * _CUBIC) * d + 8 * _CUBIC) * d - 4 * _CUBIC

    factors = (far(t + 1), near(t), near(1 - t), far(2 - t))
    return [(inside(low + k - 1, size), factor) for k, factor in enumerate(factors)]


@substitute(torch.take, torch.Tensor.take)
def take(input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Elements of the flattened tensor."""
    return input.reshape(-1)[index]


@substitute(torch.hypot, torch.Tensor.hypot)
def hypot(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """sqrt(x^2 + y^2) without overflow, with gradient x / hypot; NaN at (0, 0) as in PyTorch."""
    size = torch.maximum(input.detach().abs(), other.detach().abs())
    scale = torch.where((size > 0) & (size < math.inf), size, 1)
    a, b = input / scale, other / scale
    return scale * (a * a + b * b).sqrt()
