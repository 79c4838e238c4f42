"""A placement and how good it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class MemorySolution:
    """Offsets of all buffers of a problem.

    Attributes:
        offsets: Byte offset in the arena, by buffer name.
        arena_bytes: Size of the arena.
        bound: Lower bound on the arena: the max-load, or more where a search proved more.
        solver: Which solver made it.
        seconds: How long that took.
        nodes: Search nodes visited.
    """

    offsets: Mapping[str, int]
    arena_bytes: int
    bound: int
    solver: str
    seconds: float
    nodes: int = 0

    @property
    def gap(self) -> float:
        """Bytes over the bound, as a share of the bound; 0.0 is proven optimal."""
        return (self.arena_bytes - self.bound) / self.bound if self.bound else 0.0
