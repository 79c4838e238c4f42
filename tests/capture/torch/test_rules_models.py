"""Operators that models of images with text need: padding by name, values put where a mask is."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Valid(nn.Module):
    """Convolutions whose padding is named, in one and two dimensions, with a stride and with a dilation."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 3, 2, stride=2, padding="valid")
        self.same = nn.Conv2d(3, 3, (3, 2), padding="same", dilation=(2, 1))
        self.line = nn.Conv1d(3, 2, 2, padding="valid", dilation=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(self.same(self.patches(x)).flatten(2)).square().mean()


class Scattered(nn.Module):
    """Values of one table where the mask is, of another elsewhere."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.values = nn.Parameter(torch.randn(4, 5, 3)), nn.Parameter(torch.randn(rows, 3))
        self.register_buffer("weight", torch.randn(4, 5, 3))

    def forward(self, mask: torch.Tensor) -> torch.Tensor:
        mixed = self.table.masked_scatter(mask[..., None].expand(4, 5, 3), self.values)
        return (mixed * self.weight).tanh().sum()


def test_padding_by_name(check_capture):
    torch.manual_seed(0)
    check_capture(Valid(), {"x": torch.randn(2, 2, 8, 6)}, repeats=2)


@pytest.mark.parametrize("rows", [6, 9])  # as many as there are places, and more
def test_values_in_the_order_of_a_mask(check_capture, rows):
    torch.manual_seed(0)
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[0, 1:3] = mask[2, 0] = mask[3, 2:] = True
    check_capture(Scattered(rows), {"mask": mask}, repeats=2)


class Strided(nn.Module):
    """Adaptive pooling in one dimension, and views by strides: in order, with gaps, with repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pool = nn.Linear(4, 4), nn.AdaptiveAvgPool1d(1)
        self.table = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(self.linear(x).transpose(1, 2)).flatten(1)
        doubled = 2 * self.table
        gaps, repeats = doubled.as_strided((3, 2), (8, 2), 1), doubled.as_strided((5, 3), (4, 2))
        return pooled.square().sum() + gaps.tanh().sum() + (repeats * torch.arange(15.0).view(5, 3)).sin().sum()


def test_views_by_strides(check_capture):
    torch.manual_seed(0)
    check_capture(Strided(), {"x": torch.randn(2, 5, 4)}, repeats=2)


class Bucketed(nn.Module):
    """Positions in buckets of a logarithm, at whose borders the last bit decides."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        far = torch.arange(1, x.shape[0] + 1).float()
        buckets = torch.ceil(torch.log(far / 4) / torch.log(torch.tensor(2.0)) * 3).long().clamp(0, 15)
        return (self.table(buckets) * x).square().sum()


def test_buckets_of_constants_are_those_of_pytorch(check_capture):
    torch.manual_seed(0)
    graph = check_capture(Bucketed(), {"x": torch.randn(64, 3)}, repeats=2)
    assert not {"Log", "Ceil"} & {n.op_type for n in graph.graph}
