"""Modules whose tensors alias, are not reached or are written in place: right as PyTorch has it, or refused."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402
from ortgraph.errors import CaptureError  # noqa: E402


class Net(torch.nn.Module):
    """Two tensors, parameters or buffers, made by a function; loss = mean((x @ a) * (x @ b))."""

    def __init__(self, make):
        super().__init__()
        for name, value in zip("ab", make(), strict=True):
            if isinstance(value, torch.nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x):
        return ((x @ self.a) * (x @ self.b)).mean()


def parameter(value, **options):
    return torch.nn.Parameter(value, **options)


def transposed_view():
    base = torch.randn(4, 4)
    return parameter(base), parameter(base.t())


def rows_overlap():
    base = torch.randn(6, 4)
    return parameter(base[:4]), parameter(base[2:])


def same_memory():
    base = torch.randn(4, 4)
    return parameter(base), parameter(base.data)


def buffer_views_parameter():
    weight = parameter(torch.randn(4, 4))
    return weight, weight.data.t()


def frozen_views_trainable():
    base = torch.randn(4, 4)
    return parameter(base), parameter(base, requires_grad=False)


def expanded():
    return parameter(torch.randn(4, 1).expand(4, 4)), parameter(torch.randn(4, 4))


@pytest.mark.parametrize(
    "make", [transposed_view, rows_overlap, same_memory, buffer_views_parameter, frozen_views_trainable, expanded]
)
def test_parameters_that_share_memory_are_refused(make):
    with pytest.raises(CaptureError, match="share memory") as caught:
        ortgraph.capture(Net(make), {"x": torch.randn(3, 4)})
    assert "clone()" in caught.value.hint


def columns_apart():
    base = torch.randn(4, 8)
    return parameter(base[:, :4]), parameter(base[:, 4:])


def rows_apart():
    base = torch.randn(8, 4)
    return parameter(base[:4]), parameter(base[4:])


def both_frozen_but_one():
    base = torch.randn(4, 4)
    return parameter(base.t().contiguous().t()), parameter(torch.randn(4, 4, 2)[..., 1])


@pytest.mark.parametrize("make", [columns_apart, rows_apart, both_frozen_but_one])
def test_strided_parameters_without_overlap_train(make):
    torch.manual_seed(0)
    mine = Net(make)
    theirs = copy.deepcopy(mine)
    x = torch.randn(3, 4)
    graph = ortgraph.capture(mine, {"x": x})
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, optimizer=ortgraph.optim.AdamW(lr=0.1)).graph)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        theirs(x).backward()
        optimizer.step()
        session.step({"x": x})
    for name, value in theirs.state_dict().items():
        np.testing.assert_allclose(session.state_dict()[name], value.numpy(), rtol=1e-4, atol=1e-6)


class Unreached(torch.nn.Module):
    """A layer that the loss does not reach, and one that it reaches through detach() only."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.detached = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.used(x).square().mean() + self.detached(x).detach().mean()


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("steps", [1, 2])
def test_unreached_parameters_are_left_alone(level, steps):
    """PyTorch's AdamW skips a parameter without gradient: no weight decay either."""
    torch.manual_seed(0)
    mine = Unreached()
    theirs = copy.deepcopy(mine)
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match=r"does not depend on unused\.weight, unused\.bias, detached\.weight"):
        graph = ortgraph.capture(mine, {"x": x})
    adamw = ortgraph.optim.AdamW(lr=0.1, weight_decay=0.5, max_grad_norm=0.5)
    result = ortgraph.optimize(graph, level, optimizer=adamw, accumulation_steps=steps, verify="types")
    session = ortgraph.TrainingSession(result.graph)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(steps):
            (theirs(x) / steps).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        for _ in range(steps - 1):
            session.accumulate({"x": x})
        session.step({"x": x})
    for name, value in theirs.state_dict().items():
        np.testing.assert_allclose(session.state_dict()[name], value.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


class Writes(torch.nn.Module):
    """Writes in place into what a training step may not change."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.write = torch.nn.Linear(4, 4), write
        self.table = torch.nn.Embedding(4, 4, max_norm=0.1)
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[1:3])

    def forward(self, x):
        self.write(self, x)
        return (self.layer(x) + self.whole).square().mean() + self.part.sum() * self.layer(x).sum()


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda m, x: x.add_(1), "input 'x'"),
        (lambda m, x: m.table(torch.tensor([1])), "parameter table.weight"),
        (lambda m, x: m.whole.add_(1), "buffer whole|buffer part"),
    ],
    ids=["input", "max_norm", "aliased buffer"],
)
def test_writes_are_refused_by_name(write, what):
    with warnings.catch_warnings(), pytest.raises(CaptureError, match=what):
        warnings.simplefilter("ignore")
        ortgraph.capture(Writes(write), {"x": torch.ones(3, 4)})
