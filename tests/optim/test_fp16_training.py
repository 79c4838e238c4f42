"""Training in float16 with a scale that is too large at first: it overflows by itself, backs off, and trains."""

from __future__ import annotations

import numpy as np
import pytest

import ortgraph
from ortgraph.optim import AdamW, LossScale

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body = torch.nn.Embedding(20, 16), torch.nn.Linear(16, 32)
        self.norm, self.head = torch.nn.LayerNorm(32), torch.nn.Linear(32, 3)

    def forward(self, ids, y):
        hidden = self.norm(torch.nn.functional.gelu(self.body(self.table(ids))))
        return torch.nn.functional.cross_entropy(self.head(hidden).mean(1), y)


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(1)
    batch = {"ids": torch.randint(0, 20, (6, 5)), "y": torch.randint(0, 3, (6,))}
    return ortgraph.capture(Net(), batch), batch


def test_overflow_back_off_and_training(captured, tmp_path) -> None:
    graph, batch = captured
    policy = LossScale(initial=2.0**24, interval=6)
    made = ortgraph.optimize(graph, optimizer=AdamW(lr=1e-2, max_grad_norm=1.0), precision="fp16", loss_scale=policy)
    session = ortgraph.TrainingSession(made.graph, threads=2)
    start, losses = session.state_dict(), []
    while session.skipped_steps == session.steps and session.steps < 20:
        before = session.state_dict()
        losses.append(session.step(batch))
        if session.skipped_steps == session.steps:
            assert all(np.array_equal(before[n], v) for n, v in session.state_dict().items())
            session.save_checkpoint(tmp_path / "overflow")
    skipped = session.skipped_steps
    assert 0 < skipped < 20 and session.loss_scale == 2.0 ** (24 - skipped), "float16 cannot hold these gradients"
    assert losses[:-1] == [losses[0]] * skipped, "nothing moved while it overflowed"
    assert any(not np.array_equal(start[n], v) for n, v in session.state_dict().items())
    resumed = ortgraph.TrainingSession(made.graph, threads=2)
    resumed.load_checkpoint(tmp_path / "overflow")
    assert resumed.step(batch) == losses[-1]
    more = [(session.step(batch), resumed.step(batch)) for _ in range(12)]
    assert all(a == b for a, b in more) and more[-1][0] < 0.8 * losses[0]
    assert session.loss_scale == resumed.loss_scale and session.skipped_steps == resumed.skipped_steps


def test_fp16_scales_by_default_and_bf16_does_not(captured) -> None:
    graph, _ = captured
    kinds = {}
    for precision in ("fp16", "bf16"):
        made = ortgraph.optimize(graph, optimizer=AdamW(), precision=precision)
        kinds[precision] = {s.kind for s in made.graph.signature.states}
    assert "loss_scale" in kinds["fp16"] and "loss_scale" not in kinds["bf16"]
    fixed = ortgraph.optimize(graph, optimizer="sgd(loss_scale=8)", precision="fp16").graph
    assert ortgraph.TrainingSession(fixed).loss_scale == 8.0


def test_gradients_are_those_of_float32_within_rounding(captured) -> None:
    graph, batch = captured
    exact = ortgraph.TrainingSession(ortgraph.optimize(graph, optimizer=AdamW()).graph).gradients(batch)
    scaled = ortgraph.optimize(graph, optimizer=AdamW(), precision="fp16", loss_scale=1024.0).graph
    for name, value in ortgraph.TrainingSession(scaled).gradients(batch).items():
        assert np.linalg.norm(value - exact[name]) < 5e-3 * np.linalg.norm(exact[name]), name
