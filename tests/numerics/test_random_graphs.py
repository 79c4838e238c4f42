"""Random small training graphs: every preset keeps loss and gradients, and no two live values overlap in the arena."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402
from ortgraph.manager.numerics import relative_errors  # noqa: E402
from ortgraph.plan.memory.validate import validate  # noqa: E402

F = torch.nn.functional
WIDTH = 6

UNARY = {
    "gelu": lambda h, m: F.gelu(h),
    "gelu_tanh": lambda h, m: F.gelu(h, approximate="tanh"),
    "tanh": lambda h, m: torch.tanh(h),
    "relu": lambda h, m: F.relu(h),
    "silu": lambda h, m: F.silu(h),
    "sigmoid": lambda h, m: torch.sigmoid(h),
    "softmax": lambda h, m: torch.softmax(h, -1),
    "norm": lambda h, m: m.norm(h),
    "linear": lambda h, m: m.linear(h),
    "tied": lambda h, m: h @ m.linear.weight,
    "bias": lambda h, m: h + m.zero_a + m.zero_b,
    "scale": lambda h, m: h * m.scale * 0.5,
    "swap": lambda h, m: h.transpose(0, 1),
    "attend": lambda h, m: torch.softmax(h @ h.transpose(-1, -2) / WIDTH**0.5, -1) @ h,
    "mean": lambda h, m: h - h.mean(-1, keepdim=True),
    "view": lambda h, m: h.reshape(-1, WIDTH).reshape(h.shape),
    "first": lambda h, m: h + h[:, :1],
    "square": lambda h, m: h * h,
}


class Random(torch.nn.Module):
    """A chain of the named operations with residuals, one embedding in front, and a cross-entropy at the end."""

    def __init__(self, names, residual, pick):
        super().__init__()
        self.names, self.residual, self.pick = names, residual, pick
        self.embed = torch.nn.Embedding(7, WIDTH)
        self.linear, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.zero_a, self.zero_b = (torch.nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.full((WIDTH,), 0.9))
        self.head = torch.nn.Linear(WIDTH, 4)

    def forward(self, ids, labels):
        h = self.embed(ids)
        for name, residual in zip(self.names, self.residual, strict=True):
            new = UNARY[name](h, self)
            h = h + new if residual and new.shape == h.shape else new
        h = h[:, 0] if self.pick else h.mean(1)
        return F.cross_entropy(self.head(h), labels)


@st.composite
def programs(draw):
    names = draw(st.lists(st.sampled_from(sorted(UNARY)), min_size=1, max_size=7))
    return names, [draw(st.booleans()) for _ in names], draw(st.booleans()), draw(st.integers(0, 99))


def exact(module, batch):
    module.zero_grad()
    loss = module(**batch)
    loss.backward()
    return loss.item(), {k: p.grad.numpy().copy() for k, p in module.named_parameters() if p.grad is not None}


def check(program, levels):
    names, residual, pick, seed = program
    torch.manual_seed(seed)
    module = Random(names, residual, pick)
    batch = {"ids": torch.randint(0, 7, (3, 3)), "labels": torch.randint(0, 4, (3,))}
    loss32, got32 = exact(module, batch)
    _, want = exact(module.double(), batch)
    module.float()
    graph = ortgraph.capture(module, batch)
    arrays = {k: v.numpy() for k, v in batch.items()}
    median = float(np.median([np.linalg.norm(v) for v in want.values()]))
    for level in levels:
        result = ortgraph.optimize(graph, level, optimizer=ortgraph.optim.AdamW(), verify="types")
        for threads in (1, 2):
            session = ortgraph.TrainingSession(result.graph, threads=threads)
            assert session.loss(arrays) == pytest.approx(loss32, rel=1e-5, abs=1e-6)
            got = session.gradients(arrays)
            assert set(got) == set(want)
            for name, reference in want.items():
                error = np.linalg.norm(got[name] - reference)
                allowed = 4 * np.linalg.norm(got32[name] - reference) + 1e-6 * max(np.linalg.norm(reference), median)
                assert error <= allowed, (level, name, error, allowed, names)
            poisoned = ortgraph.TrainingSession(result.graph, threads=threads, poison=True)
            assert all(np.array_equal(v, got[k]) for k, v in poisoned.gradients(arrays).items())
            assert max(relative_errors(session.gradients(arrays), got).values()) == 0.0
            session.step(arrays)
            for program_ in session.programs:
                validate(program_.placement.problem, program_.placement.solution)


@settings(
    max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(programs())
def test_presets_keep_loss_and_gradients(program):
    check(program, ["O2"])


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_presets_keep_loss_and_gradients_many(program):
    check(program, ["O0", "O1", "O2"])
