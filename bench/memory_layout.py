"""Placing buffers in one arena: at a given capacity, any-time, and real compilers' buffers."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.memory_rows import Row, row, stopwatch
from bench.planning_data import allocation_files, read_allocation
from ortgraph.plan.memory import solve, validate

if TYPE_CHECKING:
    from bench.memory import Setup

SUITE = "layout"
AT_CAPACITY_SECONDS = 30.0  # for one instance; the target is on their sum
ANY_TIME_SECONDS = 3.0
REAL_SECONDS = 30.0
# The six whose sum at capacity has a target; the mean is over all instances with a capacity.
SIX = frozenset("ABCDEF")
TIGHTER = {"C": 1_039_360}  # its max-load, where a placement is known
RATIOS = {"resnet50": 1.0, "G_1": 1.0, "pangu_2.6B": 1.002}


def run(setup: Setup) -> Iterator[Row]:
    assert setup.data is not None
    spent: dict[str, float | None] = {}
    ratios: list[float] = []
    files = [(p, c) for p, c in allocation_files(setup.data) if setup.wants(_name(p.stem, c))]
    for path, capacity in files:
        if capacity is None:
            yield _real(path)
            continue
        name, problem = _name(path.stem, capacity), read_allocation(path)
        for limit in filter(None, (capacity, TIGHTER.get(name))):
            with stopwatch() as watch:
                solution = solve(problem, AT_CAPACITY_SECONDS, capacity=limit)
            validate(problem, solution)
            fits = solution.arena_bytes <= limit
            if limit == capacity:
                spent[name] = watch.cpu if fits else None
            yield row(
                SUITE, name, f"arena bytes at capacity {limit:,}", solution.arena_bytes,
                bound=problem.max_load(), at_most=limit, seconds=watch.wall,
            )  # fmt: skip
        with stopwatch() as watch:
            solution = solve(problem, ANY_TIME_SECONDS)
        validate(problem, solution)
        if len(problem.buffers) > 20:  # smaller ones only show the format
            ratios.append(solution.arena_bytes / problem.max_load())
        yield row(
            SUITE, name, f"arena / max-load, any-time {ANY_TIME_SECONDS:g} s", solution.arena_bytes / problem.max_load(),
            bound=1.0, seconds=watch.wall,
        )  # fmt: skip
    if spent.keys() >= SIX:
        yield row(
            SUITE, "A-F", "processor seconds at capacity, sum", _sum([spent[n] for n in sorted(SIX)]), at_most=40.0
        )
    if spent.keys() - SIX - {"input"}:
        yield row(SUITE, "all with a capacity", "processor seconds at capacity, sum", _sum(list(spent.values())))
    if ratios:
        yield row(
            SUITE, "all with a capacity", "arena / max-load, mean", statistics.fmean(ratios), bound=1.0, at_most=1.03
        )


def _real(path: pathlib.Path) -> Row:
    problem = read_allocation(path)
    with stopwatch() as watch:
        solution = solve(problem, REAL_SECONDS)
    validate(problem, solution)
    return row(
        SUITE, path.stem, f"arena / max-load, at most {REAL_SECONDS:g} s", solution.arena_bytes / problem.max_load(),
        bound=1.0, at_most=RATIOS.get(path.stem), also=watch.wall < REAL_SECONDS + 0.3, seconds=watch.wall,
    )  # fmt: skip


def _name(stem: str, capacity: int | None) -> str:
    return stem if capacity is None else stem.rsplit(".", 1)[0]


def _sum(seconds: list[float | None]) -> float | None:
    """None when one of them found no placement."""
    found = [s for s in seconds if s is not None]
    return sum(found) if len(found) == len(seconds) else None
