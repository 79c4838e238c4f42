"""Ordering for peak memory: the peak found, the min-cut bound, and the bound's own time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.memory_rows import Row, row, stopwatch
from bench.planning_data import graph_files, read_graph
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.schedule import order_bound, solve_order, validate_order
from ortgraph.plan.simulate import simulate

if TYPE_CHECKING:
    from bench.memory import Setup

SUITE = "order"
SECONDS = 10.0
BOUND_SECONDS = 60.0
PEAKS = {"rlg1-n100": 36_790}  # to be reached, and proved
GAPS = {"rlg2-n250": 0.01}  # of the bound


def run(setup: Setup) -> Iterator[Row]:
    assert setup.data is not None
    for path in graph_files(setup.data):
        if setup.wants(path.stem):
            yield from order_rows(path.stem, read_graph(path))
    yield from _captured(setup)


def order_rows(name: str, graph: OperationGraph) -> Iterator[Row]:
    """The given order's peak, the peak found with its bound, and the bound by itself."""
    with stopwatch() as watch:
        solution = solve_order(graph, SECONDS)
    validate_order(graph, solution)
    with stopwatch() as alone:
        cut = order_bound(graph, BOUND_SECONDS)
    bound = max(cut, solution.bound)
    yield row(SUITE, name, "given order: peak bytes", simulate(graph, graph.given_order()).peak, bound=bound)
    target = PEAKS.get(name)
    if name in GAPS:
        target = int(bound * (1 + GAPS[name]))
    proved = name not in PEAKS or bound == solution.peak
    yield row(
        SUITE, name, f"peak bytes, at most {SECONDS:g} s", solution.peak,
        bound=bound, at_most=target, also=proved and watch.wall < SECONDS + 0.3, seconds=watch.wall,
    )  # fmt: skip
    yield row(SUITE, name, "min-cut bound by itself: bytes", cut, bound=cut, seconds=alone.wall)


def _captured(setup: Setup) -> Iterator[Row]:
    from bench.memory_captured import CAPTURED

    for name, make in CAPTURED.items():
        if setup.wants(name):
            yield from order_rows(f"{name} (captured)", make())
