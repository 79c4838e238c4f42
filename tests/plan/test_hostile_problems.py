"""Problems that no graph gives: empty ones, impossible numbers, sizes near the limit, evaluations that nobody reads."""

from __future__ import annotations

import math
import random

import pytest

from ortgraph.errors import PlanError
from ortgraph.plan.memory import Buffer, MemoryProblem, MemorySolution, placement, solve_best_fit, validate
from ortgraph.plan.memory.placement import _solution
from ortgraph.plan.operations import Operation, OperationGraph, PlanValue
from ortgraph.plan.recompute import RecomputeProblem, memory_floor, solve, solve_greedy, solve_stages
from ortgraph.plan.recompute.unread import without_unread
from ortgraph.plan.schedule import order_bound, solve_order
from ortgraph.plan.simulate import simulate


def pair(**second) -> OperationGraph:
    """x = a(); y = b(x), 64 bytes each."""
    b = Operation(**{"name": "b", "cost": 1.0, "inputs": (0,), "outputs": (1,), **second})
    return OperationGraph((Operation("a", 1.0, (), (0,)), b), (PlanValue("x", 64), PlanValue("y", 64)))


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"cost": math.nan}, "cost nan"),
        ({"cost": math.inf}, "cost inf"),
        ({"cost": -1.0}, "cost -1.0"),
        ({"scratch": -5}, "-5 bytes of scratch"),
        ({"inputs": (0, 0)}, "lists a value twice"),
        ({"after": (-1,)}, "comes before"),
        ({"after": (1,)}, "comes before"),
        ({"inplace": ((7, 1),)}, "no value read and made"),
        ({"inputs": (), "inplace": ((0, 1),)}, "no value read and made"),
        ({"scratch": 2**62}, "more than a plan can hold"),
    ],
)
def test_impossible_operations_are_refused(second, said: str) -> None:
    assert pair(inplace=((0, 1), (0, 1))).operations
    with pytest.raises(PlanError, match=said):
        pair(**second)


def test_impossible_values_are_refused() -> None:
    operations = (Operation("a", 1.0, (), (0,)), Operation("b", 1.0, (0,), (1,), inplace=((0, 1),)))
    with pytest.raises(PlanError, match="size of -64"):
        OperationGraph(operations[:1], (PlanValue("x", -64),))
    with pytest.raises(PlanError, match="two sizes"):
        OperationGraph(operations, (PlanValue("x", 64), PlanValue("y", 640)))
    with pytest.raises(PlanError, match="more than a plan can hold"):  # their sum would be negative in 64 bits
        OperationGraph(operations, (PlanValue("x", 2**62), PlanValue("y", 2**62)))


def test_the_empty_graph_and_free_work_have_plans() -> None:
    free = OperationGraph((Operation("a", 0.0, (), (0,)), Operation("b", 0.0, (0,), ())), (PlanValue("x", 0),))
    for graph in (OperationGraph((), ()), free):
        problem = RecomputeProblem(graph, 0)
        for solver in (solve, solve_greedy, solve_stages):
            assert sorted(solver(problem).sequence) == list(graph.given_order())
        assert memory_floor(graph).bytes == order_bound(graph) == solve_order(graph, 0.1).peak == 0


def test_long_lives_and_large_buffers_are_placed() -> None:
    problem = MemoryProblem((Buffer("a", 0, 2**40, 5), Buffer("b", 7, 2**41, 2**60), Buffer("c", 2**40, 2**41, 3)))
    solution = solve_best_fit(problem)
    validate(problem, solution)
    assert solution.arena_bytes == problem.max_load() == 64 + 2**60
    with pytest.raises(PlanError, match="more than an arena can hold"):
        MemoryProblem((Buffer("a", 0, 1, 2**62), Buffer("b", 0, 1, 2**62)))
    for alignment in (0, -64):
        with pytest.raises(PlanError, match="alignment"):
            MemoryProblem((Buffer("a", 0, 1, 10),), alignment=alignment)


def test_evaluations_that_nobody_reads_go() -> None:
    graph = pair()
    chain = OperationGraph(
        (*graph.operations, Operation("c", 1.0, (0, 1), (2,))), (*graph.values, PlanValue("z", 64, kept=True))
    )
    # b's first result, and the x made for it, are made anew before c reads them; the last a is read by nobody
    sequence = (0, 1, 0, 1, 0, 2, 0)
    assert without_unread(chain, sequence) == (0, 1, 0, 2)
    assert without_unread(chain, sequence, reorder=False) == (0, 1, 0, 1, 0, 2)
    assert without_unread(chain, (0, 1, 2)) == (0, 1, 2)


def test_dropping_what_is_not_read_never_costs() -> None:
    rng = random.Random(5)
    shorter = 0
    for _ in range(40):
        n = rng.randint(3, 9)
        reads = [tuple(sorted(rng.sample(range(i), min(i, rng.randint(0, 2))))) for i in range(n)]
        operations = tuple(Operation(f"o{i}", rng.random(), reads[i], (i,)) for i in range(n))
        graph = OperationGraph(operations, tuple(PlanValue(f"v{i}", rng.randint(1, 9), i == n - 1) for i in range(n)))
        sequence = [*range(n)]
        for _ in range(4):
            at = rng.randint(1, len(sequence))
            sequence.insert(at, rng.choice(sequence[:at]))
        before = simulate(graph, sequence)
        for reorder in (True, False):
            found = without_unread(graph, sequence, reorder)
            after = simulate(graph, found)  # validates it
            assert after.peak <= before.peak and after.cost <= before.cost
            shorter += len(found) < len(sequence)
            assert reorder or list(dict.fromkeys(found)) == list(range(n))
    assert shorter > 20


def test_placement_searches_on_while_the_arena_is_over_its_budget(monkeypatch) -> None:
    problem = MemoryProblem((Buffer("a", 0, 2, 64), Buffer("b", 1, 3, 64), Buffer("c", 2, 4, 64)))
    good, poor = {"a": 0, "b": 64, "c": 0}, {"a": 0, "b": 64, "c": 128}

    def search(problem, seconds, capacity=None, max_rounds=None):
        offsets, arena = (poor, 192) if capacity is None else (good, 128)
        return MemorySolution(offsets, arena, 128, "test", 0.0)

    monkeypatch.setattr(placement, "solve", search)
    assert _solution(problem, None, None).arena_bytes == 192
    assert _solution(problem, None, 128).arena_bytes == 128
    assert _solution(problem, None, 64).arena_bytes == 192  # the bound forbids it: no time is spent
    assert _solution(problem, poor, 128).arena_bytes == 128  # a stored plan that is over it is not taken
    assert _solution(problem, poor, 192).solver == "stored plan"
