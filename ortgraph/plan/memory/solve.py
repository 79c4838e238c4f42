"""The any-time solver: greedy first, then exact searches for ever smaller arenas.

What is hard about a real training graph is its *core*: the buffers live at or near the peak. The search places the core
within the target, the others are placed greedily around it; those that then stick out join the core. On small problems
the core is everything.
"""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np

from ortgraph.plan.memory.arrays import Arrays, Outcome, compiled, place_in_order, search_within
from ortgraph.plan.memory.best_fit import KEYS, best_fit
from ortgraph.plan.memory.problem import MemoryProblem
from ortgraph.plan.memory.solution import MemorySolution

_WHOLE = 600  # up to here, everything is the core from the start
_LARGEST_CORE = 3000  # a search node costs time in proportion to the core
_FIRST_CORE = 2000  # the largest buffers of a larger core, which leaves room for repairs
_SHARES = (0.97, 0.9, 1.0, 0.8, 0.0)  # of the peak: buffers that see such a load are the core
_REPAIRS = 8
_RUNS = 12  # of the first round


def solve(
    problem: MemoryProblem, seconds: float = 10.0, capacity: int | None = None, max_rounds: int | None = None
) -> MemorySolution:
    """The smallest arena found until the deadline; stops at once when it meets the bound or the capacity.

    Args:
        seconds: Deadline.
        capacity: Bytes that are small enough.
        max_rounds: Limit on the effort: each round makes twice the search runs of the one before. With it, and a
            deadline that is not met, the result does not depend on the machine.

    Without a compiler the result is that of ``solve_best_fit``.
    """
    exact = compiled() is not None  # the first call on a machine compiles, which is not the search's time
    start = time.perf_counter()
    arrays = Arrays.of(problem)
    total, units, name = best_fit(arrays, start + seconds, both=len(arrays) <= _WHOLE)
    state = _State(arrays, start + seconds, total, units, f"best-fit by {name}", arrays.bound)
    state.enough = arrays.bound if capacity is None else max(arrays.bound, capacity // arrays.unit)
    if exact:
        state.improve(max_rounds)
    unit = arrays.unit
    return MemorySolution(
        arrays.offsets(state.units),
        state.total * unit,
        state.bound * unit,
        state.solver,
        time.perf_counter() - start,
        state.nodes,
    )


@dataclasses.dataclass
class _State:
    """The best placement so far (total, units, solver), and the greatest proven bound; in units."""

    arrays: Arrays
    end: float
    total: int
    units: np.ndarray
    solver: str
    bound: int
    enough: int = 0
    nodes: int = 0

    def done(self) -> bool:
        return self.total <= max(self.bound, self.enough) or time.perf_counter() >= self.end

    def improve(self, max_rounds: int | None) -> None:
        """Rounds of doubling effort: the target itself first, then sizes between it and the best, by bisection."""
        peaks = self.arrays.peaks()
        rounds = 0
        while not self.done() and (max_rounds is None or rounds < max_rounds):
            runs = _RUNS << min(rounds, 16)
            first = runs - _RUNS
            low = self._least()
            target = low
            while not self.done():
                if not self._reach(target, peaks, first, runs):
                    low = max(target, self._least())
                target, runs = (low + self.total) // 2, max(runs // 4, _RUNS // 4)
                # Steps below a thousandth are left to later rounds.
                if self.total - low <= 1 + self.bound // 1000:
                    break
            rounds += 1

    def _least(self) -> int:
        return max(self.bound, self.enough)

    def _reach(self, target: int, peaks: np.ndarray, first: int, runs: int) -> bool:
        """Try to place everything within the target. Returns whether the best now is."""
        tried: set[int] = set()
        for share in (0.0,) if len(self.arrays) <= _WHOLE else _SHARES:
            core = self._largest(np.flatnonzero(peaks >= share * self.arrays.bound))
            for _ in range(_REPAIRS):
                if len(core) in tried or len(core) > _LARGEST_CORE or self.done():
                    break
                tried.add(len(core))
                outcome, units = self._attempt(core, target, first, runs)
                if self.total <= target:
                    return True
                if outcome is Outcome.INFEASIBLE:
                    self.bound = max(self.bound, target + 1)
                    return False
                if units is None:
                    break
                core = np.union1d(core, np.flatnonzero(units + self.arrays.size > target))
        return False

    def _largest(self, core: np.ndarray) -> np.ndarray:
        if len(core) <= _FIRST_CORE:
            return core
        return np.sort(core[np.argsort(-self.arrays.size[core], kind="stable")[:_FIRST_CORE]])

    def _attempt(self, core: np.ndarray, target: int, first: int, runs: int) -> tuple[Outcome, np.ndarray | None]:
        """Place the core exactly and the others greedily around it.

        Returns what the exact search said, and the best offsets around that core, if it has a placement.
        """
        left = self.end - time.perf_counter()
        outcome, units, visited = search_within(self.arrays, core, target, first, runs, left)
        self.nodes += visited
        if outcome is not Outcome.FOUND:
            return outcome, None
        prefix = core[np.argsort(units, kind="stable")]
        rest = np.ones(len(self.arrays), dtype=bool)
        rest[core] = False
        best: tuple[int, np.ndarray] | None = None
        for tightest, (_, key) in itertools.product((False, True), KEYS):
            ranks = np.lexsort(key(self.arrays))
            order = np.concatenate([prefix, ranks[rest[ranks]]])
            placed = place_in_order(self.arrays, order, tightest, self.end - time.perf_counter())
            if placed is None:
                break
            if best is None or placed[0] < best[0]:
                best = placed
            if placed[0] < self.total:
                self.total, self.units = placed
                self.solver = "exact core, greedy rest" if rest.any() else "canonical search"
            if self.total <= target or not rest.any():
                break
        return outcome, best[1] if best is not None else None
