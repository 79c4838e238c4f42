"""The compiled search on sequences (ortgraph/plan/native/recompute.cpp)."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from ortgraph.errors import PlanError
from ortgraph.plan.native import load
from ortgraph.plan.operations import OperationGraph

_LONGEST = 4  # steps of an eviction pass by length of its order; where it repeats more it helps nobody
_EXACT = 2**49  # the search keeps bytes in doubles, with an offset of 2^50


class _Graph(ctypes.Structure):
    _fields_ = [
        ("operations", ctypes.c_int32),
        ("values", ctypes.c_int32),
        *[
            (name, ctypes.c_void_p)
            for name in (
                "cost", "scratch", "repeatable", "input_start", "inputs", "output_start", "outputs", "after_start", "after",
                "follower_start", "followers", "inplace_start", "inplace", "size", "kept", "producer",
            )
        ],
    ]  # fmt: skip


class _Options(ctypes.Structure):
    _fields_ = [
        ("budget", ctypes.c_double),
        ("iterations", ctypes.c_double),
        ("hot", ctypes.c_double),
        ("cold", ctypes.c_double),
        ("seconds", ctypes.c_double),
        ("seed", ctypes.c_int64),
        ("reorder", ctypes.c_int32),
        ("stages", ctypes.c_int32),
    ]


class _Result(ctypes.Structure):
    _fields_ = [
        ("cost", ctypes.c_double),
        ("excess", ctypes.c_double),
        ("accepted", ctypes.c_int64),
        ("length", ctypes.c_int32),
    ]


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long and how hot to anneal.

    Attributes:
        iterations: Moves proposed.
        hot: First temperature, in mean costs of an operation.
        cold: Last temperature.
        seed: Of the random moves.
        seconds: Wall time after which the best so far is returned.
    """

    iterations: float
    hot: float
    cold: float
    seed: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Improved:
    """What a search made of a sequence.

    Attributes:
        steps: The sequence.
        within: Whether the search counts it as within the budget; the simulator then does, too.
    """

    steps: list[int]
    within: bool


def compiled(graph: OperationGraph) -> NativeSearch | None:
    """The compiled search on a graph, None where there is no compiler."""
    library = load("recompute")
    return NativeSearch(graph, library) if library is not None else None


class NativeSearch:
    """A graph in the arrays that the compiled search reads.

    Raises:
        PlanError: The values are too large together (2^49 bytes).
    """

    def __init__(self, graph: OperationGraph, library: ctypes.CDLL) -> None:
        if sum(v.size for v in graph.values) + max((o.scratch for o in graph.operations), default=0) >= _EXACT:
            raise PlanError("the values of the graph take more than 2^49 bytes together", "give sizes in a larger unit")
        followers: list[list[int]] = [[] for _ in graph.operations]
        for i, operation in enumerate(graph.operations):
            for j in operation.after:
                followers[j].append(i)
        ops = graph.operations
        self._arrays: list[np.ndarray] = [
            np.array([o.cost for o in ops], np.float64),
            np.array([o.scratch for o in ops], np.float64),
            np.array([o.recompute for o in ops], np.uint8),
            *_lists(o.inputs for o in ops),
            *_lists(o.outputs for o in ops),
            *_lists(o.after for o in ops),
            *_lists(followers),
            *_lists([v for pair in o.inplace for v in pair] for o in ops),
            np.array([v.size for v in graph.values], np.float64),
            np.array([v.kept for v in graph.values], np.uint8),
            np.array(graph.producer, np.int32),
        ]
        self._graph = _Graph(len(ops), len(graph.values), *[a.ctypes.data for a in self._arrays])
        self._library = library

    def greedy(self, steps: Sequence[int], budget: int, reorder: bool, seconds: float, stages: int = 1) -> Improved:
        """Relieves the peak of a sequence until it meets the budget or nothing helps."""
        return self._improve(steps, budget, reorder, Effort(0, 1.0, 1.0, 0, seconds), stages)

    def anneal(self, steps: Sequence[int], budget: int, reorder: bool, effort: Effort) -> Improved:
        """The best sequence within the budget that annealing met, its last state where none was."""
        return self._improve(steps, budget, reorder, effort, 0)

    def evict(self, order: Sequence[int], budget: int, patience: float, seconds: float) -> list[int] | None:
        """One pass over an order that drops values when bytes are short; None where that repeats too much
        or takes too long."""
        given = np.array(order, np.int32)
        capacity = _LONGEST * len(given)
        found = np.empty(capacity, np.int32)
        length = self._library.recompute_evict(
            ctypes.byref(self._graph),
            ctypes.c_double(budget),
            ctypes.c_double(patience),
            ctypes.c_double(seconds),
            ctypes.c_void_p(given.ctypes.data),
            len(given),
            ctypes.c_void_p(found.ctypes.data),
            capacity,
        )
        return found[:length].tolist() if length >= 0 else None

    def _improve(self, steps: Sequence[int], budget: int, reorder: bool, effort: Effort, stages: int) -> Improved:
        given = np.array(steps, np.int32)
        options = _Options(
            budget, effort.iterations, effort.hot, effort.cold, effort.seconds, effort.seed, reorder, stages
        )
        capacity = 16 * self._graph.operations + len(given)
        found = np.empty(capacity, np.int32)
        result = _Result()
        failed = self._library.recompute_improve(
            ctypes.byref(self._graph),
            ctypes.byref(options),
            ctypes.c_void_p(given.ctypes.data),
            len(given),
            ctypes.c_void_p(found.ctypes.data),
            capacity,
            ctypes.byref(result),
        )
        if failed:
            raise PlanError(f"the search returned {result.length} steps, more than {capacity}")
        return Improved(found[: result.length].tolist(), result.excess <= 0)


def _lists(lists: Iterable[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    every = [list(one) for one in lists]
    start = np.zeros(len(every) + 1, np.int32)
    np.cumsum([len(one) for one in every], out=start[1:])
    flat = [x for one in every for x in one] or [0]
    return start, np.array(flat, np.int32)
