"""A network deep enough that activations outweigh what one operation needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ortgraph
from ortgraph.graph import TrainingGraph


@pytest.fixture(scope="session")
def captured_blocks() -> TrainingGraph:
    """Four residual feed-forward blocks of width 16 on [batch, 16], mean square; dimension ``batch`` is symbolic."""
    torch = pytest.importorskip("torch", reason="the model is PyTorch's")
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x):
            return self.blocks(x).square().mean()

    torch.manual_seed(0)
    return ortgraph.capture(Model(), {"x": torch.randn(64, 16)}, dynamic={"x": {0: "batch"}})


@pytest.fixture(scope="session")
def blocks(captured_blocks: TrainingGraph) -> Callable[..., TrainingGraph]:
    """``blocks(batch=64, optimizer=None)``: the network optimized and planned without a budget. Not to be changed."""
    made: dict[tuple[int, str], TrainingGraph] = {}

    def make(batch: int = 64, optimizer=None) -> TrainingGraph:
        key = (batch, str(optimizer))
        if key not in made:
            made[key] = ortgraph.optimize(captured_blocks, "O2", optimizer=optimizer, shapes={"batch": batch}).graph
        return made[key]

    return make
