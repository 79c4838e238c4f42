"""Less common functions, and backward halves of edge padding."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_rules_movement import joined, sliced
from ortgraph.capture.torch_rules_reduction import reduced
from ortgraph.capture.torch_translate import Translation

INT64 = ir.DataType.INT64


@rule("var_mean.correction")
def _var_mean(t: Translation, self: ir.Value, dim: Any, correction: Any, keepdim: bool) -> tuple[ir.Value, ir.Value]:
    dtype, dims = t.out_dtype(), t.dims(self)
    axes = [d % len(dims) for d in dim] if dim else list(range(len(dims)))
    error = t.op("Sub", self, reduced(t, "ReduceMean", self, axes, True))
    count: Any = 1
    for axis in axes:
        count = count * dims[axis]
    total = reduced(t, "ReduceSum", t.op("Mul", error, error), axes, keepdim)
    variance = t.op("Div", total, t.tensor(count - (1 if correction is None else correction), dtype))
    return variance, reduced(t, "ReduceMean", self, axes, keepdim)


@rule("copysign.Tensor", "copysign.Scalar")
def _copysign(t: Translation, self: ir.Value, other: Any) -> ir.Value:
    """The sign of a zero is taken as positive."""
    dtype = t.out_dtype()
    size = t.op("Abs", t.cast(self, dtype))
    return t.op("Where", t.op("Less", t.tensor(other, dtype), t.scalar(0, dtype)), t.op("Neg", size), size)


@rule("fmax.default", "fmin.default")
def _fmax(t: Translation, self: ir.Value, other: ir.Value) -> ir.Value:
    assert t.fx is not None
    dtype = t.out_dtype()
    a, b = t.cast(self, dtype), t.cast(other, dtype)
    chosen = t.op("Max" if "fmax" in str(t.fx.target) else "Min", a, b)
    return t.op("Where", t.op("IsNaN", a), b, t.op("Where", t.op("IsNaN", b), a, chosen))


@rule("ldexp.Tensor")
def _ldexp(t: Translation, self: ir.Value, other: ir.Value) -> ir.Value:
    dtype = t.out_dtype()
    return t.op("Mul", t.cast(self, dtype), t.op("Pow", t.scalar(2, dtype), t.cast(other, dtype)))


@rule("tril_indices.default", "triu_indices.default")
def _triangle_indices(t: Translation, row: Any, col: Any, offset: int, **_: Any) -> ir.Value:
    assert t.fx is not None
    if not isinstance(row, int) or not isinstance(col, int):
        raise t.unsupported("indices of a triangle of symbolic size", "keep these dimensions static")
    make = np.triu_indices if "triu" in str(t.fx.target) else np.tril_indices
    dtype = t.out_dtype()
    return t.const(np.stack(make(row, offset, col)).astype(dtype.numpy()), dtype)


@rule("hamming_window.default", "hamming_window.periodic", "hamming_window.periodic_alpha",
      "hamming_window.periodic_alpha_beta", "hann_window.default", "hann_window.periodic")  # fmt: skip
def _window(
    t: Translation, window_length: int, periodic: bool = True, alpha: Any = None, beta: Any = None, **_: Any
) -> ir.Value:
    assert t.fx is not None
    dtype = t.out_dtype()
    if "hamming" in str(t.fx.target):
        made = torch.hamming_window(
            window_length,
            periodic,
            0.54 if alpha is None else alpha,
            0.46 if beta is None else beta,
            dtype=torch.float64,
        )
    else:
        made = torch.hann_window(window_length, periodic, dtype=torch.float64)
    return t.const(made.numpy(), dtype)


# --- scattering with a reduction -----------------------------------------------------------------------------------

_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
_NEUTRAL = {"sum": 0.0, "prod": 1.0, "amax": float("-inf"), "amin": float("inf")}


@rule("scatter_reduce.two")
def _scatter_reduce(
    t: Translation, self: ir.Value, dim: int, index: ir.Value, src: ir.Value, reduce: str, include_self: bool
) -> ir.Value:
    """Places that get something start from the neutral element, unless they count themselves."""
    dtype, dims = t.out_dtype(), t.dims(self)
    if not dims:
        raise t.unsupported("scatter_reduce of a scalar", "give the tensor one dimension")
    wanted = t.dims(index)
    if t.dims(src) != wanted:
        n = len(wanted)
        src = t.op("Slice", src, t.build.ints([0] * n), t.shape_input(wanted), t.build.ints(range(n)))
    kind = "sum" if reduce == "mean" else reduce
    start = self
    if not include_self:
        neutral = t.filled(_NEUTRAL[kind], wanted, dtype)
        start = t.typed(t.op("ScatterElements", self, index, neutral, axis=dim), dtype, dims)
    made = t.op("ScatterElements", start, index, src, axis=dim, reduction=_REDUCTIONS[kind])
    if reduce != "mean":
        return made
    base = t.filled(1 if include_self else 0, dims, dtype)
    count = t.op("ScatterElements", base, index, t.filled(1, wanted, dtype), axis=dim, reduction="add")
    return t.op("Div", made, t.op("Max", count, t.scalar(1, dtype)))


# --- edge padding --------------------------------------------------------------------------------------------------


@rule("replication_pad1d_backward.default", "replication_pad2d_backward.default", "replication_pad3d_backward.default")
def _replication_backward(t: Translation, grad_output: ir.Value, self: ir.Value, padding: Sequence[Any]) -> ir.Value:
    """What was copied from an edge is summed into it, axis by axis."""
    grad, rank = grad_output, len(t.dims(self))
    for i in range(len(padding) // 2):
        grad = _folded(t, grad, rank - 1 - i, t.dims(self)[rank - 1 - i], padding[2 * i], padding[2 * i + 1])
    return grad


def _folded(t: Translation, grad: ir.Value, axis: int, size: Any, before: Any, after: Any) -> ir.Value:
    if not all(isinstance(n, int) for n in (size, before, after)):
        raise t.unsupported("replication padding of a symbolic size", "keep this dimension static")
    dims = list(t.dims(grad))
    dtype = grad.dtype
    assert dtype is not None

    def edge(first: int, last: int) -> ir.Value:
        part = sliced(t, grad, axis, first, last)
        if last - first == 1:
            return part
        summed = t.op("ReduceSum", part, t.build.ints([axis]), keepdims=1)
        return t.typed(summed, dtype, [*dims[:axis], 1, *dims[axis + 1 :]])

    parts: list[ir.Value] = []
    first, last = before, before + size  # of the tensor's own elements in the padded one; cropped where negative
    if first < 0:
        parts.append(t.filled(0, [*dims[:axis], -first, *dims[axis + 1 :]], dtype))
    low, high = max(first, 0), min(last, dims[axis])
    if size == 1:
        return edge(0, dims[axis])
    if first > 0:
        parts.append(edge(0, first + 1))
        low = first + 1
    if last < dims[axis]:
        parts.append(sliced(t, grad, axis, low, last - 1))
        parts.append(edge(last - 1, dims[axis]))
    else:
        parts.append(sliced(t, grad, axis, low, high))
    if last > dims[axis]:
        parts.append(t.filled(0, [*dims[:axis], last - dims[axis], *dims[axis + 1 :]], dtype))
    made = joined(t, [p for p in parts if 0 not in t.dims(p)] if all(p.shape for p in parts) else parts, axis)
    return t.typed(made, dtype, [*dims[:axis], size, *dims[axis + 1 :]])


# --- antialiased resizing ------------------------------------------------------------------------------------------


def _resize_matrices(
    t: Translation, kind: str, sizes: Sequence[Any], out: Sequence[Any], align: bool, scales: Sequence[Any]
) -> list[ir.Value]:
    """Resizing is linear and works axis by axis: PyTorch's own result on unit vectors is [out, size]."""
    if not all(isinstance(d, int) for d in (*sizes, *out)):
        raise t.unsupported("antialiased resizing of a symbolic size", "keep spatial sizes static")
    resize = getattr(torch.ops.aten, f"_upsample_{kind}2d_aa")
    made = []
    for size, count, scale in zip(sizes, out, scales, strict=True):
        unit = torch.eye(int(size), dtype=torch.float64)[None, None]
        made.append(t.const(resize(unit, [int(count), int(size)], align, scale, None)[0, 0].numpy(), t.out_dtype()))
    return made


@rule("_upsample_bilinear2d_aa.default", "_upsample_bicubic2d_aa.default")
def _resized(
    t: Translation, self: ir.Value, output_size: Sequence[Any], align_corners: bool, scales_h: Any, scales_w: Any
) -> ir.Value:
    assert t.fx is not None
    kind = "bicubic" if "bicubic" in str(t.fx.target) else "bilinear"
    rows, columns = _resize_matrices(t, kind, t.dims(self)[-2:], t.out_dims()[-2:], align_corners, (scales_h, scales_w))
    return t.op("MatMul", t.op("MatMul", rows, self), t.transpose(columns, (1, 0)))


@rule("_upsample_bilinear2d_aa_backward.default", "_upsample_bicubic2d_aa_backward.default")
def _resized_backward(
    t: Translation, grad_output: ir.Value, output_size: Sequence[Any], input_size: Sequence[Any], align_corners: bool,
    scales_h: Any, scales_w: Any,
) -> ir.Value:  # fmt: skip
    assert t.fx is not None
    kind = "bicubic" if "bicubic" in str(t.fx.target) else "bilinear"
    rows, columns = _resize_matrices(
        t, kind, t.out_dims()[-2:], t.dims(grad_output)[-2:], align_corners, (scales_h, scales_w)
    )
    return t.op("MatMul", t.op("MatMul", t.transpose(rows, (1, 0)), grad_output), columns)


# --- the gamma function ------------------------------------------------------------------------------------------

_SHIFT = 8  # Stirling's series counts from here on
_WIDE = ir.DataType.DOUBLE


def _mirrored(t: Translation, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Where x is below one half; 1 - x there and x elsewhere; that number moved to where the series holds."""
    low = t.op("Less", x, t.scalar(0.5, _WIDE))
    right = t.op("Where", low, t.op("Sub", t.scalar(1, _WIDE), x), x)
    return low, right, t.op("Add", right, t.scalar(_SHIFT, _WIDE))


def _sine(t: Translation, x: ir.Value, ahead: float = 0.0) -> ir.Value:
    """sin(pi * (x + ahead))"""
    return t.op("Sin", t.op("Mul", t.op("Add", x, t.scalar(ahead, _WIDE)), t.scalar(math.pi, _WIDE)))


def _series(t: Translation, z: ir.Value, terms: Sequence[tuple[float, int]]) -> ir.Value:
    parts = [t.op("Div", t.scalar(c, _WIDE), t.op("Pow", z, t.scalar(p, _WIDE))) for c, p in terms]
    return functools.reduce(lambda a, b: t.op("Add", a, b), parts)


@rule("lgamma.default")
def _lgamma(t: Translation, self: ir.Value) -> ir.Value:
    """Stirling's series at x + 8, less the logarithm of x (x + 1) ... (x + 7); reflected below one half."""
    x = t.cast(self, _WIDE)
    low, right, z = _mirrored(t, x)
    factors = [t.op("Add", right, t.scalar(k, _WIDE)) for k in range(_SHIFT)]
    product = functools.reduce(lambda a, b: t.op("Mul", a, b), factors)
    main = t.op("Mul", t.op("Sub", z, t.scalar(0.5, _WIDE)), t.op("Log", z))
    series = _series(t, z, [(1 / 12, 1), (-1 / 360, 3), (1 / 1260, 5), (-1 / 1680, 7)])
    whole = t.op("Add", t.op("Sub", main, z), t.op("Add", series, t.scalar(math.log(2 * math.pi) / 2, _WIDE)))
    whole = t.op("Sub", whole, t.op("Log", product))
    mirror = t.op("Log", t.op("Div", t.scalar(math.pi, _WIDE), t.op("Abs", _sine(t, x))))
    return t.cast(t.op("Where", low, t.op("Sub", mirror, whole), whole), t.out_dtype())


@rule("digamma.default")
def _digamma(t: Translation, self: ir.Value) -> ir.Value:
    """The derivative of ``lgamma``'s series, less 1/x + ... + 1/(x + 7); reflected below one half."""
    x = t.cast(self, _WIDE)
    low, right, z = _mirrored(t, x)
    steps = [t.op("Reciprocal", t.op("Add", right, t.scalar(k, _WIDE))) for k in range(_SHIFT)]
    series = _series(t, z, [(-1 / 2, 1), (-1 / 12, 2), (1 / 120, 4), (-1 / 252, 6), (1 / 240, 8)])
    whole = t.op("Sub", t.op("Add", t.op("Log", z), series), functools.reduce(lambda a, b: t.op("Add", a, b), steps))
    mirror = t.op("Mul", t.scalar(math.pi, _WIDE), t.op("Div", _sine(t, x, 0.5), _sine(t, x)))
    return t.cast(t.op("Where", low, t.op("Sub", whole, mirror), whole), t.out_dtype())
