"""The ordering problem in the flat arrays of ``native/order_graph.h``, and the compiled solvers on it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from ortgraph.plan.native import load
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.schedule.walk import direct_predecessors

_FOREVER = 1e9  # seconds


class _Rows(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("item", ctypes.c_void_p)]


class _Problem(ctypes.Structure):
    _fields_ = [
        ("operations", ctypes.c_int),
        ("values", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("size", "kept", "producer", "scratch")),
        *((name, _Rows) for name in ("inputs", "outputs", "readers", "before", "behind", "pairs")),
    ]


class CompiledOrder:
    """The compiled solvers for one graph; ``None`` from ``compiled()`` where they cannot be built."""

    def __init__(self, library: ctypes.CDLL, graph: OperationGraph) -> None:
        self._library = library
        self._arrays: list[np.ndarray] = []
        self._count = len(graph.operations)
        operations, values = graph.operations, graph.values
        before = direct_predecessors(graph)
        behind: list[list[int]] = [[] for _ in before]
        for i, sources in enumerate(before):
            for j in sources:
                behind[j].append(i)
        # A kept value never dies, so nothing is written over it.
        pairs = [[v for pair in o.inplace if not values[pair[0]].kept for v in pair] for o in operations]
        self._problem = _Problem(
            self._count,
            len(values),
            self._array([v.size for v in values], np.int64),
            self._array([v.kept for v in values], np.uint8),
            self._array(graph.producer, np.int32),
            self._array([o.scratch for o in operations], np.int64),
            self._rows([o.inputs for o in operations]),
            self._rows([o.outputs for o in operations]),
            self._rows(graph.readers),
            self._rows(before),
            self._rows(behind),
            self._rows(pairs),
        )

    def bound(self, orders: Iterable[Sequence[int]], seconds: float | None) -> tuple[int, bool]:
        """Min-cut bound and whether no term was left out; orders (at least one) prune its candidates."""
        sequences = np.array([list(o) for o in orders], dtype=np.int32)
        complete = ctypes.c_int(0)
        found = self._call(
            "order_bound",
            sequences,
            ctypes.c_int(len(sequences)),
            ctypes.c_double(_limit(seconds)),
            ctypes.byref(complete),
        )
        return found, bool(complete.value)

    def anneal(
        self, orders: Sequence[Sequence[int]], seconds: float | None, bound: int, patience: int, seed: int
    ) -> tuple[list[int], int]:
        """The best order met from ``orders`` on, and its peak; ends at ``bound`` or after so many starts in vain."""
        sequences = np.array([list(o) for o in orders], dtype=np.int32)
        peak = self._call(
            "order_anneal", sequences, ctypes.c_int(len(sequences)), ctypes.c_double(_limit(seconds)), ctypes.c_int64(bound),
            ctypes.c_int(patience), ctypes.c_uint64(seed),
        )  # fmt: skip
        return sequences[0].tolist(), peak

    def sets(
        self, seconds: float | None, width: int, level: int, above: int, memory: int
    ) -> tuple[list[int] | None, int]:
        """Search over sets of executed operations (see ``native/order_sets.h``).

        Args:
            seconds: Wall-clock limit.
            width: Sets kept per number of executed operations; 0 keeps all.
            level: Steps of at most so many bytes are not told apart.
            above: Only orders with a smaller peak are of use.
            memory: Bytes that the search may take.

        Returns:
            An order with a peak below ``above`` and 0; or None and what is then proved: a bound on every order, 0 when
            the search was cut.
        """
        sequence = np.zeros(max(self._count, 1), dtype=np.int32)
        proved = ctypes.c_int64(0)
        peak = self._call(
            "order_sets", sequence, ctypes.c_double(_limit(seconds)), ctypes.c_int(width), ctypes.c_int64(level),
            ctypes.c_int64(above), ctypes.c_int64(memory), ctypes.byref(proved),
        )  # fmt: skip
        return (None, proved.value) if peak < 0 else (sequence.tolist(), 0)

    def _call(self, name: str, sequences: np.ndarray, *arguments: object) -> int:
        function = getattr(self._library, name)
        function.restype = ctypes.c_int64
        return function(ctypes.byref(self._problem), sequences.ctypes.data_as(ctypes.c_void_p), *arguments)

    def _array(self, items: Sequence[int], dtype: type) -> int:
        array: np.ndarray = np.array(items if len(items) else [0], dtype=dtype)
        self._arrays.append(array)  # Keeps the memory alive.
        return array.ctypes.data

    def _rows(self, rows: Sequence[Sequence[int]]) -> _Rows:
        starts = [0, *itertools.accumulate(len(r) for r in rows)]
        return _Rows(self._array(starts, np.int32), self._array([v for r in rows for v in r], np.int32))


def compiled(graph: OperationGraph) -> CompiledOrder | None:
    """The compiled solvers for a graph, None without a compiler."""
    library = load("order")
    return None if library is None else CompiledOrder(library, graph)


def _limit(seconds: float | None) -> float:
    return _FOREVER if seconds is None else max(seconds, 0.0)
