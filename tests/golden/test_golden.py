"""Before and after in the graph's own text. Refresh with: pytest tests/golden --refresh-golden, then read the diff."""

from __future__ import annotations

import pathlib

import pytest

from ortgraph.graph import TrainingGraph
from ortgraph.manager import PassManager, parse_pipeline
from ortgraph.passes import pipelines

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402

FOLDER = pathlib.Path(__file__).parent
# The shipped cost table and no compiled kernels: the text is the same on every machine.
LOWER = "lower{kernels=false},eliminate-dead-code,fold-constants,eliminate-common-subexpressions"


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3), torch.nn.LayerNorm(8)

    def forward(self, x, labels):
        return torch.nn.functional.cross_entropy(self.down(self.norm(torch.nn.functional.gelu(self.up(x)))), labels)


class FirstToken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(9, 4)
        self.qkv, self.head = torch.nn.Linear(4, 12), torch.nn.Linear(4, 2)

    def forward(self, ids, labels):
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        h = torch.softmax(q @ k.transpose(1, 2) / 2, -1) @ v
        return torch.nn.functional.cross_entropy(self.head(h[:, 0]), labels)


CASES = {
    "mlp": (Mlp, lambda: {"x": torch.zeros(5, 4), "labels": torch.zeros(5, dtype=torch.long)}),
    "first_token": (
        FirstToken,
        lambda: {"ids": torch.zeros(2, 6, dtype=torch.long), "labels": torch.zeros(2, dtype=torch.long)},
    ),
}


def stages(name: str) -> dict[str, TrainingGraph]:
    torch.manual_seed(0)
    module, batch = CASES[name]
    graph = ortgraph.capture(module(), batch())
    optimized = graph.clone()
    steps = (pipelines.CANONICAL, pipelines.FUSION, pipelines.CANONICAL, pipelines.MATMUL, "mark-optimized")
    PassManager(parse_pipeline(",".join(steps)), verify="types").run(optimized)
    lowered = optimized.clone()
    PassManager(parse_pipeline(LOWER), verify="types").run(lowered)
    return {"captured": graph, "optimized": optimized, "lowered": lowered}


@pytest.mark.parametrize("name", sorted(CASES))
def test_text(name, request):
    for stage, graph in stages(name).items():
        path = FOLDER / f"{name}.{stage}.txt"
        if request.config.getoption("--refresh-golden"):
            path.write_text(graph.text())
        assert graph.text() == path.read_text(), f"{path.name} differs: refresh and read the diff"
