"""Nothing to train on: empty batches are refused before the runtime leaves garbage in a gradient; empty parameters."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")
from torch.nn import functional as F  # noqa: E402

import ortgraph  # noqa: E402
from ortgraph.errors import BatchError  # noqa: E402


class Net(torch.nn.Module):
    """Two parameters without elements beside one with."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.eye(4))
        self.none, self.rows = torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.zeros(0, 4))

    def forward(self, x):
        h = x @ torch.cat([self.w, self.rows])
        return {"loss": h.square().sum() + self.none.sum(), "h": h}


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_an_empty_batch_is_refused_and_the_session_goes_on(level, dynamic):
    axes = {"x": {0: "batch"}} if dynamic else None
    example = torch.ones(3 if dynamic else 0, 4)
    graph = ortgraph.optimize(ortgraph.capture(Net(), {"x": example}, axes), level, optimizer=ortgraph.optim.AdamW())
    session = ortgraph.TrainingSession(graph.graph, poison=True)
    nothing = np.zeros((0, 4), np.float32)
    for run in (session.gradients, session.step):
        with pytest.raises(BatchError, match="no elements"):
            run({"x": nothing})
    out = session.evaluate({"x": nothing})
    assert out["h"].shape == (0, 4) and out["loss"] == 0
    if dynamic:
        ones = np.ones((2, 4), np.float32)
        np.testing.assert_array_equal(session.gradients({"x": ones})["w"], np.full((4, 4), 4.0))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_empty_parameters_train(level):
    graph = ortgraph.capture(Net(), {"x": torch.ones(3, 4)})
    adamw = ortgraph.optim.AdamW(max_grad_norm=1.0)
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, level, optimizer=adamw).graph, poison=True)
    session.step({"x": np.ones((3, 4), np.float32)})
    state = session.state_dict()
    assert state["none"].shape == (0,) and state["rows"].shape == (0, 4) and np.isfinite(state["w"]).all()


def test_a_model_that_uses_bfloat16_itself_runs_between_casts():
    class Brain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return F.relu(self.layer(x).bfloat16()).float().sum()

    module = Brain()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    module(x).backward()
    session = ortgraph.TrainingSession(ortgraph.capture(module, {"x": x}))
    assert session.loss({"x": x}) == pytest.approx(float(module(x)), rel=1e-5)
    found = session.gradients({"x": x})
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad.numpy(), rtol=1e-5)
