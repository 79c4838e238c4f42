"""Memory of long runs: the same after many steps as after the first few, through each door.

The record of 10 000 steps: ``pytest -m slow -n 0 -s tests/hazards/test_steady_memory.py``.
"""

from __future__ import annotations

import ctypes
import gc
import pathlib
import resource
from collections.abc import Callable

import pytest
import torch

import ortgraph
from ortgraph.optim import AdamW, FusedAdam

ROWS, KIBI = 8, 1024


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = torch.nn.Linear(16, 32), torch.nn.LayerNorm(32)
        self.drop, self.head = torch.nn.Dropout(0.1), torch.nn.Linear(32, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.nn.functional.gelu(self.norm(self.body(x))))
        return torch.nn.functional.cross_entropy(self.head(hidden), y)


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, 16), "y": torch.randint(0, 3, (ROWS,))}


def session() -> Callable[[], object]:
    graph = ortgraph.optimize(ortgraph.capture(Net(), batch()), "O2", optimizer=AdamW(max_grad_norm=1.0)).graph
    made = ortgraph.TrainingSession(graph)
    return lambda: made.step(batch(), learning_rate=1e-3)


def scripted(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    def step() -> float:
        optimizer.zero_grad()
        loss = module(**batch())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def module() -> Callable[[], object]:
    made = ortgraph.ORTModule(Net())
    return scripted(made, FusedAdam(made.parameters()))


def compiled() -> Callable[[], object]:
    torch._dynamo.reset()
    made = torch.compile(Net(), backend="ortgraph")
    return scripted(made, torch.optim.AdamW(made.parameters()))


def resident() -> int:
    """Bytes of this process in memory, without what is free and not given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("steps", "settled", "bound"),
    [(500, 200, 256 * KIBI), pytest.param(10_000, 1_000, 1024 * KIBI, marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("error::ortgraph.dynamo.backend.FallbackWarning")
@pytest.mark.parametrize("door", [session, module, compiled])
def test_memory_stays(door: Callable[[], Callable[[], object]], steps: int, settled: int, bound: int) -> None:
    step = door()
    for _ in range(settled):
        step()
    before = resident()
    for _ in range(steps - settled):
        step()
    after = resident()
    print(f"\n{door.__name__}: {before / KIBI:.0f} KiB after {settled} steps, {after / KIBI:.0f} KiB after {steps}")
    assert after - before <= bound
