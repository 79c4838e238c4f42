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
