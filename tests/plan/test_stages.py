"""The stage program: bounds below the optimum of exhaustive search, sequences that keep the order, known optima."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys

import pytest

from ortgraph.errors import PlanError, RuntimeSetupError
from ortgraph.plan.operations import Operation, OperationGraph, PlanValue
from ortgraph.plan.recompute import RecomputeProblem, memory_floor, validate
from ortgraph.plan.recompute.stages import relieve, solve_stages
from ortgraph.plan.simulate import simulate

pytest.importorskip("scipy")


def layered_graph(seed: int, size: int = 7) -> OperationGraph:
    """Forward operations with skips, some that must not be repeated, some kept values, two results at times."""
    draw = random.Random(seed)
    operations: list[Operation] = []
    values: list[PlanValue] = []
    for i in range(size):
        read = tuple(v for v in range(len(values)) if draw.random() < (0.7 if v == len(values) - 1 else 0.25))
        made = tuple(range(len(values), len(values) + draw.choice([1, 1, 1, 2])))
        values += [PlanValue(f"v{v}", draw.randint(1, 5), draw.random() < 0.1) for v in made]
        once = draw.random() < 0.15
        operations.append(Operation(f"o{i}", float(draw.randint(0, 5)), read, made, not once, draw.choice([0, 0, 1])))
    return OperationGraph(tuple(operations), tuple(values))


def least_cost(graph: OperationGraph, budget: int) -> float:
    """Dijkstra over (first evaluations done, values in memory), first evaluations in the given order."""
    n, kept = len(graph.operations), frozenset(v for v, value in enumerate(graph.values) if value.kept)
    best = {(0, frozenset[int]()): 0.0}
    ticket = itertools.count()
    queue = [(0.0, next(ticket), 0, frozenset[int]())]
    while queue:
        cost, _, done, memory = heapq.heappop(queue)
        if best[done, memory] < cost:
            continue
        if done == n and kept <= memory:
            return cost
        for i in range(min(done + 1, n)):
            o = graph.operations[i]
            held = memory | set(o.outputs)
            size = sum(graph.values[v].size for v in held) + o.scratch
            if not set(o.inputs) <= memory or (i < done and not o.recompute) or size > budget:
                continue
            for count in range(len(held) + 1):
                for rest in itertools.combinations(sorted(held), count):
                    state = (max(done, i + 1), frozenset(rest))
                    if cost + o.cost < best.get(state, math.inf):
                        best[state] = cost + o.cost
                        heapq.heappush(queue, (cost + o.cost, next(ticket), *state))
    return math.inf


@pytest.mark.parametrize("seed", range(10))
def test_between_bound_and_budget(seed) -> None:
    graph = layered_graph(seed)
    peak, floor = simulate(graph, graph.given_order()).peak, memory_floor(graph).bytes
    for budget in range(floor, peak + 1):
        problem = RecomputeProblem(graph, budget)
        found = solve_stages(problem, 5.0)
        optimum = least_cost(graph, budget)
        assert found.bound <= optimum + 1e-3
        firsts = list(dict.fromkeys(found.sequence))
        assert firsts == list(graph.given_order())
        if found.met:
            validate(problem, found)
            assert found.cost >= optimum - 1e-9


def training_chain(layers: int) -> OperationGraph:
    """f_0 .. f_n, then gradients g_n .. g_0, each of which reads its layer's input and the gradient above."""
    operations = [Operation("f0", 1.0, (), (0,))]
    for i in range(1, layers):
        operations.append(Operation(f"f{i}", 1.0, (i - 1,), (i,)))
    for b, i in enumerate(reversed(range(layers))):
        above = (layers + b - 1,) if b else ()
        operations.append(Operation(f"g{i}", 2.0, (i, *above), (layers + b,)))
    values = tuple(PlanValue(f"v{k}", 10, k == 2 * layers - 1) for k in range(2 * layers))
    return OperationGraph(tuple(operations), values)


@pytest.mark.parametrize("budget", [40, 50, 60, 70])
def test_chain_of_layers_at_the_optimum(budget) -> None:
    graph = training_chain(6)
    assert simulate(graph, graph.given_order()).peak == 70
    found = solve_stages(RecomputeProblem(graph, budget), 5.0)
    assert found.met and found.cost == pytest.approx(least_cost(graph, budget))


def test_same_answer_twice() -> None:
    problem = RecomputeProblem(training_chain(8), 60)
    assert solve_stages(problem, 20.0).sequence == solve_stages(problem, 20.0).sequence


def test_another_order_of_first_evaluations() -> None:
    values = (PlanValue("a", 4), PlanValue("b", 4), PlanValue("c", 1, True))
    operations = (Operation("a", 1.0, (), (0,)), Operation("b", 1.0, (), (1,)), Operation("c", 1.0, (0, 1), (2,)))
    found = solve_stages(RecomputeProblem(OperationGraph(operations, values), 9), 5.0, order=[1, 0, 2])
    assert found.sequence == (1, 0, 2) and found.met


def test_what_an_update_overwrites_is_not_read_again() -> None:
    # "use" reads a parameter that "update" replaces: its big result cannot be made again after the update.
    values = (PlanValue("big", 8), PlanValue("new", 8), PlanValue("end", 1, True))
    operations = (
        Operation("use", 1.0, (), (0,)),
        Operation("update", 1.0, (), (1,), False, 0, (), (0,)),
        Operation("end", 1.0, (0,), (2,)),
    )
    problem = RecomputeProblem(OperationGraph(operations, values), 12)
    found = solve_stages(problem, 2.0)
    assert not found.met  # 16 bytes at the update; the sequence is still a valid one
    assert simulate(problem.graph, found.sequence).peak == found.peak == 16


def test_relieve_stops_when_nothing_helps() -> None:
    graph = training_chain(4)
    given = list(graph.given_order())
    assert relieve(RecomputeProblem(graph, 10_000), given, math.inf) == given
    assert simulate(graph, relieve(RecomputeProblem(graph, 50), given, math.inf)).peak <= 50


def test_budget_below_the_floor_and_no_scipy(monkeypatch) -> None:
    graph = training_chain(6)
    with pytest.raises(PlanError):
        solve_stages(RecomputeProblem(graph, 5))
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(RuntimeSetupError, match="pip install scipy"):
        solve_stages(RecomputeProblem(graph, 50))
