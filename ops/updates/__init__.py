"""Optimizer updates for callers without ONNX Runtime: a small C library, called on addresses.

The arithmetic is that of the kernels (``ops/kernels/update.h``). Results are the same bits at any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import math
import pathlib
from collections.abc import Callable, Sequence

from ortgraph.errors import RuntimeSetupError
from ortgraph.ops.kernels import library

FLOAT32, FLOAT16, BFLOAT16 = 1, 10, 16  # ONNX element types
_HERE = pathlib.Path(__file__).parent
_HEADERS = ("update.h", "vector.h")


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled library; built at the first call on a machine (a few seconds), then found in the cache.

    Raises:
        RuntimeSetupError: There is no compiler, or compiling failed.
    """
    headers = [_HERE.parent / "kernels" / name for name in _HEADERS]
    made = ctypes.CDLL(str(library.build_library("libortgraph_updates.so", [_HERE / "updates.cpp", *headers])))
    i64, i32, f64 = ctypes.c_int64, ctypes.c_int, ctypes.c_double
    pointers, sizes = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(i64)
    made.ortgraph_adam.argtypes = [
        i64, sizes, pointers, pointers, i32, pointers, pointers, pointers, i32, ctypes.POINTER(f64), f64, f64,
        ctypes.c_float, i32, i32, i32,
    ]  # fmt: skip
    doubles = ctypes.POINTER(f64)
    made.ortgraph_lamb_moments.argtypes = [
        i64, sizes, pointers, pointers, i32, pointers, pointers, doubles, f64, i32, doubles, i32,
    ]  # fmt: skip
    made.ortgraph_lamb_weights.argtypes = [i64, sizes, pointers, pointers, pointers, doubles, f64, i32, doubles, i32]
    made.ortgraph_squares.argtypes = [i64, sizes, pointers, i32, i32, ctypes.POINTER(f64)]
    return made


def adam(
    sizes: Sequence[int],
    weights: Sequence[int],
    gradients: Sequence[int],
    moments: Sequence[int],
    squares: Sequence[int],
    *,
    gradient_type: int = FLOAT32,
    low: Sequence[int] | None = None,
    low_type: int = BFLOAT16,
    lr: float,
    step: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    bias_correction: bool = True,
    threads: int = 1,
) -> None:
    """One Adam step of many tensors, in place.

    Args:
        sizes: Elements of each tensor; all memory is contiguous.
        weights: Addresses of float32 weights.
        gradients: Addresses of gradients of ``gradient_type``; only read.
        moments: Addresses of float32 first moments.
        squares: Addresses of float32 second moments.
        gradient_type: FLOAT32, FLOAT16 or BFLOAT16.
        low: Addresses that get the new weights rounded to ``low_type``.
        low_type: FLOAT16 or BFLOAT16.
        lr, step, betas, eps, weight_decay: As of AdamW; ``step`` counts from 1.
        grad_scale: Multiplied into the gradient.
        decoupled: Weights decay by themselves (AdamW); otherwise decay is a part of the gradient (Adam).
        bias_correction: Divide moments by ``1 - beta^step``.
        threads: Threads at most.
    """
    values = (ctypes.c_double * 4)(*betas, eps, weight_decay)
    failed = load().ortgraph_adam(
        len(sizes), _sizes(sizes), _pointers(weights), _pointers(gradients), gradient_type, _pointers(moments),
        _pointers(squares), None if low is None else _pointers(low), low_type, values, lr, step, grad_scale,
        int(not decoupled), int(bias_correction), threads,
    )  # fmt: skip
    _check(failed)


def lamb(
    sizes: Sequence[int],
    weights: Sequence[int],
    gradients: Sequence[int],
    moments: Sequence[int],
    squares: Sequence[int],
    *,
    gradient_type: int = FLOAT32,
    step: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    rate: Callable[[float, float], float],
    threads: int = 1,
) -> None:
    """One LAMB step of many tensors, in place.

    Args:
        sizes, weights, gradients, moments, squares, gradient_type: As of ``adam``.
        step, betas, eps, weight_decay, bias_correction: As of LAMB; ``step`` counts from 1.
        rate: Learning rate times trust ratio of a tensor, from the norms of its weights and of its direction.
        threads: Threads at most.
    """
    count, values = len(sizes), (ctypes.c_double * 4)(*betas, eps, weight_decay)
    n, w, m, v = _sizes(sizes), _pointers(weights), _pointers(moments), _pointers(squares)
    totals = (ctypes.c_double * (2 * count))()
    common = (values, step, int(bias_correction))
    _check(
        load().ortgraph_lamb_moments(count, n, w, _pointers(gradients), gradient_type, m, v, *common, totals, threads)
    )
    norms = [math.sqrt(total) if total >= 0 else math.nan for total in totals]
    rates = (ctypes.c_double * count)(*(rate(norms[2 * t], norms[2 * t + 1]) for t in range(count)))
    _check(load().ortgraph_lamb_weights(count, n, w, m, v, *common, rates, threads))


def squared_norm(sizes: Sequence[int], tensors: Sequence[int], element_type: int, threads: int = 1) -> float:
    """The sum of the squares of all elements; infinite or NaN when an element is."""
    result = ctypes.c_double()
    _check(
        load().ortgraph_squares(
            len(sizes), _sizes(sizes), _pointers(tensors), element_type, threads, ctypes.byref(result)
        )
    )
    return result.value


def _sizes(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _pointers(values: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(values))(*values)


def _check(failed: int) -> None:
    if failed:
        raise RuntimeSetupError("an optimizer update could not start", "free memory, or use torch.optim.AdamW")
