"""Memory that is lent as PyTorch tensors and comes back when the last of them is gone.

All graphs of a process share it: the graphs of several shapes, of evaluation, or of a model that PyTorch traces twice do not
run at the same time, so they need the memory of one.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from ortgraph.runtime.arena import aligned_empty

_ARENAS = 2  # arenas that wait to be lent again: more are given back to the system
# Smaller results come from PyTorch's allocator: the C library keeps their pages, where a larger one is mapped anew at each
# call, and its pages are cleared by the kernel.
_POOLED = 1 << 20


class Pool:
    """Blocks of memory. A block is in use for as long as a tensor over it lives, in autograd's hands or the user's.

    Args:
        kept: Blocks that wait to be lent again at most.

    Attributes:
        lent: Blocks in use.
    """

    def __init__(self, kept: int) -> None:
        self.kept, self.lent = kept, 0
        self._free: list[np.ndarray] = []
        self._lock = threading.RLock()  # why: a block may come back within ``take``, by the garbage collector

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over a block at an aligned address; its bytes are whatever they were."""
        with self._lock:
            fitting = [b for b in self._free if b.nbytes >= nbytes]
            block = min(fitting, key=lambda b: b.nbytes, default=None)
            if block is None:
                self._free.clear()  # the new block serves whoever would have taken these
            else:
                self._free = [b for b in self._free if b is not block]
            self.lent += 1
        if block is None:
            block = aligned_empty(nbytes)
        lent = block[:nbytes]
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent)

    def _give_back(self, block: np.ndarray) -> None:
        with self._lock:
            self.lent -= 1
            if len(self._free) < self.kept:
                self._free.append(block)


arenas = Pool(_ARENAS)
_by_size: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()


class Results:
    """Memory for the results of a function that is called again and again: large ones are lent from pools.

    Args:
        types: Shape and dtype of each.
    """

    def __init__(self, types: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._types = tuple(types)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in types]
        counts = Counter(n for n in sizes if n >= _POOLED)
        pools = {n: _by_size.setdefault(n, Pool(0)) for n in counts}
        for n, pool in pools.items():
            pool.kept = max(pool.kept, counts[n])
        self._pools = [(n, pools.get(n)) for n in sizes]

    def take(self) -> list[torch.Tensor]:
        """A tensor for each result, uninitialised."""
        return [
            torch.empty(shape, dtype=dtype) if pool is None else typed(pool.take(n), shape, dtype)
            for (shape, dtype), (n, pool) in zip(self._types, self._pools, strict=True)
        ]


def typed(block: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """A tensor over a block's memory from a byte on; no view, which users could not write into when a function returns it."""
    storage = block.untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload]
