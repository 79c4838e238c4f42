"""Gradients of compiled modules against PyTorch and float64, for the ways in which scripts call modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ortgraph.errors import BatchError

F = nn.functional


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 3)

    def forward(self, x, y=None):
        hidden = F.gelu(self.norm(self.body(x)))
        scores = self.head(hidden)
        return scores if y is None else (F.cross_entropy(scores, y), scores)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.table(ids))))


def squared(module, batch):
    result = module(*batch)
    (result**2).mean().backward()
    return result


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("loss", ["inside", "outside"])
def test_mlp(check_gradients, threads, loss):
    def step(module, batch):
        x, y = batch
        value = module(x, y)[0] if loss == "inside" else F.cross_entropy(module(x), y)
        value.backward()

    check_gradients(
        Mlp(), (torch.randn(5, 6, requires_grad=True), torch.randint(0, 3, (5,))), step, threads, pipeline="O2"
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_batch_norm_buffers_follow(check_gradients, threads):
    def step(module, batch):
        for _ in range(3):
            squared(module, batch)

    compiled = check_gradients(Convolutions(), (torch.randn(4, 2, 8, 8),), step, threads, pipeline="O2")
    assert compiled.state_dict()["body.1.num_batches_tracked"] == 3


def test_tied_weights(check_gradients):
    compiled = check_gradients(Tied(), (torch.randint(0, 11, (3, 5)),), squared)
    assert compiled.head.weight.grad is compiled.table.weight.grad


def test_frozen_parameters(check_gradients):
    module = Mlp()
    module.body.requires_grad_(False)
    compiled = check_gradients(module, (torch.randn(5, 6),), squared)
    assert compiled.body.weight.grad is None and compiled.head.weight.grad is not None


def test_every_output_is_differentiable(check_gradients):
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            hidden = torch.relu(self.a(x))
            return {
                "hidden": hidden,
                "scores": self.b(hidden),
                "mean": hidden.mean(),
                "count": x.shape[0],
                "none": None,
            }

    def step(module, batch):
        out = module(*batch)
        assert out["count"] == 3 and out["none"] is None
        (out["hidden"].sum() + 2 * (out["scores"] ** 2).sum() + 3 * out["mean"]).backward()

    check_gradients(Several(), (torch.randn(3, 4, requires_grad=True),), step)

    def one(module, batch):
        (module(*batch)["scores"] ** 2).sum().backward()

    check_gradients(Several(), (torch.randn(3, 4),), one)


def test_two_forwards_then_two_backwards(check_gradients):
    def step(module, batch):
        first, second = module(batch[0]), module(batch[1])
        (first**2).sum().backward()
        (second**3).sum().backward()

    check_gradients(Mlp(), (torch.randn(5, 6), torch.randn(5, 6)), step)

    def contrastive(module, batch):
        first, second, third = (module(batch[i % 2] * (i + 1)) for i in range(3))
        ((first - second) ** 2).sum().backward(retain_graph=True)
        (first * third).sum().backward()

    check_gradients(Mlp(), (torch.randn(5, 6), torch.randn(5, 6)), contrastive)


def test_gradients_accumulate(check_gradients):
    def step(module, batch):
        for i in range(3):
            (module(batch[0] * (i + 1)) ** 2).mean().backward()

    check_gradients(Mlp(), (torch.randn(5, 6),), step)


def test_retained_graph_goes_backward_twice(check_gradients):
    def step(module, batch):
        loss = (module(*batch) ** 2).mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    compiled = check_gradients(Mlp(), (torch.randn(5, 6),), step)
    loss = compiled(torch.randn(5, 6)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_refused(wrap):
    compiled = wrap(Mlp())
    x = torch.randn(5, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded", "channels last"])
def test_inputs_of_other_layouts(check_gradients, kind, wrap):
    if kind == "channels last":
        x = torch.randn(4, 2, 8, 8).to(memory_format=torch.channels_last)
        module = Convolutions().to(memory_format=torch.channels_last)
        check_gradients(module, (x,), squared)
        return
    x = {
        "transposed": torch.randn(6, 5).t(),
        "sliced": torch.randn(10, 6)[::2],
        "expanded": torch.randn(1, 6).expand(5, 6),
    }[kind]
    module = Mlp()
    eager = copy.deepcopy(module)
    compiled = wrap(module)
    for f in (compiled, eager):
        (f(x) ** 2).sum().backward()
    torch.testing.assert_close(compiled.body.weight.grad, eager.body.weight.grad)


def test_results_have_pytorch_layout():
    def permuted(x, w):
        return (x.permute(1, 0) * w).cos(), x.t()

    compiled = torch.compile(permuted, backend="ortgraph", options={"fallback": False, "pipeline": "O1"})
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(1, 3)
    for ours, theirs in zip(compiled(x, w), permuted(x, w), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs)


def test_input_written_in_place(check_gradients):
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            x.mul_(2)
            self.seen += x.detach().sum(0)
            return self.a(x)

    compiled = check_gradients(Writes(), (torch.ones(3, 4),), squared)
    assert torch.equal(compiled.seen, torch.full((4,), 6.0))
    x = torch.ones(3, 4)
    compiled(x)
    assert torch.equal(x, torch.full((3, 4), 2.0))


def test_parameter_that_changes_between_forward_and_backward_is_noticed(wrap):
    compiled = wrap(Mlp())
    loss = compiled(torch.randn(5, 6)).sum()
    with torch.no_grad():
        compiled.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_result_may_be_written(wrap):
    module = Mlp()
    eager = copy.deepcopy(module)
    compiled = wrap(module)
    x = torch.randn(5, 6)
    for f in (compiled, eager):
        out = f(x)
        out.mul_(2)
        out.sum().backward()
    torch.testing.assert_close(compiled.head.weight.grad, eager.head.weight.grad)
    for p in module.parameters():  # gradients are memory of their own, each
        p.grad.zero_()
    with torch.no_grad():
        kept = compiled(x)
        before = kept.clone()
        compiled(-x)
    assert torch.equal(kept, before)


def test_equal_gradients_are_two_tensors(wrap):
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x + self.a + self.b

    module = Sum()
    compiled = wrap(module)
    compiled(torch.randn(4)).sum().backward()
    module.a.grad.zero_()
    assert torch.equal(module.b.grad, torch.ones(4))


def test_graph_breaks(check_gradients):
    class Breaks(Mlp):
        def forward(self, x):
            hidden = self.body(x)
            torch._dynamo.graph_break()
            hidden = self.norm(hidden)
            if hidden.sum() > -1e9:
                hidden = hidden * 2
            return self.head(hidden)

    check_gradients(Breaks(), (torch.randn(5, 6),), squared)


def test_without_gradients_an_inference_graph_runs(wrap):
    module = nn.Sequential(Mlp(), nn.BatchNorm1d(3), nn.Dropout(0.5))
    eager = copy.deepcopy(module)
    compiled = wrap(module)
    x = torch.randn(5, 6)
    (compiled(x) ** 2).sum().backward()
    eager[1].load_state_dict(module[1].state_dict())
    compiled.eval(), eager.eval()
    with torch.no_grad():
        result = compiled(x)
    assert not result.requires_grad
    torch.testing.assert_close(result, eager(x))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), result)
    torch.testing.assert_close(compiled(x), result)
    assert compiled.train().training and module[2].training and compiled(x).eq(0).any()


def test_shapes_may_change(check_gradients):
    def step(module, batch):
        for x in batch:
            (module(x) ** 2).mean().backward()

    check_gradients(Mlp(), tuple(torch.randn(n, 6) for n in (5, 3, 7, 1, 3, 9)), step)


def test_a_batch_without_rows(wrap):
    module = Mlp()
    x, y = torch.randn(0, 6, requires_grad=True), torch.randint(0, 3, (0,))
    compiled = wrap(module)
    scores = compiled(x)
    scores.sum().backward()
    assert scores.shape == (0, 3) and x.grad.shape == x.shape
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters())
    assert compiled(x, y)[0].isnan()  # the mean of nothing


def test_marked_dynamic_dimension(check_gradients):
    def step(module, batch):
        for x in batch:
            torch._dynamo.mark_dynamic(x, 0)
            (module(x) ** 2).mean().backward()

    check_gradients(Mlp(), tuple(torch.randn(n, 6) for n in (5, 3)), step)


def test_an_error_in_the_middle_leaves_everything_usable(wrap):
    module = Tied()
    eager = copy.deepcopy(module)
    compiled = wrap(module)
    ids = torch.randint(0, 11, (3, 5))
    wrong = ids.clone()
    wrong[1, 2] = 11
    pending = compiled(ids)
    for _ in range(2):
        with pytest.raises(BatchError, match="embedding takes 0 to 10"):
            compiled(wrong)
    (pending**2).sum().backward()
    (eager(ids) ** 2).sum().backward()
    torch.testing.assert_close(module.body.weight.grad, eager.body.weight.grad)


def test_autocast_region_matches_pytorch(wrap):
    class Half(Mlp):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = F.gelu(self.body(x))
            return self.head(hidden.float())

    module = Half()
    eager = copy.deepcopy(module)
    compiled = wrap(module, fallback=True)
    x = torch.randn(5, 6)
    for f in (compiled, eager):
        (f(x) ** 2).sum().backward()
    torch.testing.assert_close(compiled(x), eager(x), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(compiled.body.weight.grad, eager.body.weight.grad, rtol=5e-2, atol=5e-2)
