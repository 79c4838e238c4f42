"""Exact search for a placement within a capacity: branch and bound over canonical placements.

Source of the idea: MiniMalloc (Moffitt, ASPLOS 2023): search only placements in which nothing can drop, and solve parts apart
where the time line is cut. Here the branching is on a niche of the skyline (see ``native/layout_search.h``), failed
states are remembered, and short runs with different rules take turns.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from ortgraph.errors import PlanError
from ortgraph.plan.memory.arrays import Arrays, Outcome, compiled, place_in_order, search_within
from ortgraph.plan.memory.problem import MemoryProblem
from ortgraph.plan.memory.solution import MemorySolution

_RUNS = 1 << 30


@dataclasses.dataclass(frozen=True)
class Feasibility:
    """Answer to: does the problem fit into the capacity?

    Attributes:
        outcome: FOUND, INFEASIBLE (proven) or LIMIT (not known).
        solution: The placement if found.
        nodes: Search nodes visited.
        seconds: Time taken.
    """

    outcome: Outcome
    solution: MemorySolution | None
    nodes: int
    seconds: float


def solve_canonical(
    problem: MemoryProblem, capacity: int, seconds: float = 60.0, max_nodes: int | None = None
) -> Feasibility:
    """Find a placement within ``capacity`` bytes, or prove that there is none.

    Args:
        seconds: Deadline.
        max_nodes: Limit on search nodes, for an effort that does not depend on the machine.

    Raises:
        PlanError: There is no compiler.
    """
    if compiled() is None:
        raise PlanError("the exact placement search is compiled C++", "install g++ or set CXX, or use solve_best_fit")
    start = time.perf_counter()
    arrays = Arrays.of(problem)
    everything = np.arange(len(arrays))
    limits = {} if max_nodes is None else {"max_nodes": max_nodes}
    outcome, units, nodes = search_within(arrays, everything, capacity // arrays.unit, 0, _RUNS, seconds, **limits)
    solution = None
    if outcome is Outcome.FOUND:
        placed = place_in_order(arrays, np.argsort(units, kind="stable"), tightest=False)
        assert placed is not None
        total, units = placed
        spent = time.perf_counter() - start
        bound = arrays.bound * arrays.unit
        solution = MemorySolution(arrays.offsets(units), total * arrays.unit, bound, "canonical search", spent, nodes)
    return Feasibility(outcome, solution, nodes, time.perf_counter() - start)
