"""Integer and linear programs in SciPy's HiGHS, which prints lines of its own debugging now and then."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ortgraph.errors import RuntimeSetupError

_lock = threading.Lock()


def solve_program(
    cost: np.ndarray,
    entries: tuple[np.ndarray, np.ndarray, np.ndarray],
    rows: tuple[np.ndarray, np.ndarray],
    variables: tuple[np.ndarray, np.ndarray],
    integral: np.ndarray | None,
    seconds: float,
    gap: float = 0.0,
) -> Any:
    """Minimize ``cost @ x`` with ``low <= A x <= high``.

    Args:
        cost: float64 [variables].
        entries: (row, column, factor) of A.
        rows: Limits of the rows.
        variables: Limits of the variables.
        integral: 1 for variables in integers; None for a linear program.
        seconds: Time limit.
        gap: Relative gap that counts as optimal.

    Returns:
        SciPy's result (``status``, ``x``, ``fun``, ``mip_dual_bound``).

    Raises:
        RuntimeSetupError: SciPy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise RuntimeSetupError("programs in integers need SciPy", "pip install scipy") from error
    where, columns, factors = entries
    matrix = coo_array((factors, (where, columns)), shape=(len(rows[0]), len(cost))).tocsc()
    with _without_output():
        return milp(
            cost,
            integrality=integral,
            bounds=Bounds(*variables),
            constraints=LinearConstraint(matrix, *rows),
            options={"time_limit": max(seconds, 0.01), "mip_rel_gap": gap},
        )


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """What C code prints to standard output is dropped."""
    with _lock:
        sys.stdout.flush()
        try:
            saved = os.dup(1)
        except OSError:  # there is no standard output
            yield
            return
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
