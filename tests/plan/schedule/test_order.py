"""Ordering for peak memory: every solver and bound against all orders of small graphs with every feature."""

from __future__ import annotations

import itertools
import os
import pathlib
import random
from collections.abc import Iterator

import pytest

from ortgraph.errors import PlanError
from ortgraph.plan.operations import Operation, OperationGraph, PlanValue
from ortgraph.plan.schedule import (
    OrderSolution,
    depth_first_order,
    least_peak_order,
    list_order,
    order_bound,
    portfolio,
    sets,
    solve_beam,
    solve_exact,
    solve_order,
    validate_order,
)
from ortgraph.plan.schedule.bounds import floor_bound
from ortgraph.plan.schedule.compiled import compiled
from ortgraph.plan.simulate import simulate

FEATURES = ("plain", "outputs", "scratch", "inplace", "kept", "after")


def random_graph(seed: int, features: tuple[str, ...], count: int = 7) -> OperationGraph:
    r = random.Random(f"{seed} {features}")
    values: list[PlanValue] = []
    operations: list[Operation] = []
    for i in range(count):
        inputs = tuple(sorted(r.sample(range(len(values)), min(len(values), r.choice((0, 1, 1, 2, 2, 3))))))
        outputs = []
        for _ in range(r.choice((0, 1, 2, 3)) if "outputs" in features else 1):
            outputs.append(len(values))
            values.append(PlanValue(f"v{len(values)}", r.randint(1, 3), "kept" in features and r.random() < 0.3))
        pairs = [(s, o) for s in inputs for o in outputs if values[s].size == values[o].size]
        r.shuffle(pairs)
        operations.append(
            Operation(
                f"o{i}",
                1.0,
                inputs,
                tuple(outputs),
                scratch=r.randint(0, 3) if "scratch" in features else 0,
                inplace=tuple(pairs) if "inplace" in features else (),
                after=tuple(r.sample(range(i), min(i, r.choice((0, 0, 1, 2))))) if "after" in features else (),
            )
        )
    return OperationGraph(tuple(operations), tuple(values))


def layered_graph(count: int, seed: int) -> OperationGraph:
    """Layers of random width; some values are read far away, some only at the end."""
    r = random.Random(seed)
    width = max(2, int(0.7 * count**0.5))
    operations, values = [], []
    for i in range(count):
        near = range(max(0, i - 2 * width), max(0, i - width // 2))
        reads = {r.choice(near) for _ in range(r.randint(1, 4))} if near else set()
        if i == count - 1:
            reads |= {j for j in range(i) if j % 6 == 0}
        operations.append(Operation(f"o{i}", 1.0, tuple(sorted(reads)), (i,)))
        values.append(PlanValue(f"v{i}", int(r.expovariate(1 / 2000)) + 20))
    return OperationGraph(tuple(operations), tuple(values))


def executed_sets(graph: OperationGraph) -> Iterator[frozenset[int]]:
    needs = [{*graph.predecessors(i), *o.after} for i, o in enumerate(graph.operations)]
    for n in range(len(needs) + 1):
        for chosen in itertools.combinations(range(len(needs)), n):
            if all(needs[i] <= set(chosen) for i in chosen):
                yield frozenset(chosen)


def all_orders(graph: OperationGraph) -> Iterator[list[int]]:
    needs = [{*graph.predecessors(i), *o.after} for i, o in enumerate(graph.operations)]

    def extend(order: list[int]) -> Iterator[list[int]]:
        if len(order) == len(needs):
            yield order
        for i in range(len(needs)):
            if i not in order and needs[i] <= set(order):
                yield from extend([*order, i])

    return extend([])


def smallest_peak(graph: OperationGraph) -> int:
    return min(simulate(graph, order).peak for order in itertools.islice(all_orders(graph), 6000))


def graphs(count: int) -> Iterator[OperationGraph]:
    kinds = [(f,) for f in FEATURES] + [FEATURES, ("inplace", "kept"), ("outputs", "inplace", "after")]
    for features in kinds:
        for seed in range(count):
            yield random_graph(seed, features, 6)


@pytest.mark.parametrize(
    "features", [(f,) for f in FEATURES] + [FEATURES, ("inplace", "kept", "outputs")], ids="-".join
)
def test_bound_and_exact_against_all_orders(features: tuple[str, ...]) -> None:
    tight = 0
    for seed in range(12):
        graph = random_graph(seed, features, 6)
        best = smallest_peak(graph)
        bound = order_bound(graph)
        assert floor_bound(graph) <= best and bound <= best
        tight += bound == best
        exact = solve_exact(graph)
        validate_order(graph, exact)
        assert exact.peak == exact.bound == best and exact.gap == 0.0
        found = solve_order(graph, seconds=5.0)
        validate_order(graph, found)
        assert found.peak == best
    assert tight >= 6  # A bound that is always 0 would be valid too.


def test_bound_is_the_min_cut_formula() -> None:
    """Pruned candidates lose nothing: the bound equals the maximum over all operations by enumeration of all sets."""
    for seed in range(25):
        for features in ((), ("kept", "scratch", "outputs", "after")):
            graph = random_graph(seed, features, 7)
            terms = {i: [] for i in range(7)}
            for done in executed_sets(graph):
                cut = sum(
                    v.size
                    for k, v in enumerate(graph.values)
                    if graph.producer[k] in done and (v.kept or not set(graph.readers[k]) <= done)
                )
                for i, o in enumerate(graph.operations):
                    if i not in done and {*graph.predecessors(i), *o.after} <= done:
                        terms[i].append(cut + o.scratch + sum(graph.values[v].size for v in o.outputs))
            kept = sum(v.size for v in graph.values if v.kept)
            assert order_bound(graph) == max(kept, *(min(t) for t in terms.values()))


def test_constructors_give_valid_orders() -> None:
    for graph in graphs(4):
        for construct in (depth_first_order, list_order, least_peak_order):
            order = construct(graph)
            assert sorted(order) == list(range(len(graph.operations)))
            simulate(graph, order)


def test_python_search_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the same optimum is found, and what is proved is the optimum."""
    for graph in graphs(3):
        best = smallest_peak(graph)
        order, _ = sets._search(graph, None, 0, 0, 1 << 62)
        assert order is not None and simulate(graph, order).peak == best
        assert sets._search(graph, None, 0, 0, best) == (None, best)
        solver = compiled(graph)
        if solver is not None:
            assert solver.sets(None, 0, best - 1, best, 1 << 26) == (None, best)
    monkeypatch.setattr("ortgraph.plan.schedule.bounds.compiled", lambda graph: None)
    monkeypatch.setattr(sets, "compiled", lambda graph: None)
    monkeypatch.setattr(portfolio, "compiled", lambda graph: None)
    for graph in graphs(2):
        assert solve_exact(graph).peak == smallest_peak(graph)
        validate_order(graph, solve_order(graph))


@pytest.mark.parametrize("features", [(), ("inplace",), FEATURES], ids="-".join)
def test_annealing_keeps_books(features: tuple[str, ...]) -> None:
    """Peaks kept up to date move by move are those of the simulation, in-place results included."""
    for seed in range(6):
        graph = random_graph(seed, features, 30)
        solver = compiled(graph)
        if solver is None:
            pytest.skip("no compiler")
        start = list(range(30))
        order, peak = solver.anneal([start], 0.1, 0, 3, seed)
        assert simulate(graph, order).peak == peak <= simulate(graph, start).peak


def test_layered_graph_improves_and_repeats() -> None:
    graph = layered_graph(150, 3)
    first, second = (solve_order(graph, seconds=60.0, tolerance=0.05) for _ in range(2))
    validate_order(graph, first)
    assert first.sequence == second.sequence and first.bound == second.bound
    assert first.peak < 0.95 * simulate(graph, range(150)).peak
    assert first.gap <= 0.05


def test_deadline() -> None:
    if compiled(layered_graph(10, 0)) is None:
        pytest.skip("no compiler")
    solution = solve_order(layered_graph(700, 1), seconds=0.5)
    assert solution.seconds < 1.5


def test_optimal_given_order_returns_at_once() -> None:
    """A chain and its backward half: the given order cannot be beaten, and one cut proves it."""
    n = 2000
    operations = [Operation(f"f{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(n)]
    for k in range(n):
        operations.append(Operation(f"b{k}", 1.0, tuple({n - 1 - k, n + k - 1}), (n + k,)))
    graph = OperationGraph(tuple(operations), tuple(PlanValue(f"v{i}", 100 + i % 7) for i in range(2 * n)))
    solution = solve_order(graph)
    assert solution.solver == "given" and solution.gap == 0.0 and solution.seconds < 2.0


def test_exact_says_when_it_cannot() -> None:
    if compiled(layered_graph(10, 0)) is None:
        pytest.skip("no compiler")
    with pytest.raises(PlanError, match="could not be proved"):
        solve_exact(layered_graph(300, 1), seconds=1.0, memory=1 << 20)


def test_beam_is_wide_enough_to_be_exact() -> None:
    for graph in graphs(3):
        assert solve_beam(graph, width=1000).peak == smallest_peak(graph)


def test_validator() -> None:
    graph = random_graph(1, (), 6)
    good = solve_exact(graph)
    for field in ({"peak": good.peak + 1}, {"bound": good.peak + 1}, {"sequence": good.sequence[:-1]}):
        with pytest.raises(PlanError):
            validate_order(graph, OrderSolution(**{**vars(good), **field}))


def test_empty_graph() -> None:
    graph = OperationGraph((), ())
    for solution in (solve_order(graph), solve_exact(graph)):
        assert solution.sequence == () and solution.peak == solution.bound == 0


@pytest.mark.skipif("ORTGRAPH_PLANNING_DATA" not in os.environ, reason="no folder with published instances")
def test_published_instances() -> None:
    from bench.planning_data import read_graph

    folder = pathlib.Path(os.environ["ORTGRAPH_PLANNING_DATA"]) / "recompute"
    first, second = read_graph(folder / "rlg1-n100.json"), read_graph(folder / "rlg2-n250.json")
    assert solve_exact(first).peak == 36790
    assert solve_order(first).gap == 0.0
    assert order_bound(second) == 105170
    assert solve_order(second).peak <= 1.01 * 105170
