"""The placement problem: buffers with half-open lifetimes that share one arena."""

from __future__ import annotations

import dataclasses
import itertools

from ortgraph.errors import PlanError

_MOST = 2**62  # bytes of all buffers: offsets are int64
ALIGNMENT = 64  # bytes; a cache line, and the widest vector register


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One block of memory that lives during the steps ``lower <= t < upper``.

    Attributes:
        name: Unique name.
        lower: First step at which it is live.
        upper: First step at which it is dead again; greater than ``lower``.
        size: Bytes before alignment; zero is allowed.
    """

    name: str
    lower: int
    upper: int
    size: int


@dataclasses.dataclass(frozen=True)
class MemoryProblem:
    """Buffers to place, in a fixed order of steps.

    Attributes:
        buffers: All buffers; names are unique.
        alignment: Offsets are multiples of it, sizes are rounded up to it.

    Raises:
        PlanError: A name is used twice, or a lifetime, a size or the alignment is impossible.
    """

    buffers: tuple[Buffer, ...]
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise PlanError(f"an alignment of {self.alignment} bytes is impossible")
        seen: set[str] = set()
        for b in self.buffers:
            if b.name in seen:
                raise PlanError(f"buffer {b.name!r} appears twice", "give every buffer a name of its own")
            if b.lower < 0 or b.upper <= b.lower or b.size < 0:
                raise PlanError(f"buffer {b.name!r}: lifetime [{b.lower}, {b.upper}) of {b.size} bytes is impossible")
            seen.add(b.name)
        total = sum(self.aligned(b) for b in self.buffers)
        if total >= _MOST:
            raise PlanError(f"buffers of {total} bytes together are more than an arena can hold")

    def aligned(self, buffer: Buffer) -> int:
        """Bytes that the buffer occupies."""
        return -(-buffer.size // self.alignment) * self.alignment

    def max_load(self) -> int:
        """The largest sum of live (aligned) sizes: no placement of this order needs fewer bytes."""
        if not self.buffers:
            return 0
        change: dict[int, int] = {}
        for b in self.buffers:
            size = self.aligned(b)
            change[b.lower] = change.get(b.lower, 0) + size
            change[b.upper] = change.get(b.upper, 0) - size
        return max(itertools.accumulate(change[step] for step in sorted(change)))
