"""Memory that is lent as PyTorch tensors and comes back when the last of them is gone."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from ortgraph.runtime.arena import aligned_empty

_KEPT = 4  # blocks that wait to be lent again: more are given back to the system


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
