"""Planned against measured memory of training steps in the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.memory_rows import Row

if TYPE_CHECKING:
    from bench.memory import Setup


def run(setup: Setup) -> Iterator[Row]:
    raise NotImplementedError("the runtime's figures are not measured yet")
