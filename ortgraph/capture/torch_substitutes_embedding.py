"""Bags of embeddings as look-ups and sums."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from ortgraph.capture.torch_substitutes import substitute


@substitute(F.embedding_bag)
def embedding_bag(
    input: torch.Tensor, weight: torch.Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """``torch.nn.functional.embedding_bag``: rows of a matrix, or one row of indices cut at offsets."""
    if max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    padding = padding_idx + weight.shape[0] if padding_idx is not None and padding_idx < 0 else padding_idx
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counted = torch.ones_like(input, dtype=torch.bool) if padding is None else input != padding
    if input.dim() == 2:
        return _pooled(rows, counted, mode)
    starts = offsets[:-1] if include_last_offset else offsets
    bag = (torch.arange(input.shape[0]) >= starts.unsqueeze(1)).sum(0) - 1
    bags = starts.shape[0]
    if mode == "max":
        member = (bag == torch.arange(bags).unsqueeze(1)) & counted
        return _pooled(rows.unsqueeze(0).expand(bags, -1, -1), member, mode)
    total = rows.new_zeros([bags, rows.shape[1]]).index_add(0, bag, rows * counted.unsqueeze(1).to(rows.dtype))
    if mode == "sum":
        return total
    count = rows.new_zeros([bags]).index_add(0, bag, counted.to(rows.dtype))
    return total / count.clamp(min=1).unsqueeze(1)


def _pooled(rows: torch.Tensor, counted: torch.Tensor, mode: str) -> torch.Tensor:
    """[B, n, D] over n; a bag without elements is 0."""
    kept = counted.unsqueeze(-1)
    if mode == "max":
        top = torch.where(kept, rows, -math.inf).max(1).values
        return torch.where(kept.any(1), top, 0)
    total = (rows * kept.to(rows.dtype)).sum(1)
    return total if mode == "sum" else total / kept.to(rows.dtype).sum(1).clamp(min=1)
