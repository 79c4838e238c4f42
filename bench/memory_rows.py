"""Rows of the memory benchmark: one figure each, with its bound and what it has to reach."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Iterable, Iterator

COLUMNS = ("suite", "instance", "setting", "value", "bound", "target", "met", "seconds")


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        suite: layout, order, recompute, pytorch, runtime, lowering or scale.
        instance: File, model or group of them.
        setting: What was asked, with the unit of the value.
        value: What came out; None where there was no result.
        bound: What nothing can beat, in the same unit; None where no bound is known.
        target: What has to be reached; None where nothing was set.
        met: Whether it was; None without a target.
        seconds: Wall time spent on it.
    """

    suite: str
    instance: str
    setting: str
    value: float | None
    bound: float | None
    target: float | None
    met: bool | None
    seconds: float


def row(
    suite: str,
    instance: str,
    setting: str,
    value: float | None,
    *,
    bound: float | None = None,
    at_most: float | None = None,
    at_least: float | None = None,
    also: bool = True,
    seconds: float = 0.0,
) -> Row:
    """A row whose value has to be at most, or at least, its target.

    Args:
        also: A further condition on meeting the target (a time limit).
    """
    target = at_most if at_most is not None else at_least
    met = None
    if target is not None:
        slack = 1e-9 * max(1.0, abs(target))
        reached = value is not None and (value <= target + slack if at_most is not None else value >= target - slack)
        met = bool(reached and also)
    return Row(suite, instance, setting, _plain(value), _plain(bound), _plain(target), met, round(seconds, 3))


def _plain(number: float | None) -> float | None:
    """Numbers of Python's own, which JSON knows; whole ones as int, infinite ones as None."""
    if number is None or not math.isfinite(number):
        return None
    number = float(number)
    return int(number) if number.is_integer() else number


class Stopwatch:
    """Wall and processor seconds of a block."""

    wall = 0.0
    cpu = 0.0


@contextlib.contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    watch, wall, cpu = Stopwatch(), time.perf_counter(), time.process_time()
    try:
        yield watch
    finally:
        watch.wall, watch.cpu = time.perf_counter() - wall, time.process_time() - cpu


def write_json(rows: Iterable[Row], path: pathlib.Path) -> None:
    """A list of objects with the keys of ``COLUMNS``."""
    path.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1, allow_nan=False) + "\n", "utf-8")


def text(number: float | None) -> str:
    if number is None:
        return "-"
    if isinstance(number, int) or number.is_integer():
        return f"{int(number):,}"
    return f"{number:.5g}" if abs(number) < 1e5 else f"{number:,.0f}"


def summary(rows: Iterable[Row]) -> str:
    """How many targets were met, and which were not."""
    judged = [r for r in rows if r.met is not None]
    short = [r for r in judged if not r.met]
    line = f"{len(judged) - len(short)} of {len(judged)} targets met"
    return line + "".join(f"\n  short: {r.suite} {r.instance}, {r.setting}: {text(r.value)}" for r in short)
