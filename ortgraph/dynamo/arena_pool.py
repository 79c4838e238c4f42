"""Memory that is lent as PyTorch tensors and comes back when the last of them is gone."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from ortgraph.runtime.arena import aligned_empty

_KEPT = 4  # blocks that wait to be lent again: more are given back to the system
# Smaller results come from PyTorch's allocator: the C library keeps their pages, where a larger one is mapped anew at each
# call, and its pages are cleared by the kernel.
_POOLED = 1 << 20


class Pool:
    """Blocks of one size. A block is in use for as long as a tensor over it lives, in autograd's hands or the user's.

    Args:
        nbytes: Size of a block.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: list[np.ndarray] = []

    def take(self) -> torch.Tensor:
        """A uint8 tensor over a block at an aligned address; its bytes are whatever they were."""
        try:
            block = self._free.pop()
        except IndexError:
            block = aligned_empty(self.nbytes)
        lent = block[:]
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent)

    def _give_back(self, block: np.ndarray) -> None:
        if len(self._free) < _KEPT:
            self._free.append(block)


class Results:
    """Memory for the results of a function that is called again and again: large ones are lent from pools.

    Args:
        types: Shape and dtype of each.
    """

    def __init__(self, types: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._types = tuple(types)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in types]
        self._pools = [Pool(n) if n >= _POOLED else None for n in sizes]

    def take(self) -> list[torch.Tensor]:
        """A tensor for each result, uninitialised."""
        return [
            torch.empty(shape, dtype=dtype) if pool is None else _typed(pool.take(), shape, dtype)
            for (shape, dtype), pool in zip(self._types, self._pools, strict=True)
        ]


def _typed(block: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the block's memory; no view, which users could not write into when a function returns it."""
    return torch.empty(0, dtype=dtype).set_(block.untyped_storage(), 0, shape)  # type: ignore[call-overload]
