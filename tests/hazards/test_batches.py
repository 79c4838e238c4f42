"""Batches as the user has them: nested, with None, with names that parameters have already."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402
from ortgraph.errors import BatchError  # noqa: E402


class Names(torch.nn.Module):
    """Inputs called as parameters, a nested input, an optional one."""

    def __init__(self):
        super().__init__()
        self.x, self.w = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x, w, extra=None, mask=None):
        h = x * self.w + w * self.x
        for item in (extra or {}).values():
            h = h * item[0]
        return h.sum() if mask is None else (h * mask).sum()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_batch_of_capture_is_a_batch_of_the_session(level, tmp_path):
    torch.manual_seed(0)
    module = Names()
    batch = {"x": torch.randn(3, 4), "w": torch.randn(3, 4), "extra": {"a/b": [torch.randn(4), None]}, "mask": None}
    module(**batch).backward()
    path = ortgraph.optimize(ortgraph.capture(module, batch), level).graph.save(tmp_path / "names.onnx")
    session = ortgraph.TrainingSession(ortgraph.load(path))
    for given in (batch, tuple(batch.values())):
        got = session.gradients(given)
        np.testing.assert_allclose(got["x"], module.x.grad.numpy(), rtol=1e-5)
        np.testing.assert_allclose(got["w"], module.w.grad.numpy(), rtol=1e-5)
    with pytest.raises(BatchError, match="no 'w'"):
        session.gradients({k: v for k, v in batch.items() if k != "w"})
    with pytest.raises(BatchError, match="unknown 'mask'"):
        session.gradients({**batch, "mask": torch.ones(3, 4)})
    with pytest.raises(BatchError, match=r"no 'extra.a/b.0'"):
        session.gradients({**batch, "extra": {}})


def test_none_for_an_input_of_the_graph_is_an_error():
    module = Names()
    batch = {"x": torch.ones(3, 4), "w": torch.ones(3, 4)}
    session = ortgraph.TrainingSession(ortgraph.capture(module, batch))
    with pytest.raises(BatchError):
        session.gradients({**batch, "x": None})


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_batch_statistics_of_one_value_are_refused(level):
    """PyTorch refuses them; here the loss was finite and the running variance, which only evaluation reads, NaN."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    names = {"input": {0: "rows"}, "target": {0: "rows"}}
    graph = ortgraph.capture(module, (torch.randn(4, 3), torch.randn(4, 2)), loss=torch.nn.MSELoss(), dynamic=names)
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, level, optimizer=ortgraph.optim.SGD(lr=0.1)).graph)
    one = (torch.randn(1, 3), torch.randn(1, 2))
    with pytest.raises(BatchError, match=r"one value per channel.*\n.*drop_last"):
        session.step(one)
    session.step((torch.randn(2, 3), torch.randn(2, 2)))
    assert all(np.isfinite(value).all() for value in session.state_dict().values())
    assert np.isfinite(session.evaluate(one)["output"]).all()  # evaluation takes single rows


def test_one_row_of_an_image_has_statistics():
    module = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    names = {"input": {0: "rows"}, "target": {0: "rows"}}
    batch = (torch.randn(4, 3, 2, 2), torch.randn(4, 2))
    graph = ortgraph.capture(module, batch, loss=torch.nn.MSELoss(), dynamic=names)
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, optimizer=ortgraph.optim.SGD(lr=0.1)).graph)
    one = (batch[0][:1], batch[1][:1])
    wanted = torch.nn.functional.mse_loss(module(one[0]), one[1]).item()
    assert session.step(one) == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(session.state_dict()["0.running_var"], module[0].running_var.numpy(), rtol=1e-5)
