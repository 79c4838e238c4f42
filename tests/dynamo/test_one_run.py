"""Graphs that hold the loss: gradients come from one run, and from the halves where that would be wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ortgraph
from ortgraph.dynamo import one_run
from ortgraph.dynamo.one_run import OneRun

F = nn.functional


class Classifier(nn.Module):
    """Returns its loss and its scores; draws; with ``scores=False`` the loss alone."""

    def __init__(self, scores: bool = True, norm: bool = False) -> None:
        super().__init__()
        self.scores = scores
        self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.norm = nn.BatchNorm1d(12) if norm else nn.LayerNorm(12)

    def forward(self, x, y):
        hidden = F.dropout(F.gelu(self.norm(self.body(x))), 0.3, self.training)
        scores = self.head(hidden)
        loss = F.cross_entropy(scores, y)
        return (loss, scores, hidden.mean(0)) if self.scores else loss


@pytest.fixture
def made(monkeypatch):
    """The one-run graphs that a test makes."""
    found = []
    init = OneRun.__init__
    monkeypatch.setattr(OneRun, "__init__", lambda self, *args: (init(self, *args), found.append(self))[0])
    return found


@pytest.fixture
def batch():
    return torch.randn(8, 6), torch.randint(0, 3, (8,))


def gradients(module, step, seed=1):
    """Gradients after ``step(module)``, with draws from a seed."""
    module.zero_grad()
    torch.manual_seed(seed)
    step(module)
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def pair(module, **options):
    """The module by one run and by halves: draws are the same."""
    options = {"pipeline": "O1", "fallback": False, "cache": False, **options}
    return ortgraph.ORTModule(module, **options), ortgraph.ORTModule(copy.deepcopy(module), joint=False, **options)


def assert_same(ours, theirs):
    assert any(g is not None for g in ours)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_scaled_loss(made, batch):
    one, two = pair(Classifier(scores=False))
    for scale in (1.0, 1 / 3, 1 / 3, 2.0**16, 0.0, -1.5):

        def step(module, scale=scale):
            (module(*batch) * scale).backward()

        ours, theirs = gradients(one, step), gradients(two, step)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * abs(scale))
    assert made[0]._halves is None


def test_a_tiny_loss_gradient_leaves_nothing_behind(made, batch):
    """The next run does not take it: its gradients would be rounded to the least numbers, and multiplied after."""
    one, two = pair(Classifier(scores=False).eval())
    for module in (one, two):
        gradients(module, lambda m: (m(*batch) * 1e-42).backward())
    assert_same(*(gradients(m, lambda m: m(*batch).backward()) for m in (one, two)))
    assert len(made) == 1


def test_gradients_against_float64(check_gradients, batch):
    x, y = batch[0].requires_grad_(), batch[1]
    check_gradients(Classifier().eval(), (x, y), lambda module, b: module(*b)[0].backward(), pipeline="O2")


def test_other_results_without_gradient(made, batch):
    one, two = pair(Classifier())

    def step(module):
        loss, scores, _ = module(*batch)
        assert scores.requires_grad
        loss.backward()

    assert_same(gradients(one, step), gradients(two, step))
    assert made[0]._halves is None


def test_a_gradient_for_another_result_runs_the_halves(made, batch):
    one, two = pair(Classifier())

    def step(module):
        loss, scores, means = module(*batch)
        (2 * loss + (scores**2).sum() + means[0]).backward()

    for seed in (1, 2):  # the first has run at once, the second has not
        assert_same(gradients(one, step, seed), gradients(two, step, seed))
    assert made[0]._only_halves
    assert_same(
        gradients(one, lambda m: m(*batch)[1].sum().backward()), gradients(two, lambda m: m(*batch)[1].sum().backward())
    )


def test_retained_graphs_and_a_second_backward(batch):
    one, two = pair(Classifier())

    def step(module):
        loss = module(*batch)[0]
        loss.backward(retain_graph=True)
        (3 * loss).backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    assert_same(gradients(one, step), gradients(two, step))


def test_forward_calls_that_wait(made, batch):
    one, two = pair(Classifier(scores=False))

    def step(module):
        losses = [module(batch[0] * i, batch[1]) for i in range(1, 5)]
        losses[3].backward()
        (losses[0] + 2 * losses[2] + losses[1]).backward()

    for _ in range(2):
        assert_same(gradients(one, step), gradients(two, step))
    assert made[0]._halves is not None and not made[0]._only_halves


def test_gradients_are_the_parameters_own(batch):
    one, _ = pair(Classifier(scores=False))
    seen = []
    one.body.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    one.head.weight.register_hook(lambda g: 2 * g)
    torch.manual_seed(1)
    one(*batch).backward()
    first = one.head.weight.grad.clone()
    kept = one.body.weight.grad
    one.zero_grad()
    torch.manual_seed(1)
    one(*batch).backward()
    assert torch.equal(seen[0], kept) and torch.equal(seen[1], kept) and torch.equal(first, one.head.weight.grad)
    assert kept.data_ptr() != one.body.weight.grad.data_ptr()


def test_batch_norm_and_frozen_parameters(batch):
    one, two = pair(Classifier(scores=False, norm=True))

    def step(module):
        module(*batch).backward()

    assert_same(gradients(one, step), gradients(two, step))
    assert int(one.norm.num_batches_tracked) == 1
    torch.testing.assert_close(one.norm.running_var, two.norm.running_var)
    for module in (one, two):
        module.body.requires_grad_(False)
    ours = gradients(one, step)
    assert_same(ours, gradients(two, step))
    assert ours[0] is None


def test_halves_are_kept_for_float16(made, batch):
    ortgraph.ORTModule(Classifier(scores=False), pipeline="O1", precision="fp16")(*batch).backward()
    assert not made


def test_one_kept_gradient_of_each_step_keeps_no_arena(batch):
    one, two = pair(Classifier(scores=False))
    kept, expected = [], []
    for _ in range(one_run._LENT + 3):
        for module, found in ((one, kept), (two, expected)):
            module.zero_grad()
            torch.manual_seed(1)
            module(*batch).backward()
            found.append(module.head.bias.grad)
    assert_same(kept, expected)
    sizes = [g.untyped_storage().nbytes() for g in kept]
    assert sizes[0] > sizes[-1] == kept[-1].nbytes
    kept[0].zero_()
    assert torch.equal(kept[1], kept[2])


def test_the_head_runs_over_labelled_rows(made):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(60, 8), nn.Linear(8, 60)

        def forward(self, ids, y):
            return F.cross_entropy(self.head(torch.tanh(self.table(ids))).flatten(0, 1), y.flatten())

    one, two = pair(Words(), pipeline="O2")
    ids, found = torch.randint(0, 60, (4, 32)), []
    for labelled in (6, 128, 20, 7):
        y = torch.full((128,), -100)
        y[torch.randperm(128)[:labelled]] = torch.randint(0, 60, (labelled,))

        def step(module, y=y):
            (module(ids, y.view(4, 32)) / 3).backward()

        assert_same(gradients(one, step), gradients(two, step))
        found.append(sorted(b.labelled for b in made[0]._graphs.made))
    assert found == [[8], [8], [8, 24], [8, 24]]
