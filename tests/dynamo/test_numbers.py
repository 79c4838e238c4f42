"""Python numbers that differ from call to call: Dynamo passes them as tensors, and sizes as symbols beside them."""

from __future__ import annotations

import copy

import pytest
import torch

from ortgraph.dynamo import per_shape
from ortgraph.dynamo.backend import FallbackWarning


class Scaled(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.linear = scale, torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.linear(x)) * self.scale).sum(1).mean()


def test_numbers_and_sizes_may_change_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    found = per_shape.with_numbers

    def recording(graph, args, at):
        seen.append(tuple(at))
        return found(graph, args, at)

    monkeypatch.setattr("ortgraph.dynamo.backend.with_numbers", recording)
    torch._dynamo.reset()
    for scale, rows in ((0.5, 4), (1.5, 5), (2.5, 6), (3.5, 7), (0.5, 7)):
        module = Scaled(scale)
        eager = copy.deepcopy(module)
        compiled = torch.compile(module, backend="ortgraph", options={"fallback": False})
        x = torch.randn(rows, 6)
        loss, expected = compiled(x), eager(x)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(module.linear.weight.grad, eager.linear.weight.grad)
    assert any(seen)  # a number came as a tensor


def test_many_numbers_are_told() -> None:
    torch._dynamo.reset()
    module = Scaled(0.0)
    compiled = torch.compile(module, backend="ortgraph", options={"fallback": False})
    with pytest.warns(UserWarning, match="as a tensor"):
        for step in range(per_shape.MAX_SHAPES + 3):
            module.scale = float(step)
            compiled(torch.ones(2, 6))


def test_other_devices_are_left_to_pytorch() -> None:
    x = torch.ones(2, 6, device="meta")
    module = Scaled(1.0).to("meta")
    torch._dynamo.reset()
    with pytest.warns(FallbackWarning, match="a tensor is on meta"):
        assert torch.compile(module, backend="ortgraph")(x).device.type == "meta"
