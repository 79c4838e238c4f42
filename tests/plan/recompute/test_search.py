"""Search, eviction and greedy: exhaustive optima, the simulator's figures, constraints, checkpointing as a baseline."""

from __future__ import annotations

import heapq
import itertools
import math
import time

import pytest

from ortgraph.errors import PlanError
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.recompute import RecomputeProblem, memory_floor, solve, solve_greedy, solve_search, validate
from ortgraph.plan.recompute import portfolio as portfolio_module
from ortgraph.plan.recompute.native import Effort, compiled
from ortgraph.plan.simulate import simulate


def least_cost(graph: OperationGraph, budget: int) -> float:
    """Dijkstra over (evaluated, in memory), any order; for plain graphs."""
    start = (frozenset[int](), frozenset[int]())
    best = {start: 0.0}
    ticket = itertools.count()
    queue = [(0.0, next(ticket), *start)]
    while queue:
        cost, _, done, memory = heapq.heappop(queue)
        if best[done, memory] < cost:
            continue
        if len(done) == len(graph.operations):
            return cost
        steps = [(0.0, done, memory - {v}) for v in memory]
        for i, o in enumerate(graph.operations):
            held = memory | set(o.outputs)
            if set(o.inputs) <= memory and sum(graph.values[v].size for v in held) <= budget:
                steps.append((o.cost, done | {i}, held))
        for paid, *state in steps:
            if cost + paid < best.get(tuple(state), math.inf):
                best[tuple(state)] = cost + paid
                heapq.heappush(queue, (cost + paid, next(ticket), *state))
    return math.inf


@pytest.fixture
def native_of():
    def make(graph: OperationGraph):
        found = compiled(graph)
        if found is None:
            pytest.skip("no C++ compiler")
        return found

    return make


@pytest.mark.parametrize("seed", range(12))
def test_optimal_on_small_graphs(seed, random_graph) -> None:
    graph = random_graph(seed, plain=True)
    peak, floor = simulate(graph, graph.given_order()).peak, memory_floor(graph).bytes
    for budget in range(floor, peak):
        problem = RecomputeProblem(graph, budget)
        optimum = least_cost(graph, budget)
        if math.isinf(optimum):
            with pytest.raises(PlanError, match="no sequence within"):
                solve(problem, 0.1)
            continue
        found = solve(problem, 0.4)
        validate(problem, found)
        assert found.cost == pytest.approx(optimum)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("reorder", [True, False])
def test_every_constraint_holds_and_the_budget_is_what_the_simulator_counts(
    seed, reorder, random_graph, native_of
) -> None:
    graph = random_graph(seed, size=14)
    given = list(graph.given_order())
    peak, floor = simulate(graph, given).peak, memory_floor(graph).bytes
    native = native_of(graph)
    for budget in range(floor, peak, 3):
        sequences = [
            native.anneal(given, budget, reorder, Effort(20000, 2.0, 0.02, seed, 60.0)),
            native.greedy(given, budget, reorder, 60.0, 4),
        ]
        for found in sequences:
            profile = simulate(graph, found.steps)  # raises where a constraint is broken
            assert not found.within or profile.peak <= budget
            assert reorder or list(dict.fromkeys(found.steps)) == given
        evicted = native.evict(given, budget, 0.5, 60.0)
        if evicted is not None:
            simulate(graph, evicted)
            assert list(dict.fromkeys(evicted)) == given


@pytest.mark.parametrize("seed", range(20))
def test_live_bytes_are_exact(seed, random_graph, native_of) -> None:
    """The search's own peak of a sequence is the simulator's: one byte less of budget is not within."""
    graph = random_graph(seed, size=20, plain=True)
    native = native_of(graph)
    peak = simulate(graph, graph.given_order()).peak
    found = native.anneal(list(graph.given_order()), peak - 1, True, Effort(5000, 1.0, 0.01, 1, 60.0)).steps
    exact = simulate(graph, found).peak
    assert native.anneal(found, exact, True, Effort(0, 1.0, 0.01, 1, 60.0)).within
    assert not native.anneal(found, exact - 1, True, Effort(0, 1.0, 0.01, 1, 60.0)).within


def test_same_answer_twice(transformer, native_of) -> None:
    graph, _ = transformer(3, 10.0)
    native = native_of(graph)
    budget = simulate(graph, graph.given_order()).peak // 2
    effort = Effort(50000, 1.0, 0.01, 5, 60.0)
    first, second = (native.anneal(list(graph.given_order()), budget, True, effort) for _ in range(2))
    assert first.steps == second.steps


@pytest.mark.parametrize("elementwise", [0.0, 30.0])
def test_cheaper_than_checkpointing_every_block(elementwise, transformer) -> None:
    graph, blocks = transformer(4, elementwise)
    checkpointed: list[int] = []
    for i, operation in enumerate(graph.operations):
        if operation.name.startswith("d down weight."):
            checkpointed += blocks[int(operation.name.rpartition(".")[2])]
        checkpointed.append(i)
    baseline = simulate(graph, checkpointed)
    assert baseline.peak < 0.6 * simulate(graph, graph.given_order()).peak
    problem = RecomputeProblem(graph, baseline.peak)
    found = solve(problem, 2.0)
    validate(problem, found)
    assert found.overhead < 0.7 * baseline.overhead


def test_free_operations_first(transformer) -> None:
    """At costs in FLOPs a transformer gives up a quarter of its memory for nothing."""
    graph, _ = transformer(4)
    problem = RecomputeProblem(graph, simulate(graph, graph.given_order()).peak * 3 // 4)
    found = solve(problem, 1.0)
    validate(problem, found)
    assert found.cost == graph.cost and len(found.sequence) > len(graph.operations)


def test_deep_network_within_its_time(transformer) -> None:
    graph, _ = transformer(24, 30.0)
    problem = RecomputeProblem(graph, simulate(graph, graph.given_order()).peak // 2)
    compiled(graph)
    start = time.process_time()
    found = solve(problem, 2.0)
    assert time.process_time() - start < 3.0
    validate(problem, found)


@pytest.mark.parametrize("solver", [solve, solve_greedy, solve_search])
def test_an_impossible_budget_names_the_operations(solver, transformer) -> None:
    graph, _ = transformer(2)
    floor = memory_floor(graph)
    assert floor.operations
    with pytest.raises(PlanError, match=rf"{graph.operations[floor.operations[0]].name}.*need {floor.bytes} bytes"):
        solver(RecomputeProblem(graph, floor.bytes - 1))


def test_without_a_compiler(transformer, monkeypatch) -> None:
    graph, _ = transformer(2)
    monkeypatch.setattr(portfolio_module, "compiled", lambda graph: None)
    problem = RecomputeProblem(graph, simulate(graph, graph.given_order()).peak * 7 // 10)
    validate(problem, solve(problem, 2.0))


def test_validate_rejects(transformer) -> None:
    graph, _ = transformer(2)
    peak = simulate(graph, graph.given_order()).peak
    problem = RecomputeProblem(graph, peak * 3 // 4)
    found = solve_greedy(problem)
    validate(problem, found)
    with pytest.raises(PlanError, match="over the budget"):
        validate(RecomputeProblem(graph, found.peak - 1), found)
