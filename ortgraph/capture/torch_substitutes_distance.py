"""Distances between all pairs, and covariance."""

from __future__ import annotations

import math
from typing import Any

import torch

from ortgraph.capture.torch_substitutes import substitute

_BY_PRODUCT = 25  # rows above which PyTorch computes euclidean distances by a matrix product


def _root(square: torch.Tensor) -> torch.Tensor:
    """The square root, with gradient 0 at 0."""
    apart = square > 0
    return torch.where(apart, torch.where(apart, square, 1).sqrt(), 0)


def _length(difference: torch.Tensor, p: float) -> torch.Tensor:
    """The p-norm over the last dimension, with gradient 0 at 0."""
    size = difference.abs()
    if p == 0:
        return (size.detach() > 0).to(size.dtype).sum(-1)
    if p == 1:
        return size.sum(-1)
    if p == 2:
        return _root((difference * difference).sum(-1))
    if p == math.inf:
        return size.amax(-1)
    power = torch.where(size > 0, torch.where(size > 0, size, 1) ** p, 0).sum(-1)
    return torch.where(power > 0, torch.where(power > 0, power, 1) ** (1 / p), 0)


@substitute(torch.cdist)
def cdist(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> torch.Tensor:
    """Distances of all rows of one tensor to all rows of another."""
    many = max(x1.shape[-2], x2.shape[-2]) > _BY_PRODUCT and compute_mode.endswith("if_necessary")
    if p != 2 or not (many or compute_mode == "use_mm_for_euclid_dist"):
        return _length(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)
    squares = (x1 * x1).sum(-1, keepdim=True) + (x2 * x2).sum(-1).unsqueeze(-2)
    return _root(squares - 2 * (x1 @ x2.transpose(-1, -2)))


@substitute(torch.pdist)
def pdist(input: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Distances of all pairs of rows."""
    first, second = torch.triu_indices(input.shape[0], input.shape[0], 1).unbind(0)
    return _length(input[first] - input[second], p)


@substitute(torch.cov, torch.Tensor.cov)
def cov(input: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """The covariance matrix, without weights."""
    if fweights is not None or aweights is not None or input.dim() != 2:
        return NotImplemented
    centred = input - input.mean(1, keepdim=True)
    return centred @ centred.transpose(0, 1) / max(input.shape[1] - correction, 0)


@substitute(torch.dist, torch.Tensor.dist)
def dist(input: torch.Tensor, other: torch.Tensor, p: float = 2) -> torch.Tensor:
    """The p-norm of a difference."""
    return torch.linalg.vector_norm(input - other, p)
