"""Whatever is drawn is a function of seed, step and place: the same in every form of a graph, resumed and recomputed."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortgraph
from ortgraph.graph import TrainingGraph
from ortgraph.plan.program_plan import program_problem
from ortgraph.plan.rebuild import apply_sequence

WIDTH, ROWS = 16, 6


def by_rows(x):
    return x * (0.7 + torch.rand((x.shape[0], 1))).floor() / 0.7


def picked(x):
    weights = torch.softmax(torch.arange(float(WIDTH)) / 8, 0)
    return torch.multinomial(weights.expand_as(x), WIDTH, replacement=True).to(x.dtype)


KINDS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "channels": lambda x: F.dropout1d(x.unsqueeze(-1), 0.3).squeeze(-1),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x - 2, training=True),
    "rows": by_rows,
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "uniform": lambda x: torch.rand_like(x),
    "normal": lambda x: torch.randn_like(x),
    "normal_of": lambda x: torch.normal(torch.full_like(x, 0.5), torch.full_like(x, 2.0)),
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(0.0, 0.5),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.3),
    "integers": lambda x: torch.randint_like(x, -3, 4),
    "order": lambda x: torch.randperm(WIDTH).to(x.dtype).expand_as(x),
    "picked": picked,
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
}
EXACT = ("dropout", "channels", "rows", "bernoulli", "uniform", "integers", "order")  # no logarithm, no cosine


class Chain(nn.Module):
    """All draws in a row; the backward half reads them."""

    def __init__(self, outputs: bool) -> None:
        super().__init__()
        self.outputs = outputs
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        drawn, h = {}, self.mix(x)
        for kind, draw in KINDS.items():
            drawn[kind] = draw(torch.ones_like(x))
            h = h + 0.1 * torch.tanh(h) * drawn[kind].clamp(-3, 3)
        return {"loss": self.mix(h).square().mean(), **(drawn if self.outputs else {})}


def make_batch(rows: int = ROWS) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))}


@functools.cache
def captured(outputs: bool = True, dynamic: bool = False, rows: int = ROWS, seed: int = 7) -> TrainingGraph:
    torch.manual_seed(0)
    module = Chain(outputs)
    torch.manual_seed(seed)
    return ortgraph.capture(module, make_batch(rows), dynamic={"x": {0: "batch"}} if dynamic else None)


@functools.cache
def optimized(preset: str, dynamic: bool = False, **options) -> TrainingGraph:
    return ortgraph.optimize(captured(dynamic=dynamic), preset, optimizer=ortgraph.optim.SGD(lr=0.1), **options).graph


def results(graph: TrainingGraph, rows: int = ROWS, **options) -> dict[str, np.ndarray]:
    """The draws of the second step."""
    session = ortgraph.TrainingSession(graph, **options)
    if session.has_optimizer:
        session.step(make_batch(rows), learning_rate=0.0)
    else:
        step = next(s.input for s in graph.signature.states if s.kind == "random_step")
        session.load_optimizer_state_dict({**session.optimizer_state_dict(), step: np.asarray(1, np.int64)})
    return {kind: session.results(make_batch(rows))[kind] for kind in KINDS}


FORMS = {
    "one thread, same seed": lambda: results(captured.__wrapped__(), threads=1),
    "O0, symbolic": lambda: results(optimized("O0", dynamic=True)),
    "O2": lambda: results(optimized("O2")),
    "O2, symbolic": lambda: results(optimized("O2", dynamic=True)),
    "O2, other runtime": lambda: results(optimized("O2", target="onnxruntime"), target="onnxruntime"),
}


@pytest.mark.parametrize("form", [pytest.param(f, marks=pytest.mark.slow) if f.startswith("O2") else f for f in FORMS])
def test_every_form_draws_the_same(form) -> None:
    want, got = results(captured()), FORMS[form]()
    for kind in KINDS:
        if kind in EXACT:
            assert np.array_equal(got[kind], want[kind]), kind
        else:
            np.testing.assert_allclose(got[kind], want[kind], rtol=1e-5, atol=1e-5, err_msg=kind)


def test_a_symbolic_batch_draws_what_a_static_one_draws() -> None:
    session = ortgraph.TrainingSession(captured(dynamic=True))
    for rows in (1, 9):
        want = ortgraph.TrainingSession(captured(rows=max(rows, 2) if rows > 1 else 1)).results(make_batch(rows))
        got = session.results(make_batch(rows))
        assert all(np.array_equal(got[kind], want[kind]) for kind in EXACT)


def test_another_seed_and_the_next_step_draw_others() -> None:
    first, other = (ortgraph.TrainingSession(captured(seed=s)).results(make_batch()) for s in (7, 8))
    later = results(captured())
    for kind in KINDS:
        assert not np.array_equal(first[kind], other[kind]) and not np.array_equal(first[kind], later[kind]), kind


def drawn_again(graph: TrainingGraph) -> TrainingGraph:
    """A copy that evaluates every draw anew before each operation that reads it."""
    changed = graph.clone()
    _, problem = program_problem(changed)
    operations, sequence, copied = problem.operations, [], set()
    for i in operations.given_order():
        for made in operations.predecessors(i):
            if problem.nodes[made].op_type in ("RandomUniform", "Dropout") and operations.operations[made].recompute:
                sequence.append(made)
                copied.add(made)
        sequence.append(i)
    assert len(copied) == sum(n.op_type in ("RandomUniform", "Dropout") for n in problem.nodes) > len(KINDS)
    assert apply_sequence(changed.graph, problem, sequence, "test") >= len(copied)
    return changed


def test_resumed_and_recomputed_draws_keep_every_bit(tmp_path) -> None:
    plain = ortgraph.optimize(captured(outputs=False), "O0", optimizer=ortgraph.optim.AdamW(lr=1e-2)).graph
    batch, again = make_batch(), drawn_again(plain)
    whole, first, second = ortgraph.TrainingSession(plain), *(ortgraph.TrainingSession(again) for _ in range(2))
    losses = [whole.step(batch) for _ in range(4)]
    assert [first.step(batch) for _ in range(2)] == losses[:2]
    second.load_checkpoint(first.save_checkpoint(tmp_path / "half"))
    assert [second.step(batch) for _ in range(2)] == losses[2:]
    left, right = whole.state_dict(), second.state_dict()
    assert all(np.array_equal(left[name], right[name]) for name in left)
