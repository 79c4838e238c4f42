"""Problems with a known optimum."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ortgraph.plan.memory import Buffer, MemoryProblem


def _cut_rectangle(seed: int, count: int, steps: int = 60, height: int = 512) -> MemoryProblem:
    """A rectangle of time and memory cut into buffers: it can be put together again without waste."""
    rng = random.Random(seed)
    parts = [(0, steps, 0, height)]
    while len(parts) < count:
        lower, upper, low, high = parts.pop(rng.randrange(len(parts)))
        if rng.random() < 0.5 and upper - lower > 1:
            t = rng.randint(lower + 1, upper - 1)
            parts += [(lower, t, low, high), (t, upper, low, high)]
        elif high - low > 1:
            h = rng.randint(low + 1, high - 1)
            parts += [(lower, upper, low, h), (lower, upper, h, high)]
        else:
            parts.append((lower, upper, low, high))
    rng.shuffle(parts)
    return MemoryProblem(tuple(Buffer(f"b{i}", a, b, (d - c) * 64) for i, (a, b, c, d) in enumerate(parts)))


@pytest.fixture
def cut_rectangle() -> Callable[..., MemoryProblem]:
    """(seed, count, steps, height) to a problem with optimum ``64 * height``."""
    return _cut_rectangle
