"""Loss scaling: the backward half runs on a multiple of the loss, so that small gradients do not vanish in float16."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from ortgraph.errors import InputError

_NUMBER = r"\d+\.?\d*(?:[eE][-+]?\d+)?"


@dataclasses.dataclass(frozen=True)
class LossScale:
    """A loss scale, fixed or adapted to what overflows (Micikevicius et al. 2018; as ``torch.amp.GradScaler``).

    A step with a gradient that is infinite or NaN is skipped: weights, moments and the step counter stay as they are.
    With ``dynamic`` the scale is then multiplied by ``backoff``; after ``interval`` steps in a row without overflow it
    is multiplied by ``growth``.

    Attributes:
        initial: The scale at the start; a power of two loses no digits.
        dynamic: Whether the scale is adapted.
        growth: Factor after ``interval`` good steps.
        backoff: Factor after an overflow.
        interval: Good steps in a row before the scale grows.
        minimum: The scale does not go below.
        maximum: The scale does not go above.

    Raises:
        InputError: A value is out of range.
    """

    initial: float = 65536.0
    dynamic: bool = True
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 2.0**-14
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("initial", "growth", "backoff", "minimum", "maximum"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if not 0.0 < self.initial < math.inf:
            raise InputError(f"loss scale {self.initial}", "a positive number")
        if not (self.growth >= 1.0 and 0.0 < self.backoff <= 1.0 and self.interval >= 1):
            what = f"loss scale with growth={self.growth}, backoff={self.backoff}, interval={self.interval}"
            raise InputError(what, "growth at least 1, backoff in (0, 1], interval at least 1")
        if self.dynamic and not 0.0 < self.minimum <= self.initial <= self.maximum < 2.0**127:
            what = f"loss scale {self.initial} outside {self.minimum} to {self.maximum}"
            raise InputError(what, "0 < minimum <= initial <= maximum < 2**127")

    @staticmethod
    def of(value: Any) -> LossScale | None:
        """``"dynamic"``, a number, a LossScale or None."""
        if value is None or isinstance(value, LossScale):
            return value
        if isinstance(value, str):
            return LossScale.parse(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"loss_scale={value!r}", '"dynamic", a number, a LossScale, or None')
        return LossScale(float(value), dynamic=False)

    def __str__(self) -> str:
        """``dynamic``, ``dynamic:INITIAL:GROWTH:BACKOFF:INTERVAL:MINIMUM:MAXIMUM``, or the number of a fixed scale."""
        if not self.dynamic:
            return str(self.initial)
        values = (self.initial, self.growth, self.backoff, self.interval, self.minimum, self.maximum)
        return "dynamic" if self == LossScale() else ":".join(map(str, ("dynamic", *values)))

    @staticmethod
    def parse(text: str) -> LossScale:
        """What ``str`` wrote; further parts of ``dynamic:...`` may be left out. Raises InputError for anything else."""
        first, *rest = text.strip().split(":")
        fixed = first != "dynamic"
        numbers = [first] if fixed else rest
        if (fixed and rest) or len(rest) > 6 or not all(re.fullmatch(_NUMBER, n) for n in numbers):
            raise InputError(
                f"loss_scale {text!r} does not parse", "dynamic, dynamic:65536:2:0.5:2000, or a number such as 1024"
            )
        if fixed:
            return LossScale(float(first), dynamic=False)
        names = ("initial", "growth", "backoff", "interval", "minimum", "maximum")
        values: dict[str, Any] = dict(zip(names, map(float, numbers), strict=False))
        if "interval" in values:
            values["interval"] = int(values["interval"])
        return LossScale(**values)
