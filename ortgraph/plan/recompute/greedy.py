"""Greedy recompute selection in a fixed order: relieve the peak by the value that frees most bytes per cost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.recompute.floor import check_floor
from ortgraph.plan.recompute.problem import RecomputeProblem
from ortgraph.plan.recompute.solution import RecomputeSolution, make_solution
from ortgraph.plan.simulate import lifetimes, simulate

_TRIED = 12  # candidates evaluated per step before giving up on the peak
_FREE = 1e-12  # share of the total cost: a zero-cost recomputation still ranks by bytes


def solve_greedy(
    problem: RecomputeProblem, order: Sequence[int] | None = None, seconds: float = float("inf")
) -> RecomputeSolution:
    """While the peak is over the budget: take a value that is live there but not used there, drop it after its use
    before and evaluate it again, with whatever it needs that is dead, right before its next use.

    Candidates are ranked by bytes per added cost; one is taken when it lowers the sum of bytes over the budget.

    Args:
        problem: Graph and budget.
        order: First evaluations, in a valid order; the given order by default.
        seconds: Stops early with the sequence so far, which may be over the budget.

    Raises:
        PlanError: The budget is below the memory floor.
    """
    check_floor(problem)
    start = time.perf_counter()
    graph = problem.graph
    sequence = list(graph.given_order() if order is None else order)
    live = simulate(graph, sequence).live
    while live.max(initial=0) > problem.budget and time.perf_counter() - start < seconds:
        better = relieve_peak(graph, sequence, live, problem.budget)
        if better is None:
            break
        sequence, live = better
    return make_solution(problem, sequence, "greedy", time.perf_counter() - start)


@dataclasses.dataclass(frozen=True)
class _Drop:
    rate: float
    at: int  # step of the next use
    chain: tuple[int, ...]  # operations evaluated right before it


def relieve_peak(
    graph: OperationGraph, sequence: list[int], live: np.ndarray, budget: int
) -> tuple[list[int], np.ndarray] | None:
    """The sequence with the best drop at the peak, None where none helps."""
    over = _excess(live, budget)
    for drop in _candidates(graph, sequence, int(np.argmax(live)))[:_TRIED]:
        changed = [*sequence[: drop.at], *drop.chain, *sequence[drop.at :]]
        profile = simulate(graph, changed)
        if _excess(profile.live, budget) < over:
            return changed, profile.live
    return None


def _excess(live: np.ndarray, budget: int) -> int:
    return int(np.maximum(live - budget, 0).sum())


def _candidates(graph: OperationGraph, sequence: list[int], peak: int) -> list[_Drop]:
    """Drops of values that live through the peak unused, best rate first."""
    alive: dict[int, int] = {}  # value -> first step of the life that spans the peak
    ends: dict[int, list[tuple[int, int]]] = {}
    for life in lifetimes(graph, sequence):
        ends.setdefault(life.value, []).append((life.lower, life.upper))
        if life.lower < peak < life.upper - 1:
            alive[life.value] = life.lower
    used = {*graph.operations[sequence[peak]].inputs, *graph.operations[sequence[peak]].outputs}
    next_use: dict[int, int] = {}
    for t in range(peak + 1, len(sequence)):
        for v in graph.operations[sequence[t]].inputs:
            if v in alive:
                next_use.setdefault(v, t)
    closed: dict[int, int] = {}  # operation -> first step at which something that it reads is overwritten
    for t, i in enumerate(sequence):
        for j in graph.operations[i].after:
            closed.setdefault(j, t)
    free = _FREE * (graph.cost or 1.0)
    drops = []
    for v in sorted(alive.keys() - used):
        made = graph.producer[v]
        if v not in next_use or not graph.operations[made].recompute:
            continue  # kept to the end without a use, or not to be repeated
        chain = _chain(graph, made, next_use[v], ends)
        if any(closed.get(i, next_use[v]) < next_use[v] for i in chain):
            continue
        cost = sum(graph.operations[i].cost for i in chain)
        drops.append(_Drop(graph.values[v].size / (cost + free), next_use[v], tuple(chain)))
    return sorted(drops, key=lambda d: (-d.rate, d.at, d.chain))


def _chain(graph: OperationGraph, target: int, at: int, ends: dict[int, list[tuple[int, int]]]) -> list[int]:
    """The target and what it needs that is dead at a step and may be repeated, ancestors first."""
    wanted, todo = {target}, [target]
    while todo:
        for v in graph.operations[todo.pop()].inputs:
            made = graph.producer[v]
            covered = any(lower < at < upper for lower, upper in ends[v])
            if made not in wanted and not covered and graph.operations[made].recompute:
                wanted.add(made)
                todo.append(made)
    return sorted(wanted)  # the given order is a valid one
