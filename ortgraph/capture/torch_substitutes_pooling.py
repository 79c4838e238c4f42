"""Adaptive pooling whose windows are uneven."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ortgraph.capture.torch_substitutes import substitute


def _sizes(output_size: Any, spatial: Sequence[Any]) -> list[Any]:
    given = [output_size] * len(spatial) if isinstance(output_size, int) else list(output_size)
    return [size if want is None else want for want, size in zip(given, spatial, strict=True)]


def _bounds(size: int, count: int) -> list[tuple[int, int]]:
    """First element of every window, and the one behind its last."""
    return [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def _uneven(x: torch.Tensor, output_size: Any, n: int) -> list[int] | None:
    """Output sizes, None where all windows are equal or sizes are symbolic."""
    spatial = x.shape[-n:]
    if not all(isinstance(s, int) for s in spatial):
        return None
    out = _sizes(output_size, spatial)
    return None if all(s % o == 0 for s, o in zip(spatial, out, strict=True)) else out


@substitute(F.adaptive_avg_pool3d)
def adaptive_avg_pool3d(input: torch.Tensor, output_size: Any) -> Any:
    """One averaging matrix per axis."""
    out = _uneven(input, output_size, 3)
    if out is None:
        return NotImplemented
    for axis, count in zip((-3, -2, -1), out, strict=True):
        size = input.shape[axis]
        rows = [[(first <= j < last) / (last - first) for j in range(size)] for first, last in _bounds(size, count)]
        matrix = torch.tensor(rows, dtype=torch.float64).to(input.dtype)
        input = (input.movedim(axis, -1) @ matrix.t()).movedim(-1, axis)
    return input


def _adaptive_max(x: torch.Tensor, output_size: Any, n: int) -> Any:
    """(values, indices within a plane): windows gathered side by side; short ones repeat their last element."""
    out = _uneven(x, output_size, n)
    if out is None:
        return NotImplemented
    plane = torch.zeros([1] * n, dtype=torch.int64)
    windows, wide = x, []
    for axis, count in enumerate(out):
        size = x.shape[axis - n]
        bounds = _bounds(size, count)
        width = max(last - first for first, last in bounds)
        places = torch.tensor([[min(first + k, last - 1) for k in range(width)] for first, last in bounds])
        windows = windows.index_select(axis - n, places.reshape(-1))
        shape = [1] * n
        shape[axis] = -1
        plane = plane * size + places.reshape(shape)
        wide += [count, width]
    lead = list(x.shape[:-n])
    order = [*range(0, 2 * n, 2), *range(1, 2 * n, 2)]
    windows = windows.reshape(lead + wide).permute([*range(len(lead)), *(len(lead) + i for i in order)])
    values, at = windows.reshape([*lead, *out, -1]).max(-1)
    places = plane.reshape(wide).permute(order).reshape([*out, -1])
    return values, places.expand([*lead, *places.shape]).gather(-1, at.unsqueeze(-1)).squeeze(-1)


def _replacement(n: int, indices: bool) -> Any:
    def apply(input: torch.Tensor, output_size: Any, return_indices: bool = indices) -> Any:
        made = _adaptive_max(input, output_size, n)
        return made if return_indices or made is NotImplemented else made[0]

    return apply


for _n in (1, 2, 3):
    substitute(getattr(F, f"adaptive_max_pool{_n}d_with_indices"))(_replacement(_n, True))
    substitute(getattr(F, f"adaptive_max_pool{_n}d"))(_replacement(_n, False))
