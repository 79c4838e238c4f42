"""The sign of a zero decides between the infinities: a number that all elements share keeps it in compiled kernels."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402


class Quotient(torch.nn.Module):
    """Large enough for a generated kernel; the loss shows what it computes (evaluation runs single operators)."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(256, 64))

    def forward(self, x, divisor):
        h = self.w * x
        return ((h * h + 1).abs() / divisor * 2).sum()


class Constants(torch.nn.Module):
    """Zeros of both signs as constants of one kernel."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(256, 64))

    def forward(self, x):
        h = self.w * x
        return ((h * h + 1) / 0.0 * 2 + torch.exp((h.abs() + 1) / -0.0)).sum()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_constant_zeros_of_both_signs_stay_apart(level):
    module, batch = Constants(), {"x": torch.ones(1)}
    session = ortgraph.TrainingSession(ortgraph.optimize(ortgraph.capture(module, batch), level).graph)
    assert session.loss(batch) == module(**batch).item() == float("inf")


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("shape", [(), (256, 1), (1, 64), (256, 64)], ids=str)
def test_division_by_a_negative_zero(shape, level):
    module, x = Quotient(), torch.ones(1)
    for zero in (0.0, -0.0):
        batch = {"x": x, "divisor": torch.full(shape, zero)}
        session = ortgraph.TrainingSession(ortgraph.optimize(ortgraph.capture(module, batch), level).graph)
        assert session.loss(batch) == module(**batch).item()
