"""How right a run is: gradients against float64 and PyTorch float32, parameters after some steps against PyTorch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

FACTOR = 4.0  # of PyTorch's own error
FLOOR = 1e-6  # of the gradient's norm, and of a parameter's root mean square
ZERO = 1e-9  # of the median norm: a gradient below it is zero in exact arithmetic
DOUBTED = 1e-2  # of a gradient's norm: where PyTorch itself is farther from float64 than this, float64 proves nothing
WITHOUT_FLOAT64 = 1e-4  # of the norm, against PyTorch float32


@dataclasses.dataclass(frozen=True)
class Found:
    """The worst of some tensors.

    Attributes:
        error: Of the tensor with the worst error, relative to its norm, tensors that are zero left out.
        share: Largest error over what is allowed; above 1 the run is wrong.
        worst: The tensor with the largest share.
        doubted: Tensors that were compared with PyTorch float32 only.
    """

    error: float
    share: float
    worst: str
    doubted: tuple[str, ...] = ()


def gradients(
    got: Mapping[str, np.ndarray], float32: Mapping[str, np.ndarray], float64: Mapping[str, np.ndarray]
) -> Found:
    """Compare gradients by name. Missing and additional ones count as wrong."""
    if set(got) - set(float32):
        return Found(np.inf, np.inf, f"{sorted(set(got) - set(float32))[0]} has a gradient, in PyTorch it has none")
    norms = {n: _norm(g) for n, g in float64.items()}
    typical = float(np.median(list(norms.values())))
    worst, share, name, doubted = 0.0, -1.0, "", []
    for n, exact in float64.items():
        if n not in got:
            if norms[n] > 0:
                return Found(np.inf, np.inf, f"{n} has no gradient, in PyTorch it has one")
            continue
        zero = norms[n] < ZERO * typical
        error, own = _norm(got[n] - exact), _norm(float32[n] - exact)
        allowed = FACTOR * own + FLOOR * (typical if zero else norms[n])
        if not zero and own > DOUBTED * norms[n]:
            doubted.append(n)
            error, allowed = _norm(got[n] - float32[n]), WITHOUT_FLOAT64 * _norm(float32[n])
        worst = worst if zero else max(worst, error / norms[n])
        part = error / allowed if allowed else (0.0 if error == 0 else np.inf)
        part = np.inf if np.isnan(part) else part
        if part > share:
            share, name = part, n
    return Found(worst, share, name, tuple(doubted))


@dataclasses.dataclass(frozen=True)
class Moved:
    """Parameters and buffers after some steps, as root mean squares over a tensor's elements.

    Attributes:
        difference: Of the tensor with the largest share, from PyTorch's.
        threads: What PyTorch at 1 thread differs there from PyTorch at 2.
        rounding: What PyTorch float32 differs there from PyTorch float64.
        share: Largest difference over what is allowed: ``FACTOR`` times the larger control, plus ``FLOOR``.
        by_threads: Whether everything holds with the control of threads alone.
        worst: The tensor.
    """

    difference: float
    threads: float
    rounding: float
    share: float
    by_threads: bool
    worst: str


def states(
    got: Mapping[str, np.ndarray],
    one: Mapping[str, np.ndarray],
    two: Mapping[str, np.ndarray],
    exact: Mapping[str, np.ndarray],
) -> Moved:
    """Compare states by name with PyTorch's at 1 thread, 2 threads and in float64.

    Adam turns the noise of a zero gradient into whole steps, so PyTorch's own noise is the measure. Models as small as
    these give the same bits at 1 and 2 threads; float32 against float64 shows the noise all the same.
    """
    names = [n for n in one if n in got and one[n].dtype.kind == "f"]
    worst, strict = Moved(0.0, 0.0, 0.0, -1.0, True, ""), True
    for n in names:
        difference, threads, rounding = _rms(got[n] - one[n]), _rms(one[n] - two[n]), _rms(one[n] - exact[n])
        share = difference / (FACTOR * max(threads, rounding) + FLOOR)
        share = np.inf if np.isnan(share) else share
        strict = strict and difference <= FACTOR * threads + FLOOR
        if share > worst.share:
            worst = Moved(difference, threads, rounding, share, True, n)
    return dataclasses.replace(worst, by_threads=bool(strict))


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(array, np.float64)))


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(array, np.float64))))) if array.size else 0.0
