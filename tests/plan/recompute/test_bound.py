"""The bound on the overhead never exceeds the optimum, which exhaustive search gives on small graphs."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest

from ortgraph.plan.operations import Operation, OperationGraph, PlanValue
from ortgraph.plan.recompute.bound import MomentBound, overhead_bounds

pytest.importorskip("scipy")


def random_graph(seed: int, size: int = 6) -> OperationGraph:
    draw = random.Random(seed)
    operations, values = [], []
    for i in range(size):
        read = sorted({v for v in range(len(values)) if draw.random() < 0.4 and v >= len(values) - 5})
        made = range(len(values), len(values) + draw.choice([1, 1, 1, 2]))
        values += [PlanValue(f"v{v}", draw.randint(1, 6), draw.random() < 0.15) for v in made]
        operations.append(
            Operation(
                f"o{i}",
                float(draw.randint(0, 5)),
                tuple(read),
                tuple(made),
                draw.random() < 0.85,
                draw.choice([0, 0, 1]),
            )
        )
    return OperationGraph(tuple(operations), tuple(values))


def least_overhead(graph: OperationGraph, budget: int, fixed: bool) -> float:
    """Dijkstra over (operations evaluated, values in memory)."""
    n = len(graph.operations)
    kept = frozenset(v for v, value in enumerate(graph.values) if value.kept)
    best: dict[tuple[frozenset[int], frozenset[int]], float] = {(frozenset(), frozenset()): 0.0}
    queue = [(0.0, 0, frozenset(), frozenset())]
    ticket = itertools.count(1)
    while queue:
        cost, _, done, memory = heapq.heappop(queue)
        if best[done, memory] < cost:
            continue
        if len(done) == n and kept <= memory:
            return (cost - graph.cost) / graph.cost if graph.cost else 0.0
        for i, o in enumerate(graph.operations):
            again = i in done
            if not set(o.inputs) <= memory or (again and not o.recompute) or (fixed and not again and i != len(done)):
                continue
            held = memory | set(o.outputs)
            if sum(graph.values[v].size for v in held) + o.scratch > budget:
                continue
            for count in range(len(held) + 1):
                for rest in itertools.combinations(sorted(held), count):
                    state = (done | {i}, frozenset(rest))
                    if cost + o.cost < best.get(state, math.inf):
                        best[state] = cost + o.cost
                        heapq.heappush(queue, (cost + o.cost, next(ticket), *state))
    return math.inf


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_never_above_the_optimum(seed, fixed) -> None:
    graph = random_graph(seed)
    sizes = [v.size for v in graph.values]
    budgets = range(max(sizes), sum(sizes) + 1, 3)
    bound = MomentBound(graph)
    for budget in budgets:
        optimum = least_overhead(graph, budget, fixed)
        for v in range(len(graph.operations)):
            linear, whole = bound.at(v, budget, fixed), bound.at(v, budget, fixed, integral=True)
            assert linear <= whole + 1e-5
            assert whole <= optimum + 1e-5, (seed, budget, v)
    together = overhead_bounds(graph, list(budgets), 5.0, fixed)
    assert together == sorted(together, reverse=True)


def chain(kept_last: bool = True) -> OperationGraph:
    """a -> b -> c -> d, and d reads a: a lies idle while b and c run."""
    values = tuple(
        PlanValue(n, s, k) for n, s, k in [("a", 4, False), ("b", 4, False), ("c", 4, False), ("d", 1, kept_last)]
    )
    operations = (
        Operation("a", 3.0, (), (0,)),
        Operation("b", 5.0, (0,), (1,)),
        Operation("c", 5.0, (1,), (2,)),
        Operation("d", 7.0, (0, 2), (3,)),
    )
    return OperationGraph(operations, values)


def test_exact_where_one_moment_decides() -> None:
    graph = chain()
    free, tight, impossible = overhead_bounds(graph, [12, 9, 8], 5.0)
    assert free == 0.0
    assert tight == pytest.approx(3 / 20, abs=1e-4) == least_overhead(graph, 9, False)  # a is evaluated again
    assert math.isinf(impossible) and math.isinf(least_overhead(graph, 8, False))


def test_sizes_between_whole_units_count() -> None:
    # The largest value is the unit of the program: a budget of 2.5 of them is not one of 2.
    values = (PlanValue("a", 4), PlanValue("b", 2), PlanValue("c", 4))
    operations = (Operation("a", 1.0, (), (0,)), Operation("b", 1.0, (), (1,)), Operation("c", 1.0, (0, 1), (2,)))
    graph = OperationGraph(operations, values)
    assert overhead_bounds(graph, [10], 5.0) == [0.0]
    assert math.isinf(overhead_bounds(graph, [9], 5.0)[0])


def test_scipy_absent(monkeypatch, caplog) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    assert overhead_bounds(chain(), [9, 8], 5.0) == [0.0, 0.0]
    assert "scipy" in caplog.text
