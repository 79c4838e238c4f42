"""Flat arrays that gradients are views of, so that processes sum a few large arrays and copy nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ortgraph.plan.memory.problem import ALIGNMENT
from ortgraph.runtime.arena import aligned_zeros, as_array

# Large enough that a message's fixed cost does not count; a first one that leaves early; and not more than a few, since
# each may be a session of the runtime.
BUCKET_BYTES = 8 << 20
FIRST_BYTES = 1 << 20
MOST_BUCKETS = 16


class Buckets:
    """Memory of all gradients.

    Args:
        types: Dtype and shape by name; they lie in this order.
        most_bytes: Size of a bucket; a larger array has one by itself. None: 8 MiB, or a sixteenth of all.
        first_bytes: Size of the first one.

    Attributes:
        views: The gradients by name, each at an aligned address.
        flat: The buckets, one-dimensional; what lies between gradients stays zero.
        names: Of the gradients in each of them.
    """

    def __init__(
        self,
        types: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
        most_bytes: int | None = None,
        first_bytes: int = FIRST_BYTES,
    ) -> None:
        if most_bytes is None:
            total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in types.values())
            most_bytes = max(BUCKET_BYTES, total // MOST_BUCKETS)
        groups: list[tuple[np.dtype, list[tuple[str, int]], int]] = []
        latest: dict[np.dtype, int] = {}
        for name, (dtype, shape) in types.items():
            nbytes = -(-max(math.prod(shape), 1) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            at = latest.get(dtype)
            if at is None or groups[at][2] + nbytes > (most_bytes if at else min(first_bytes, most_bytes)):
                at = latest[dtype] = len(groups)
                groups.append((dtype, [], 0))
            _, placed, end = groups[at]
            placed.append((name, end))
            groups[at] = (dtype, placed, end + nbytes)
        self.flat: list[np.ndarray] = []
        self.views: dict[str, np.ndarray] = {}
        self.names = [[name for name, _ in placed] for _, placed, _ in groups]
        for dtype, placed, end in groups:
            flat = aligned_zeros(dtype, (end // dtype.itemsize,))
            self.flat.append(flat)
            raw = flat.view(np.uint8)
            for name, offset in placed:
                self.views[name] = as_array(raw, offset, dtype, types[name][1])

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(f.nbytes for f in self.flat)

    def clear(self) -> None:
        """Set all gradients to zero."""
        for flat in self.flat:
            flat.fill(0)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for flat in self.flat:
            np.multiply(flat, flat.dtype.type(factor), out=flat)
