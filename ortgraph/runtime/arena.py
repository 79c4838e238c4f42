"""Memory of a session: one arena for intermediates, and a persistent aligned buffer for every graph input."""

from __future__ import annotations

import math
import weakref

import numpy as np

from ortgraph.plan.memory.problem import ALIGNMENT

POISON = 0xFF  # NaN as a float, -1 as an integer


def aligned_empty(nbytes: int) -> np.ndarray:
    """Uninitialised bytes whose address is a multiple of ALIGNMENT; at least one line, so that there is an address."""
    raw = np.empty(max(nbytes, 1) + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + max(nbytes, 1)]


def aligned_zeros(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A zeroed array at an aligned address."""
    raw = aligned_empty(math.prod(shape) * dtype.itemsize)
    raw.fill(0)
    return as_array(raw, 0, dtype, shape)


def as_array(raw: np.ndarray, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A typed view of bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


class Arena:
    """Bytes that all programs of a session share; one program runs at a time.

    Attributes:
        generation: Counts reallocations: whoever bound addresses of an older generation binds again.
    """

    def __init__(self) -> None:
        self._raw = aligned_empty(0)
        self.generation = 0
        self.nbytes = 0

    def ensure(self, nbytes: int) -> None:
        """Grow to at least ``nbytes``. What was in the arena is lost."""
        if nbytes <= self.nbytes:
            return
        self._raw = aligned_empty(nbytes + ALIGNMENT)  # the last line belongs to nobody: a guard
        self.nbytes = nbytes
        self.generation += 1

    @property
    def address(self) -> int:
        return self._raw.ctypes.data

    @property
    def everything(self) -> np.ndarray:
        """All bytes, and those of the guard behind them."""
        return self._raw

    def view(self, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The value at ``offset``; changes with the next run."""
        return as_array(self._raw, offset, dtype, shape)

    def poison(self) -> None:
        """Overwrite everything, so that a read of memory that no node of this run wrote shows."""
        self._raw.fill(POISON)


class Memory:
    """The arena, the persistent inputs (parameters, buffers, states, scalars) and the batch buffers of a session."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.persistent: dict[str, np.ndarray] = {}
        self._batch: weakref.WeakValueDictionary[tuple[str, str, tuple[int, ...]], np.ndarray] = (
            weakref.WeakValueDictionary()
        )

    def add(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """A zeroed persistent buffer for a graph input."""
        self.persistent[name] = aligned_zeros(dtype, shape)
        return self.persistent[name]

    def batch(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The buffer for a batch input of this shape: shared by programs, freed with the last of them."""
        key = (name, dtype.str, shape)
        found = self._batch.get(key)
        if found is None:
            found = aligned_zeros(dtype, shape)
            self._batch[key] = found
        return found
