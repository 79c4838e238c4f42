"""Products of sorted rows with the matrices of their experts, and the counts that bound the experts' rows."""

from __future__ import annotations

from typing import Any

import torch

from ortgraph.capture.torch_substitutes import substitute


@substitute(torch.nn.functional.grouped_mm, torch._grouped_mm)
def grouped_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: Any = None, **rest: Any) -> Any:
    """``[S, K]`` rows, of which expert e has those before ``offs[e]``, times ``[E, K, N]``: ``[S, N]``.

    Every expert multiplies all rows, with those of the others at zero: E times the arithmetic, and no size depends on
    a value. Rows after the last expert's are zero.
    """
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or any(v is not None for v in rest.values()):
        return NotImplemented
    return _by_expert(mat_a, mat_b, offs)


@substitute("transformers.grouped_mm_fallback")
def grouped_mm_fallback(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The same, as ``transformers`` calls it while a model is traced."""
    return _by_expert(input, weight, offs)


def _by_expert(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    before = torch.arange(rows.shape[0]) < ends.detach().unsqueeze(1)
    taken = torch.cat([before[:1], before[1:] & ~before[:-1]])
    return torch.where(taken.unsqueeze(2), rows, 0).matmul(matrices).sum(0)


@substitute(torch.histc, torch.Tensor.histc)
def histc(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0, *, out: Any = None) -> Any:
    """Counts of bins of equal width; the last one has its upper bound, too."""
    if min >= max or out is not None:  # equal: bounds are those of the data
        return NotImplemented
    value = input.detach().reshape(-1)
    place = ((value - min) * bins / (max - min)).long().clamp(max=bins - 1)
    counted = (place == torch.arange(bins).unsqueeze(1)) & (value >= min) & (value <= max)
    return counted.sum(1).to(input.dtype)
