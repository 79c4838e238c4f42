"""Memory budgets: ``60%`` of what the given order needs, or bytes (``30MB``, ``24MiB``, a number).

A budget is for the arena (activations, gradients, temporaries) and the largest scratch of one kernel together.
"""

from __future__ import annotations

import re

from ortgraph.errors import InputError

_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|B|kB|KB|MB|GB|KiB|MiB|GiB)?\s*")
_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def check_budget(budget: str | int) -> str:
    """The budget as text that ``budget_bytes`` takes.

    Raises:
        InputError: It is neither a percentage nor a number of bytes, or not positive.
    """
    budget_bytes(budget, 1)
    return str(budget).replace(" ", "")


def budget_bytes(budget: str | int, peak: int) -> int:
    """Bytes of a budget.

    Args:
        budget: ``"60%"``, ``"30MB"``, ``"24MiB"``, or bytes.
        peak: Activation peak and kernel scratch of the given order: what a percentage is of.

    Raises:
        InputError: See ``check_budget``.
    """
    found = _FORM.fullmatch(str(budget))
    if isinstance(budget, bool) or found is None or float(found[1]) <= 0:
        raise InputError(f"memory budget {budget!r} is not understood", "give 60%, 30MB, 24MiB or a number of bytes")
    number, unit = float(found[1]), found[2]
    if unit == "%":
        return int(peak * number / 100)
    if unit is None and number != int(number):
        raise InputError(f"memory budget {budget!r} is no whole number of bytes", "give 60%, 30MB or 24MiB")
    return int(number * _UNITS[unit or "B"])


def size_text(size: float) -> str:
    """``62.70 MB``: decimal units, as budgets are given."""
    unit, scale = size_unit(size)
    return f"{size / scale:.2f} {unit}" if scale > 1 else f"{size:.0f} B"


def size_unit(size: float) -> tuple[str, int]:
    """(unit, bytes in it) to show a size in."""
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    return next(((unit, scale) for unit, scale in units if abs(size) >= scale), ("B", 1))
