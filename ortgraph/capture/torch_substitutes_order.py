"""Order statistics, running extremes and look-ups in sorted tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ortgraph.capture.torch_substitutes import substitute


class Selected(NamedTuple):
    """What a selecting reduction returns."""

    values: torch.Tensor
    indices: torch.Tensor


@substitute(torch.kthvalue, torch.Tensor.kthvalue)
def kthvalue(input: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest along a dimension, by sorting."""
    if input.dim() == 0:
        return NotImplemented
    values, indices = input.sort(dim)
    made = values.narrow(dim, k - 1, 1), indices.narrow(dim, k - 1, 1)
    return Selected(*(v if keepdim else v.squeeze(dim) for v in made))


@substitute(torch.median, torch.Tensor.median)
def median(input: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower median. Of a whole tensor its gradient is shared by all that are equal to it, as in PyTorch."""
    if dim is not None:
        return kthvalue(input, (input.shape[dim] + 1) // 2, dim, keepdim) if input.dim() else NotImplemented
    flat = input.reshape(-1)
    middle = flat.detach().sort().values[(flat.shape[0] - 1) // 2]
    if not input.is_floating_point():
        return middle
    equal = (flat == middle).to(input.dtype)
    return middle + ((flat - middle) * equal).sum() / equal.sum()


def _running(value: torch.Tensor, dim: int, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Running results of an associative function, in doubling steps."""
    step, size = 1, value.shape[dim]
    while step < size:
        later = join(value.narrow(dim, 0, size - step), value.narrow(dim, step, size - step))
        value = torch.cat([value.narrow(dim, 0, step), later], dim)
        step *= 2
    return value


def _running_extreme(input: torch.Tensor, dim: int, join: Any) -> Selected:
    plain = input.detach()
    extreme = _running(plain, dim, join)
    shape = [1] * input.dim()
    shape[dim] = input.shape[dim]
    at = torch.where(plain == extreme, torch.arange(input.shape[dim]).reshape(shape), 0)
    indices = _running(at, dim, torch.maximum)
    return Selected(input.gather(dim, indices), indices)


@substitute(torch.cummax, torch.Tensor.cummax)
def cummax(input: torch.Tensor, dim: int) -> Any:
    """Running maxima; of equal ones the last counts, as in PyTorch."""
    return _running_extreme(input, dim, torch.maximum) if input.dim() else NotImplemented


@substitute(torch.cummin, torch.Tensor.cummin)
def cummin(input: torch.Tensor, dim: int) -> Any:
    """Running minima; of equal ones the last counts, as in PyTorch."""
    return _running_extreme(input, dim, torch.minimum) if input.dim() else NotImplemented


@substitute(torch.logcumsumexp, torch.Tensor.logcumsumexp)
def logcumsumexp(input: torch.Tensor, dim: int) -> Any:
    """Running log-sum-exps."""
    return _running(input, dim, torch.logaddexp) if input.dim() else NotImplemented


@substitute(torch.searchsorted)
def searchsorted(
    sorted_sequence: torch.Tensor, input: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Any = None, **rest: Any,
) -> Any:  # fmt: skip
    """The number of elements below each value."""
    if rest or not isinstance(input, torch.Tensor):
        return NotImplemented
    table = sorted_sequence.detach() if sorter is None else sorted_sequence.detach().gather(-1, sorter)
    return _places(table, input.detach(), right or side == "right", out_int32)


@substitute(torch.bucketize)
def bucketize(
    input: Any, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False, **rest: Any
) -> Any:
    """The bucket of each value."""
    if rest or not isinstance(input, torch.Tensor):
        return NotImplemented
    return _places(boundaries.detach(), input.detach(), right, out_int32)


def _places(table: torch.Tensor, values: torch.Tensor, right: bool, short: bool) -> torch.Tensor:
    rows = table if table.dim() == 1 else table.unsqueeze(-2)
    below = rows <= values.unsqueeze(-1) if right else rows < values.unsqueeze(-1)
    return below.sum(-1, dtype=torch.int32 if short else torch.int64)


@substitute(torch.repeat_interleave, torch.Tensor.repeat_interleave)
def repeat_interleave(
    input: torch.Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Repeats given as a tensor, where the size of the result is given, too."""
    if output_size is None or not isinstance(repeats, torch.Tensor):
        return NotImplemented
    value = input.reshape(-1) if dim is None else input
    axis = 0 if dim is None else dim
    counts = repeats.reshape(-1).expand(value.shape[axis])
    at = _places(counts.cumsum(0), torch.arange(output_size), True, False)
    return value.index_select(axis, at)
