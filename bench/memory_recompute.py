"""Recompute selection on operator graphs: overhead at budgets of 90 to 50 % of the given order's peak."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.memory_rows import Row, row, stopwatch
from bench.planning_data import graph_files, read_graph
from ortgraph.errors import PlanError
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.recompute import RecomputeProblem, RecomputeSolution, memory_floor, solve, validate
from ortgraph.plan.recompute.bound import overhead_bounds
from ortgraph.plan.simulate import simulate

if TYPE_CHECKING:
    from bench.memory import Setup

logger = logging.getLogger(__name__)
SUITE = "recompute"
BUDGETS = (90, 80, 70, 60, 50)  # percent of the given order's peak
SECONDS = 5.0
SLACK_SECONDS = 0.3
BOUND_SECONDS = 20.0  # for all budgets of one graph and order
# Overhead in percent that the free order has to reach, by budget.
TARGETS: dict[str, dict[int, float]] = {
    "rlg1-n100": {90: 0.0, 80: 0.0, 70: 2.2},
    "rlg2-n250": {90: 0.0, 80: 0.0, 70: 1.5},
    "fcn_8_vgg-train": {90: 0.03, 80: 0.14, 70: 0.90},
    "resnet50-train": {90: 0.15, 80: 0.28, 70: 0.55, 50: 1.5},
    "vgg16-train": {90: 2.17},
    "mobilenet-train": {50: 1.8},
}


def run(setup: Setup) -> Iterator[Row]:
    assert setup.data is not None
    for path in graph_files(setup.data):
        if setup.wants(path.stem):
            yield from _graph_rows(path.stem, read_graph(path))


def _graph_rows(name: str, graph: OperationGraph) -> Iterator[Row]:
    peak, floor = simulate(graph, graph.given_order()).peak, memory_floor(graph).bytes
    yield row(SUITE, name, "memory floor / given order's peak", floor / peak)
    budgets = {b: peak * b // 100 for b in BUDGETS if floor <= peak * b // 100}
    for reorder in (True, False) if budgets else ():
        order = "free" if reorder else "fixed"
        bounds = overhead_bounds(graph, list(budgets.values()), BOUND_SECONDS, fixed=not reorder)
        possible = sum(math.isfinite(b) for b in bounds)
        met, over = 0, 0
        for (percent, budget), least in zip(budgets.items(), bounds, strict=True):
            with stopwatch() as watch:
                solution = _solve(graph, budget, reorder)
            met += solution is not None
            over += watch.wall > SECONDS + SLACK_SECONDS
            yield row(
                SUITE, name, f"{order} order, {percent} %: overhead %" + ("" if math.isfinite(least) else " (impossible)"),
                100 * solution.overhead if solution else None,
                bound=100 * max(least, solution.bound_overhead if solution else 0.0),
                at_most=TARGETS.get(name, {}).get(percent) if reorder else None, seconds=watch.wall,
            )  # fmt: skip
        # Whether every budget above the floor can be met is known only for those with a target.
        yield row(
            SUITE, name, f"{order} order: budgets met in {SECONDS:g} s each", met,
            bound=possible, at_least=len(TARGETS[name]) if reorder and name in TARGETS else None, also=not over,
        )  # fmt: skip


def _solve(graph: OperationGraph, budget: int, reorder: bool) -> RecomputeSolution | None:
    """A judged solution within the budget; None where none was found."""
    problem = RecomputeProblem(graph, budget)
    try:
        found = solve(problem, SECONDS, reorder)
    except PlanError as error:
        logger.warning("budget of %d bytes: %s", budget, error)
        return None
    if not found.met:
        return None
    validate(problem, found)
    return found
