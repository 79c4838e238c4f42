"""The command line called in this process, and a captured graph on disk."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from ortgraph.cli import main

BUILD_FILE = """
import torch
from torch import nn

from ortgraph.optim import AdamW


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.down(nn.functional.gelu(self.up(x))), y)


def build():
    torch.manual_seed(0)
    data = [{"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))} for _ in range(4)]
    return {"module": Net(), "batch": data[0], "data": data, "optimizer": AdamW(lr=1e-2), "evaluate": data[:2]}
"""


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one call printed and returned."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out.strip().splitlines()[-1])


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """``cli("optimize", path, ...)`` runs the command; paths may be given as such."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: object) -> Ran:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(w) for w in words])
        captured = capfd.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def build_file(tmp_path: pathlib.Path) -> pathlib.Path:
    """A build file of a small classifier."""
    path = tmp_path / "small_net.py"
    path.write_text(BUILD_FILE)
    return path


@pytest.fixture
def graph_file(tmp_path: pathlib.Path, linear_graph: Any) -> pathlib.Path:
    """A captured linear regression graph."""
    return linear_graph.save(tmp_path / "linear.onnx")
