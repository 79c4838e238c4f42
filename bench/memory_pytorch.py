"""Our recompute selection against PyTorch's activation memory budget and ``checkpoint``, on PyTorch's own joint graphs.

Both are judged by ``ortgraph.plan.simulate``: peak bytes and extra FLOPs of a sequence over the joint graph's operations.
PyTorch's sequences are the nodes of its forward, then of its backward half, as its partitioner makes them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.memory_rows import Row, row, stopwatch
from ortgraph.errors import PlanError
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.recompute import RecomputeProblem, RecomputeSolution, memory_floor, solve, validate
from ortgraph.plan.recompute.bound import overhead_bounds
from ortgraph.plan.simulate import simulate

if TYPE_CHECKING:
    from bench.memory import Setup

logger = logging.getLogger(__name__)
SUITE = "pytorch"
POINTS = 50
SECONDS = 3.0  # for each of our solutions
BOUND_SECONDS = 30.0  # for all peaks of one model
SAVING = 40.0  # percent fewer extra FLOPs, at peaks of half and below
LOWEST = {"GPT 4x128": 0.30}
LEVELS = (0.35, 0.3, 0.25, 0.2, 0.15, 0.1)


@dataclasses.dataclass(frozen=True)
class Point:
    """One partition of PyTorch's: what made it, its peak, and its extra FLOPs in percent."""

    made_by: str
    peak: int
    extra: float


def run(setup: Setup) -> Iterator[Row]:
    from bench.memory_pytorch_models import MODELS

    for name in MODELS:
        if setup.wants(name):
            yield from _compare(name)


def _compare(name: str) -> Iterator[Row]:
    with stopwatch() as watch:
        graph, points = pytorch_points(name)
    base, floor = simulate(graph, graph.given_order()).peak, memory_floor(graph).bytes
    best = frontier(points)
    yield row(SUITE, name, "PyTorch's default: peak bytes", base, seconds=watch.wall)
    yield row(SUITE, name, f"PyTorch's lowest peak / default ({len(points)} points)", best[0].peak / base)
    levels = [level for level in LEVELS if level * base >= floor]
    budgets = [p.peak for p in best] + [int(level * base) for level in levels]
    bounds = {b: 100 * x for b, x in zip(budgets, overhead_bounds(graph, budgets, BOUND_SECONDS), strict=True)}
    reached = base
    ours: dict[Point, float] = {}
    for point in reversed(best):
        solution, seconds = _ours(graph, point.peak)
        if solution is not None:
            ours[point], reached = 100 * solution.overhead, min(reached, solution.peak)
        yield row(
            SUITE, name, f"extra FLOPs % at peak {point.peak / base:.3f} ({point.made_by})", ours.get(point),
            bound=bounds[point.peak], at_most=point.extra, seconds=seconds,
        )  # fmt: skip
    yield from _verdicts(name, best, ours, bounds, base)
    for level in levels:
        solution, seconds = _ours(graph, int(level * base))
        yield row(
            SUITE, name, f"extra FLOPs % at peak {level:g}", None if solution is None else 100 * solution.overhead,
            bound=bounds[int(level * base)], seconds=seconds,
        )  # fmt: skip
        if solution is None:
            break
        reached = min(reached, solution.peak)
    yield row(SUITE, name, "lowest peak / default", reached / base, bound=floor / base, at_most=LOWEST.get(name))


def _verdicts(
    name: str, best: list[Point], ours: dict[Point, float], bounds: dict[int, float], base: int
) -> Iterator[Row]:
    """The two targets over all points. Bounds are what no planner can surpass."""
    excess = [ours.get(p, math.inf) - p.extra for p in best]
    yield row(
        SUITE, name, "worst excess of extra FLOPs over PyTorch, points of %", max(excess),
        bound=max(bounds[p.peak] - p.extra for p in best), at_most=0.0,
    )  # fmt: skip
    low = [p for p in best if p.peak <= base / 2 and p.extra > 0]
    if not low:
        return
    savings = [100 * (1 - ours.get(p, 2 * p.extra) / p.extra) for p in low]
    possible = [100 * (1 - bounds[p.peak] / p.extra) for p in low]
    setting = f"saving of extra FLOPs % at peaks <= 0.5 ({len(low)} points)"
    yield row(SUITE, name, f"least {setting}", min(savings), bound=min(possible), at_least=SAVING)
    yield row(SUITE, name, f"mean {setting}", sum(savings) / len(low), bound=sum(possible) / len(low))


def _ours(graph: OperationGraph, budget: int) -> tuple[RecomputeSolution | None, float]:
    """Our sequence within a budget, judged; None where none was found."""
    problem = RecomputeProblem(graph, budget)
    found = None
    with stopwatch() as watch:
        try:
            found = solve(problem, SECONDS)
        except PlanError as error:
            logger.warning("budget of %d bytes: %s", budget, error)
    if found is None or not found.met:
        return None, watch.wall
    validate(problem, found)
    return found, watch.wall


def pytorch_points(name: str) -> tuple[OperationGraph, list[Point]]:
    """The joint graph in PyTorch's default order, and what PyTorch makes of it: the budget swept, and checkpoints."""
    import torch
    import torch._functorch.config as config
    from torch._functorch import partitioners

    from bench.memory_pytorch_graph import convert, trace
    from bench.memory_pytorch_models import MODELS

    make, shape = MODELS[name]
    torch.manual_seed(0)
    logging.getLogger("torch._functorch.partitioners").setLevel(logging.ERROR)
    traced = trace(make(), torch.randn(shape))
    order = traced.run(partitioners.default_partition)
    joint = convert(traced, order)

    def point(made_by: str, budget: float, checkpointed: bool = False) -> Point:
        with config.patch(activation_memory_budget=budget):
            names = traced.run(partitioners.min_cut_rematerialization_partition, checkpointed)
        profile = simulate(joint.problem, joint.sequence(names))
        return Point(made_by, profile.peak, 100 * profile.overhead)

    points = [point("checkpoint", 1.0, checkpointed=True)]
    points += [point(f"budget {i / (POINTS - 1):.2f}", i / (POINTS - 1)) for i in reversed(range(POINTS))]
    return joint.problem, points


def frontier(points: list[Point]) -> list[Point]:
    """Points that no other one beats in peak and FLOPs both, lowest peak first."""
    kept: list[Point] = []
    for p in sorted(points, key=lambda p: (p.peak, p.extra)):
        if not kept or p.extra < kept[-1].extra:
            kept.append(p)
    return kept
