"""ortgraph.compile: lazily, per shape, with one set of parameters and states."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    for rows in (4, 4, 2, 4):
        x = torch.randn(rows, 5, generator=generator)
        yield x, torch.randint(0, 3, (rows,), generator=generator)


@pytest.mark.parametrize("dynamic", [None, {"input": {0: "batch"}, "target": {0: "batch"}}])
def test_steps_of_changing_shape_equal_pytorch(dynamic):
    mine, theirs = make(), make()
    loss = torch.nn.CrossEntropyLoss()
    step = ortgraph.compile(mine, ortgraph.optim.AdamW(lr=1e-2), loss=loss, dynamic=dynamic)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for x, y in batches():
        optimizer.zero_grad()
        want = loss(theirs(x), y)
        want.backward()
        optimizer.step()
        assert step((x, y)) == pytest.approx(want.item(), rel=1e-5)
    step.update_module()
    for name, value in theirs.state_dict().items():
        np.testing.assert_allclose(mine.state_dict()[name].numpy(), value.numpy(), atol=1e-5, err_msg=name)


def test_a_batch_may_be_one_tensor():
    module = torch.nn.Linear(5, 3)
    step = ortgraph.compile(module, loss=lambda out: out.sum())
    x = torch.randn(4, 5)
    np.testing.assert_allclose(step.gradients(x)["bias"], np.full(3, 4.0), rtol=1e-6)
