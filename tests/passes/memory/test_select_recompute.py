"""select-recompute: the arena meets the budget, every bit stays, and what cannot be met is refused by name."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import ortgraph
from ortgraph.errors import InputError, OrtgraphError, PlanError
from ortgraph.graph import TrainingGraph
from ortgraph.manager import parse_pipeline, pipeline_text
from ortgraph.optim import AdamW
from ortgraph.plan.budget import budget_bytes
from ortgraph.plan.program_plan import plan_program
from ortgraph.plan.rebuild import RECOMPUTE_KEY

torch = pytest.importorskip("torch", reason="the models are PyTorch's")
nn = torch.nn


class Block(nn.Module):
    """Residual feed-forward with dropout, deep enough that activations outweigh one layer's need."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A few blocks and a mean square."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(16, dropout) for _ in range(5)))

    def forward(self, x):
        return self.blocks(x).square().mean()


@functools.cache
def captured(dropout: float = 0.0) -> tuple[TrainingGraph, dict[str, np.ndarray]]:
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    return ortgraph.capture(Model(dropout).train(), {"x": x}), {"x": x.numpy()}


@functools.cache
def optimized(dropout: float, optimizer: AdamW | None, budget: str | None) -> TrainingGraph:
    return ortgraph.optimize(captured(dropout)[0], "O2", optimizer=optimizer, memory_budget=budget).graph


def copies(graph: TrainingGraph) -> int:
    return sum(RECOMPUTE_KEY in node.metadata_props for node in graph.graph)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dropout", "optimizer"),
    [
        (0.0, None),
        (0.3, AdamW(lr=1e-2)),
        (0.3, AdamW(lr=1e-2, max_grad_norm=0.1)),
        pytest.param(0.3, None, marks=pytest.mark.slow),
        pytest.param(0.0, AdamW(lr=1e-2), marks=pytest.mark.slow),
        pytest.param(0.0, AdamW(lr=1e-2, max_grad_norm=0.1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_budget_is_met_and_every_bit_stays(dropout: float, threads: int, optimizer) -> None:
    _, batch = captured(dropout)
    plain, tight = (optimized(dropout, optimizer, budget) for budget in (None, "70%"))
    assert copies(tight) > 0
    a, b = (ortgraph.TrainingSession(g, threads=threads) for g in (plain, tight))
    for _ in range(4):
        left, right = a.gradients(batch), b.gradients(batch)
        assert all(np.array_equal(left[k], right[k]) for k in left)
        if optimizer is not None:
            assert a.step(batch) == b.step(batch)
            left, right = a.state_dict(), b.state_dict()
            assert all(np.array_equal(left[k], right[k]) for k in left)
    kind = "gradients" if optimizer is None else "step"
    sizes = [next(p for p in s.programs if p.name == kind).arena_bytes for s in (a, b)]
    assert sizes[1] <= 0.7 * sizes[0]


def test_a_saved_plan_runs_the_same(tmp_path) -> None:
    _, batch = captured()
    tight = optimized(0.0, AdamW(lr=1e-2), "70%")
    tight.save(tmp_path / "train.onnx")
    again = ortgraph.load(tmp_path / "train.onnx")
    a, b = ortgraph.TrainingSession(tight), ortgraph.TrainingSession(again)
    assert [a.step(batch) for _ in range(3)] == [b.step(batch) for _ in range(3)]
    assert a.arena_bytes == b.arena_bytes


def test_bytes_are_a_budget_for_the_arena() -> None:
    graph, batch = captured()
    lowered = ortgraph.optimize(graph, "O2").graph
    peak = plan_program(lowered).before.peak
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, "O2", memory_budget=int(peak * 0.8)).graph)
    session.gradients(batch)
    assert session.arena_bytes <= 0.8 * peak


def test_a_wide_budget_changes_nothing() -> None:
    graph, _ = captured()
    tight = ortgraph.optimize(graph, "O2", memory_budget="100%")
    record = next(r for r in tight.report.passes if r.name == "select-recompute")
    assert not record.counts.get("recomputed") and copies(tight.graph) == 0


def test_an_infeasible_budget_names_what_sets_the_floor() -> None:
    graph, _ = captured()
    plan = plan_program(optimized(0.0, AdamW(lr=1e-2), None))
    below = plan.floor.bytes + plan.scratch_bytes - 64
    with pytest.raises(OrtgraphError, match=r"is infeasible: '.+' need"):
        ortgraph.optimize(graph, "O2", optimizer=AdamW(lr=1e-2), memory_budget=below)
    with pytest.raises(OrtgraphError, match="is infeasible"):
        ortgraph.optimize(graph, "O2", optimizer=AdamW(lr=1e-2), memory_budget=64)


@pytest.mark.parametrize("budget", ["", "much", "-5%", "0", "0%", "1.5", "5 apples", True, "1e3"])
def test_a_budget_that_is_none_is_refused_before_any_work(budget) -> None:
    graph, _ = captured()
    with pytest.raises(InputError, match="memory budget"):
        ortgraph.optimize(graph, "O2", memory_budget=budget)


def test_budget_forms() -> None:
    forms = {
        "50%": 500,
        "12.5%": 125,
        "2kB": 2000,
        "1.5 MB": 1_500_000,
        "1MiB": 1 << 20,
        "77": 77,
        77: 77,
        "3GiB": 3 << 30,
    }
    assert {form: budget_bytes(form, 1000) for form in forms} == forms


def test_symbolic_shapes_are_planned_per_batch_shape() -> None:
    graph = ortgraph.capture(Model(0.0), {"x": torch.randn(8, 16)}, dynamic={"x": {0: "rows"}})
    plain, tight = (
        ortgraph.optimize(graph, "O2", optimizer=AdamW(lr=1e-2), memory_budget=b).graph for b in (None, "70%")
    )
    assert copies(tight) == 0
    a, b = ortgraph.TrainingSession(plain), ortgraph.TrainingSession(tight)
    for rows in (64, 96, 64):
        batch = {"x": np.random.default_rng(rows).standard_normal((rows, 16)).astype(np.float32)}
        assert a.step(batch) == b.step(batch)
        assert b.programs[-1].arena_bytes <= 0.7 * a.programs[-1].arena_bytes
    bound = ortgraph.optimize(graph, "O2", memory_budget="70%", shapes={"rows": 64}).graph
    assert copies(bound) > 0


def test_a_spelled_out_pipeline_names_the_pass_itself() -> None:
    graph, _ = captured()
    with pytest.raises(InputError, match="goes with a preset"):
        ortgraph.optimize(graph, "lower,plan-memory", memory_budget="50%")
    text = "lower{target=onnxruntime-training},select-recompute{budget=70% seconds=2.0},plan-memory{keep_order=true}"
    passes = parse_pipeline(text)
    assert parse_pipeline(pipeline_text(passes)) == passes
    assert copies(ortgraph.optimize(graph, text).graph) > 0


def test_the_plan_says_what_it_predicts() -> None:
    graph, _ = captured()
    lowered = ortgraph.optimize(graph, "O2").graph
    plan = plan_program(lowered, "70%")
    assert plan.after.peak <= plan.budget == int(0.7 * (plan.before.peak + plan.scratch_bytes))
    assert plan.arena.arena_bytes + plan.scratch_bytes <= plan.budget and plan.recomputed > 0
    assert plan.after.overhead > 0 and plan.floor.bytes <= plan.after.peak
    with pytest.raises(PlanError, match="infeasible"):
        plan_program(lowered, "1%")


def test_a_planned_graph_takes_what_its_plan_says() -> None:
    tight = optimized(0.0, AdamW(lr=1e-2), "70%")
    _, batch = captured()
    session = ortgraph.TrainingSession(tight)
    session.step(batch)
    assert plan_program(tight).arena.arena_bytes <= session.arena_bytes


def test_what_is_reported_is_what_the_plan_recomputes() -> None:
    lowered = ortgraph.optimize(captured()[0], "O2")
    plan = plan_program(lowered.graph, "70%")
    tight = ortgraph.optimize(captured()[0], "O2", memory_budget="70%")
    record = next(r for r in tight.report.passes if r.name == "select-recompute")
    assert record.counts["recomputed"] == plan.recomputed <= copies(tight.graph)
