"""Learning-rate schedules: functions of the step number (from 0), for ``session.step(batch, learning_rate=...)``."""

from __future__ import annotations

import math
from collections.abc import Callable

from ortgraph.errors import InputError

Schedule = Callable[[int], float]


def constant(lr: float, warmup_steps: int = 0) -> Schedule:
    """``lr``, reached linearly over ``warmup_steps`` (step 0 has rate 0 when there is a warm-up)."""
    return lambda step: lr * _warmup(step, warmup_steps)


def linear(lr: float, total_steps: int, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up to ``lr``, then linear decay to 0 at ``total_steps``.

    Raises:
        InputError: ``total_steps`` does not exceed ``warmup_steps``.
    """
    _check(total_steps, warmup_steps)

    def rate(step: int) -> float:
        if step < warmup_steps:
            return lr * _warmup(step, warmup_steps)
        return lr * max(0.0, (total_steps - step) / (total_steps - warmup_steps))

    return rate


def cosine(lr: float, total_steps: int, warmup_steps: int = 0, minimum: float = 0.0) -> Schedule:
    """Linear warm-up to ``lr``, then half a cosine down to ``minimum`` at ``total_steps``.

    Raises:
        InputError: ``total_steps`` does not exceed ``warmup_steps``.
    """
    _check(total_steps, warmup_steps)

    def rate(step: int) -> float:
        if step < warmup_steps:
            return lr * _warmup(step, warmup_steps)
        share = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return minimum + (lr - minimum) * 0.5 * (1.0 + math.cos(math.pi * share))

    return rate


def polynomial(
    lr: float, total_steps: int, warmup_steps: int = 0, power: float = 1.0, minimum: float = 1e-7
) -> Schedule:
    """Linear warm-up to ``lr``, then ``(lr - minimum) * (1 - share)^power + minimum``, ``minimum`` from ``total_steps`` on.

    Raises:
        InputError: ``total_steps`` does not exceed ``warmup_steps``, or ``minimum`` is not below ``lr``.
    """
    _check(total_steps, warmup_steps)
    if not 0.0 <= minimum < lr:
        raise InputError(f"polynomial schedule from {lr} to {minimum}", "0 <= minimum < lr")

    def rate(step: int) -> float:
        if step < warmup_steps:
            return lr * _warmup(step, warmup_steps)
        share = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return minimum + (lr - minimum) * (1.0 - share) ** power

    return rate


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0


def _check(total_steps: int, warmup_steps: int) -> None:
    if not 0 <= warmup_steps < total_steps:
        raise InputError(
            f"schedule of {total_steps} steps with {warmup_steps} warm-up steps", "total_steps > warmup_steps >= 0"
        )
