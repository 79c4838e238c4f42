"""A placement problem as arrays in the smallest units, and the compiled placers that work on them."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ortgraph.plan.memory.problem import MemoryProblem
from ortgraph.plan.native import load

_INT64 = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
_MANY = 1 << 60
_INT32 = np.ctypeslib.ndpointer(np.int32, flags="C_CONTIGUOUS")


class Outcome(enum.IntEnum):
    """What a search for a placement within a capacity found out."""

    INFEASIBLE = 0
    FOUND = 1
    LIMIT = 2


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Buffers in order of their names, so that results do not depend on the order in which they were given.

    Attributes:
        names: Names, ascending.
        lower: int64 [n]; first live step.
        upper: int64 [n]; first dead step.
        size: int64 [n]; aligned sizes in units.
        unit: Bytes per unit, the greatest common divisor of the aligned sizes. An offset of a placement in which every
            buffer rests on others or the ground is a sum of sizes, so whole units lose nothing.
        bound: Max-load in units.
    """

    names: tuple[str, ...]
    lower: np.ndarray
    upper: np.ndarray
    size: np.ndarray
    unit: int
    bound: int

    @classmethod
    def of(cls, problem: MemoryProblem) -> Arrays:
        buffers = sorted(problem.buffers, key=lambda b: b.name)
        lower = np.array([b.lower for b in buffers], dtype=np.int64)
        upper = np.array([b.upper for b in buffers], dtype=np.int64)
        size = np.array([problem.aligned(b) for b in buffers], dtype=np.int64)
        unit = int(np.gcd.reduce(size)) if len(size) else 1
        unit = unit or 1
        return cls(tuple(b.name for b in buffers), lower, upper, size // unit, unit, problem.max_load() // unit)

    def __len__(self) -> int:
        return len(self.names)

    def offsets(self, units: np.ndarray) -> Mapping[str, int]:
        """Byte offsets by name."""
        return dict(zip(self.names, (units * self.unit).tolist(), strict=True))

    def peaks(self) -> np.ndarray:
        """int64 [n]; the largest load during each buffer's life, in units."""
        steps, at = np.unique(np.concatenate([self.lower, self.upper]), return_inverse=True)
        first, end = at[: len(self)], at[len(self) :]
        change = np.zeros(len(steps), dtype=np.int64)
        np.add.at(change, first, self.size)
        np.add.at(change, end, -self.size)
        # Maxima over windows of 1, 2, 4, ... sections: two windows cover every life.
        windows = [np.cumsum(change)]
        while 2 << (len(windows) - 1) <= len(steps):
            half = 1 << (len(windows) - 1)
            windows.append(np.maximum(windows[-1][:-half], windows[-1][half:]))
        peaks = np.zeros(len(self), dtype=np.int64)
        level = np.frexp(np.maximum(end - first, 1))[1] - 1
        for k, window in enumerate(windows):
            chosen = np.flatnonzero(level == k)
            peaks[chosen] = np.maximum(window[first[chosen]], window[end[chosen] - (1 << k)])
        return peaks


def compiled() -> ctypes.CDLL | None:
    """The compiled placers, None without a compiler."""
    return _typed() if load("layout") is not None else None


@functools.cache
def _typed() -> ctypes.CDLL:
    library = load("layout")
    assert library is not None
    problem: list[Any] = [ctypes.c_int, _INT64, _INT64, _INT64]
    library.layout_greedy.argtypes = [*problem, _INT32, ctypes.c_int, ctypes.c_double, _INT64]
    library.layout_greedy.restype = ctypes.c_int64
    limits: list[Any] = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_double]
    library.layout_search.argtypes = [*problem, ctypes.c_int64, *limits, _INT64, _INT64]
    library.layout_search.restype = ctypes.c_int
    return library


def place_in_order(
    arrays: Arrays, order: np.ndarray, tightest: bool, seconds: float = math.inf
) -> tuple[int, np.ndarray] | None:
    """Place in this order, each buffer in the lowest or tightest gap.

    Returns:
        (arena, offsets int64 [n]) in units, None if the deadline came first.
    """
    offsets = np.zeros(len(arrays), dtype=np.int64)
    total = _typed().layout_greedy(
        len(arrays), arrays.lower, arrays.upper, arrays.size, order.astype(np.int32), int(tightest), seconds, offsets
    )
    return (int(total), offsets) if total >= 0 else None


def search_within(
    arrays: Arrays,
    chosen: np.ndarray,
    capacity: int,
    first: int,
    runs: int,
    seconds: float,
    max_nodes: int = _MANY,
) -> tuple[Outcome, np.ndarray, int]:
    """Search for a placement of the chosen buffers within a capacity in units.

    Args:
        chosen: Indices of buffers.
        first: Number of the first run; runs differ in what they try first and how many nodes they visit.
        runs: How many.
        seconds: For all runs together.
        max_nodes: Search nodes of all runs together.

    Returns:
        What came out, offsets int64 [len(chosen)] in units if found, and the nodes visited.
    """
    lower, upper, size = (np.ascontiguousarray(a[chosen]) for a in (arrays.lower, arrays.upper, arrays.size))
    offsets, nodes = np.zeros(len(chosen), dtype=np.int64), np.zeros(1, dtype=np.int64)
    outcome = _typed().layout_search(
        *(len(chosen), lower, upper, size, capacity, first, runs),
        # A dive without a mistake takes at most about a node per buffer.
        *(400 + 2 * len(chosen), max_nodes, max(seconds, 0.0), offsets, nodes),
    )
    return Outcome(outcome), offsets, int(nodes[0])
