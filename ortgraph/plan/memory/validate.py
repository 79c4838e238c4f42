"""Checks a placement without knowing how it was made."""

from __future__ import annotations

import heapq

from ortgraph.errors import PlanError
from ortgraph.plan.memory.problem import MemoryProblem
from ortgraph.plan.memory.solution import MemorySolution


def validate(problem: MemoryProblem, solution: MemorySolution) -> None:
    """Raise PlanError unless every buffer lies aligned in the arena and no two live buffers overlap.

    A sweep over the steps keeps the live buffers; each new one is compared with those. Empty buffers overlap nothing.
    """
    names = {b.name for b in problem.buffers}
    if names != set(solution.offsets):
        odd = sorted(names ^ set(solution.offsets))
        raise PlanError(f"the placement and the problem do not have the same buffers: {', '.join(odd[:5])}")
    if solution.arena_bytes < problem.max_load():
        raise PlanError(f"an arena of {solution.arena_bytes} bytes is below the max-load {problem.max_load()}")
    ends: list[tuple[int, str]] = []
    live: dict[str, tuple[int, int]] = {}
    for b in sorted(problem.buffers, key=lambda b: (b.lower, b.name)):
        while ends and ends[0][0] <= b.lower:
            live.pop(heapq.heappop(ends)[1])
        low = solution.offsets[b.name]
        high = low + b.size
        if low < 0 or low % problem.alignment:
            raise PlanError(f"buffer {b.name!r}: offset {low} is not a multiple of {problem.alignment}")
        if high > solution.arena_bytes:
            raise PlanError(f"buffer {b.name!r} ends at {high}, outside the arena of {solution.arena_bytes} bytes")
        if b.size == 0:
            continue
        for other, (other_low, other_high) in live.items():
            if low < other_high and other_low < high:
                raise PlanError(
                    f"buffers {other!r} [{other_low}, {other_high}) and {b.name!r} [{low}, {high}) "
                    f"overlap at step {b.lower}"
                )
        live[b.name] = (low, high)
        heapq.heappush(ends, (b.upper, b.name))
