"""Greedy placement: buffers in a fixed order, each into the gap that fits it best."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import numpy as np

from ortgraph.plan.memory.arrays import Arrays, compiled, place_in_order
from ortgraph.plan.memory.problem import MemoryProblem
from ortgraph.plan.memory.solution import MemorySolution

# Larger first leaves the small ones to fill gaps; area and lifetime sometimes win on irregular problems.
KEYS: tuple[tuple[str, Callable[[Arrays], tuple[np.ndarray, ...]]], ...] = (
    ("size", lambda a: (a.lower, -a.size)),
    ("area", lambda a: (a.lower, -a.size * (a.upper - a.lower).astype(np.float64))),
    ("lifetime", lambda a: (-a.size, a.lower - a.upper)),
)


def solve_by_size(problem: MemoryProblem) -> MemorySolution:
    """Place the largest first, each at the lowest gap: the usual baseline."""
    start = time.perf_counter()
    arrays = Arrays.of(problem)
    placed = place(arrays, np.lexsort(KEYS[0][1](arrays)), tightest=False)
    assert placed is not None
    total, offsets = placed
    return _solution(arrays, total, offsets, "greedy by size", start)


def solve_best_fit(problem: MemoryProblem) -> MemorySolution:
    """Place by size, area and lifetime, at the lowest and at the tightest gap; keep the smallest arena.

    Stops at the first placement that meets the max-load bound. 60,000 buffers take a few seconds; without a compiler,
    O(n^2) array operations per try.
    """
    start = time.perf_counter()
    arrays = Arrays.of(problem)
    total, offsets, name = best_fit(arrays)
    return _solution(arrays, total, offsets, f"best-fit by {name}", start)


def best_fit(arrays: Arrays, end: float = math.inf, both: bool = True) -> tuple[int, np.ndarray, str]:
    """The best of the greedy placements: by size always, by other orders as time allows.

    Args:
        end: Deadline on the clock of ``time.perf_counter()``.
        both: Try the tightest gap too, which takes several times longer on large problems.

    Returns:
        Arena, offsets int64 [n] (both in units), and what won.
    """
    best: tuple[int, np.ndarray, str] | None = None
    for tightest, (name, key) in itertools.product((False, True) if both else (False,), KEYS):
        left = end - time.perf_counter() if best is not None else math.inf
        placed = place(arrays, np.lexsort(key(arrays)), tightest, left)
        if placed is not None and (best is None or placed[0] < best[0]):
            best = (*placed, f"{name}, {'tightest' if tightest else 'lowest'} gap")
        if best is not None and best[0] == arrays.bound:
            break
    assert best is not None
    return best


def place(
    arrays: Arrays, order: np.ndarray, tightest: bool, seconds: float = math.inf
) -> tuple[int, np.ndarray] | None:
    """``place_in_order``, in Python where there is no compiler."""
    if compiled() is not None:
        return place_in_order(arrays, order, tightest, seconds)
    return _place(arrays, order, tightest, seconds)


def _solution(arrays: Arrays, total: int, offsets: np.ndarray, solver: str, start: float) -> MemorySolution:
    seconds = time.perf_counter() - start
    return MemorySolution(arrays.offsets(offsets), total * arrays.unit, arrays.bound * arrays.unit, solver, seconds)


def _place(arrays: Arrays, order: np.ndarray, tightest: bool, seconds: float) -> tuple[int, np.ndarray] | None:
    """Place in the given order. The placed buffers are kept sorted by offset in four parallel arrays."""
    n, total, stop = 0, 0, time.perf_counter() + seconds
    low, high, lower, upper = (np.empty(len(order), dtype=np.int64) for _ in range(4))
    offsets = np.zeros(len(order), dtype=np.int64)
    for i in order.tolist():
        size, first, end = int(arrays.size[i]), arrays.lower[i], arrays.upper[i]
        if size == 0:
            continue
        if time.perf_counter() >= stop:
            return None
        live = (lower[:n] < end) & (upper[:n] > first)
        offset = _gap(low[:n][live], high[:n][live], size, tightest)
        at = int(np.searchsorted(low[:n], offset, side="right"))
        for array, value in ((low, offset), (high, offset + size), (lower, first), (upper, end)):
            array[at + 1 : n + 1] = array[at:n].copy()
            array[at] = value
        n += 1
        offsets[i] = offset
        total = max(total, offset + size)
    return total, offsets


def _gap(low: np.ndarray, high: np.ndarray, size: int, tightest: bool) -> int:
    """Offset of the lowest or the tightest gap between live neighbours, or their end when nothing fits."""
    if not len(low):
        return 0
    reach = np.maximum.accumulate(high)
    starts = np.concatenate(([0], reach[:-1]))
    room = low - starts
    fits = np.flatnonzero(room >= size)
    if not len(fits):
        return int(reach[-1])
    return int(starts[fits[np.argmin(room[fits])] if tightest else fits[0]])
