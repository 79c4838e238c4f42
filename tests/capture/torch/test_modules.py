"""Modules of PyTorch whose own code looks at values: what stands for them, against PyTorch and float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import distributions, nn

import ortgraph
from ortgraph.errors import CaptureError


def test_cumulative_batch_norm_averages_all_batches():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=None)
    module = nn.Sequential(nn.Conv2d(2, 3, 2), norm, nn.Flatten(), nn.Linear(48, 2))
    batches = [(torch.randn(4, 2, 5, 5) * n + n, torch.randint(0, 2, (4,))) for n in (1, 2, 3)]
    like = copy.deepcopy(module).double()
    graph = ortgraph.capture(module, batches[0], loss=nn.CrossEntropyLoss())
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, optimizer=ortgraph.optim.SGD(lr=0.1)).graph)
    optimizer = torch.optim.SGD(like.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(like(x.double()), y)
        loss.backward()
        optimizer.step()
        assert session.step((x, y)) == pytest.approx(loss.item(), rel=1e-5)
    state = session.state_dict()
    assert state["1.num_batches_tracked"] == 3
    for name in ("1.running_mean", "1.running_var", "0.weight", "1.weight"):
        assert torch.allclose(torch.as_tensor(state[name]).double(), like.state_dict()[name], rtol=1e-5, atol=1e-6), (
            name
        )
    assert norm.num_batches_tracked == 0


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], div_value=2.0)
        self.up = nn.Linear(4, 8)

    def forward(self, x, y):
        out, loss = self.loss(self.up(x), y)
        return {"loss": loss + out.square().mean()}


class Sampled(nn.Module):
    """Values of distributions whose arguments PyTorch checks."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x, y):
        mean, scale, logits = self.head(x).split(2, -1)
        normal = distributions.Normal(mean, nn.functional.softplus(scale), validate_args=True)
        value = normal.log_prob(x[:, :2]).sum() + distributions.Categorical(logits=logits).log_prob(y % 2).sum()
        return -value + distributions.kl_divergence(normal, distributions.Normal(0.0, 1.0)).mean()


class Diagonals(nn.Module):
    """In-place changes of diagonals, as redundancy losses have them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x, y):
        product = self.head(x).T @ self.head(x)
        torch.diagonal(product).add_(-1).pow_(2)
        wide = self.head(x).reshape(2, 3, 5).clone()
        wide.diagonal(1, 2, 1).mul_(3)
        return product.sum() + (wide * torch.arange(30).reshape(2, 3, 5)).sum()


class Empty(nn.Module):
    """A part without elements, reshaped: a 0 in the shape of a Reshape would copy a size."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 8)

    def forward(self, x, y):
        kept = self.head(x).reshape(2, 3, 8)
        return torch.cat([kept.unsqueeze(1), kept[:, :0].reshape(2, 1, 0, 8)], 2).square().sum()


@pytest.mark.parametrize("kind", [Layered, Sampled, Diagonals, Empty])
def test_gradients(kind, check_capture):
    torch.manual_seed(4)
    check_capture(kind(), {"x": torch.randn(6, 4), "y": torch.tensor([0, 19, 5, 9, 4, 12])}, repeats=2)


def test_what_stands_in_place_of_torch_goes_away():
    before = nn.BatchNorm1d.forward
    with pytest.raises(CaptureError, match=r"test_modules\.py"):
        ortgraph.capture(Asks(), {"x": torch.randn(6, 4)})
    assert nn.BatchNorm1d.forward is before


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x):
        return self.head(x).sum() if x.sum() > 0 else self.head(x).mean()


class Derived(nn.Module):
    """Losses of derivatives: a gradient penalty, a second derivative, the Jacobians of a batch."""

    def __init__(self, kind):
        super().__init__()
        self.body, self.kind = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), kind

    def forward(self, x, y):
        if self.kind == "jacobian":
            return torch.func.vmap(torch.func.jacrev(self.body))(x).square().sum()
        x = x.detach().requires_grad_()
        out = self.body(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        if self.kind == "penalty":
            return out.mean() + (slope.norm(dim=1) - 1).square().mean()
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return (slope[:, 1] - bend[:, 0] + y).square().mean()


@pytest.mark.parametrize("kind", ["penalty", "second", "jacobian"])
def test_losses_of_derivatives(kind, check_capture):
    torch.manual_seed(5)
    module = Derived(kind)
    check_capture(module, {"x": torch.randn(6, 4), "y": torch.randn(6)}, repeats=2)
    assert all(type(p) is nn.Parameter and p.grad is None for p in module.parameters())


def test_losses_of_derivatives_have_no_named_sizes():
    with pytest.raises(CaptureError, match="leave dynamic= out"):
        batch = {"x": torch.randn(6, 4), "y": torch.randn(6)}
        ortgraph.capture(Derived("penalty"), batch, dynamic={"x": {0: "n"}, "y": {0: "n"}})
