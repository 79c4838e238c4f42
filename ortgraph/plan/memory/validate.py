"""Checks a placement without knowing how it was made."""

from __future__ import annotations

import bisect
import heapq

from ortgraph.errors import PlanError
from ortgraph.plan.memory.problem import MemoryProblem
from ortgraph.plan.memory.solution import MemorySolution


def validate(problem: MemoryProblem, solution: MemorySolution) -> None:
    """Raise PlanError unless every buffer lies aligned in the arena and no two live buffers overlap.

    A sweep over the steps keeps the live buffers by offset; each new one is compared with its neighbours. Empty buffers
    overlap nothing.
    """
    names = {b.name for b in problem.buffers}
    if names != set(solution.offsets):
        odd = sorted(names ^ set(solution.offsets))
        raise PlanError(f"the placement and the problem do not have the same buffers: {', '.join(odd[:5])}")
    if solution.arena_bytes < problem.max_load():
        raise PlanError(f"an arena of {solution.arena_bytes} bytes is below the max-load {problem.max_load()}")
    ends: list[tuple[int, int]] = []
    # Live buffers are disjoint, so that they are sorted by both ends, and a new one can only meet its two neighbours.
    lows: list[int] = []
    live: list[tuple[int, str]] = []
    for b in sorted(problem.buffers, key=lambda b: (b.lower, b.name)):
        while ends and ends[0][0] <= b.lower:
            at = bisect.bisect_left(lows, heapq.heappop(ends)[1])
            del lows[at], live[at]
        low = solution.offsets[b.name]
        high = low + b.size
        if low < 0 or low % problem.alignment:
            raise PlanError(f"buffer {b.name!r}: offset {low} is not a multiple of {problem.alignment}")
        if high > solution.arena_bytes:
            raise PlanError(f"buffer {b.name!r} ends at {high}, outside the arena of {solution.arena_bytes} bytes")
        if b.size == 0:
            continue
        at = bisect.bisect_right(lows, low)
        for k in range(max(at - 1, 0), min(at + 1, len(lows))):
            other_low, (other_high, other) = lows[k], live[k]
            if low < other_high and other_low < high:
                raise PlanError(
                    f"buffers {other!r} [{other_low}, {other_high}) and {b.name!r} [{low}, {high}) "
                    f"overlap at step {b.lower}"
                )
        lows.insert(at, low)
        live.insert(at, (high, b.name))
        heapq.heappush(ends, (b.upper, low))
