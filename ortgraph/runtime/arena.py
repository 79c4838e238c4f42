"""Memory of a session: one arena for intermediates, and a persistent aligned buffer for every graph input."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

from ortgraph.plan.memory.problem import ALIGNMENT
from ortgraph.runtime.device import HOST, Buffer, Device, DeviceArray, address_of

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

    Args:
        device: Where they are; their views are to be had on the host only.

    Attributes:
        generation: Counts reallocations: whoever bound addresses of an older generation binds again.
    """

    def __init__(self, device: Device = HOST) -> None:
        self._device = device
        self._memory: Buffer = self._empty(0)
        self.generation = 0
        self.nbytes = 0

    def ensure(self, nbytes: int) -> None:
        """Grow to at least ``nbytes``. What was in the arena is lost."""
        if nbytes <= self.nbytes:
            return
        self._memory = self._empty(nbytes + ALIGNMENT)  # the last line belongs to nobody: a guard
        self.nbytes = nbytes
        self.generation += 1

    def _empty(self, nbytes: int) -> Buffer:
        if self._device.on_host:
            return aligned_empty(nbytes)
        return DeviceArray(np.dtype(np.uint8), (max(nbytes, 1),), self._device)

    @property
    def _raw(self) -> np.ndarray:
        assert isinstance(self._memory, np.ndarray), "the arena is on a device"
        return self._memory

    @property
    def address(self) -> int:
        return address_of(self._memory)

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
    """The arena, the persistent inputs (parameters, buffers, states, scalars) and the batch buffers of a session.

    Args:
        device: Where all of it is. Arrays on a device have the part of NumPy's interface that a session uses.
    """

    def __init__(self, device: Device = HOST) -> None:
        self.device = device
        self.arena = Arena(device)
        self.persistent: dict[str, Any] = {}
        self._batch: weakref.WeakValueDictionary[tuple[str, str, tuple[int, ...]], Any] = weakref.WeakValueDictionary()

    def zeros(self, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
        """A zeroed array that is nobody's yet."""
        if self.device.on_host:
            return aligned_zeros(dtype, shape)
        made = DeviceArray(dtype, shape, self.device)
        made.fill(0)
        return made

    def add(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
        """A zeroed persistent buffer for a graph input."""
        self.persistent[name] = self.zeros(dtype, shape)
        return self.persistent[name]

    def batch(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
        """The buffer for a batch input of this shape: shared by programs, freed with the last of them."""
        key = (name, dtype.str, shape)
        found = self._batch.get(key)
        if found is None:
            found = self.zeros(dtype, shape)
            self._batch[key] = found
        return found
