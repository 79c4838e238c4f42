"""Time and memory of the processes of one training, as a table."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RankRow:
    """One process.

    Attributes:
        rank: Its number.
        step_seconds: Median of the latest steps.
        sum_seconds: Of those, waiting for the others and summing gradients.
        arena, parameters, states, buckets: Bytes; buckets are the gradients.
        peak: Largest resident bytes of the process so far, compiling included.
    """

    rank: int
    step_seconds: float
    sum_seconds: float
    arena: int
    parameters: int
    states: int
    buckets: int
    peak: int


@dataclasses.dataclass(frozen=True)
class RankReport:
    """All processes, by rank."""

    rows: tuple[RankRow, ...]

    def __str__(self) -> str:
        names = ("step ms", "sum ms", "arena MB", "params MB", "states MB", "grads MB", "peak MB")
        lines = [f"{'rank':>4}" + "".join(f"{n:>11}" for n in names)]
        for r in self.rows:
            sizes = (r.arena, r.parameters, r.states, r.buckets, r.peak)
            cells = (r.step_seconds * 1e3, r.sum_seconds * 1e3, *(n / 1e6 for n in sizes))
            lines.append(f"{r.rank:4}" + "".join(f"{c:11.2f}" for c in cells))
        return "\n".join(lines)
