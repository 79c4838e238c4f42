"""What only checks of values read needs no translation; what has no type in ONNX is named with its place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortgraph
from ortgraph.errors import CaptureError, UnsupportedError


class Checked(nn.Module):
    """Checks its values by an operator without a translation, and draws once for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x.abs() >= 0)
        nn.functional.dropout(x, 0.25)
        return nn.functional.dropout(self.linear(x), 0.5).square().mean()


def test_checks_of_values_are_left_out():
    graph = ortgraph.capture(Checked(), (torch.randn(3, 4),))
    operators = [n.op_type for n in graph.graph]
    assert "ReduceMin" not in operators
    assert "And" not in operators
    (drawing,) = (n for n in graph.graph if n.op_type == "Dropout")
    assert drawing.attributes["ratio"].as_float() == 0.5


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.linear(x)).real.square().mean()


def test_complex_numbers_are_named_with_their_line():
    with pytest.raises(UnsupportedError, match=r"complex64.*test_checks\.py"):
        ortgraph.capture(Fourier(), (torch.randn(3, 4),))


class Labelled(nn.Module):
    """Its loss counts rows that have a label."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = (labels >= 0).nonzero().view(-1)
        if rows.shape[0] > 0:
            return nn.functional.cross_entropy(self.linear(x)[rows], labels[rows])
        return self.linear(x).sum() * 0


def test_a_loss_that_looks_at_values_is_refused_with_the_way_out():
    batch = {"x": torch.randn(3, 4), "labels": torch.tensor([0, -1, 1])}
    with pytest.raises(CaptureError, match=r"(?s)test_checks\.py.*give loss= a function of the scores"):
        ortgraph.capture(Labelled(), batch)
