"""Views, slices, joins and their backward halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy

from ortgraph.capture.torch_dims import Dim
from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation

_END = 2**63 - 1


@rule("view.default", "_unsafe_view.default", "reshape.default", "view_copy.default", "_reshape_copy.default")
def _view(t: Translation, self: ir.Value, **_: Any) -> ir.Value:
    return t.reshape(self, t.out_dims())


@rule("unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims")
def _reshaped(t: Translation, self: ir.Value, **_: Any) -> ir.Value:
    return t.reshape(self, t.out_dims())


@rule("expand.default")
def _expand(t: Translation, self: ir.Value, **_: Any) -> ir.Value:
    return t.expand(self, t.out_dims())


@rule("t.default")
def _t(t: Translation, self: ir.Value) -> ir.Value:
    return t.transpose(self, range(len(t.dims(self)))[::-1])


@rule("transpose.int")
def _transpose(t: Translation, self: ir.Value, dim0: int, dim1: int) -> ir.Value:
    perm = list(range(len(t.dims(self))))
    if perm:
        perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return t.transpose(self, perm)


@rule("permute.default")
def _permute(t: Translation, self: ir.Value, dims: Sequence[int]) -> ir.Value:
    rank = len(dims)
    return t.transpose(self, [d % rank for d in dims])


def sliced(t: Translation, value: ir.Value, axis: int, start: Dim, end: Dim, step: int = 1) -> ir.Value:
    """``value[start:end:step]`` along an axis; sizes may be symbolic."""
    if start == 0 and step == 1 and (end == t.dims(value)[axis] or end == _END):
        return value
    inputs = [t.size(start), t.size(end), t.build.ints([axis])]
    if step != 1:
        inputs.append(t.build.ints([step]))
    return t.op("Slice", value, *inputs)


def _bound(bound: Any, size: Dim, default: Dim) -> Dim:
    if bound is None or (isinstance(bound, int) and bound >= _END):
        return default
    negative = bound < 0 if isinstance(bound, int) else bound.is_negative
    bound = size + bound if negative else bound
    if isinstance(bound, int) and isinstance(size, int):
        return max(0, min(bound, size))
    return bound


@rule("slice.Tensor")
def _slice(t: Translation, self: ir.Value, dim: int, start: Any, end: Any, step: int) -> ir.Value:
    dims = t.dims(self)
    axis = dim % len(dims)
    first, last = _bound(start, dims[axis], 0), _bound(end, dims[axis], dims[axis])
    return sliced(t, self, axis, first, last, step)


@rule("select.int")
def _select(t: Translation, self: ir.Value, dim: int, index: Any) -> ir.Value:
    axis = dim % len(t.dims(self))
    at = t.scalar(index, ir.DataType.INT64) if isinstance(index, int) else t.tensor(index, ir.DataType.INT64)
    return t.op("Gather", self, at, axis=axis)


def padded(t: Translation, value: ir.Value, axis: int, before: Dim, after: Dim) -> ir.Value:
    """``value`` with zeros before and after along one axis; sizes may be symbolic."""
    if before == 0 and after == 0:
        return value
    rank = len(t.dims(value))
    pads: list[Dim] = [0] * (2 * rank)
    pads[axis], pads[rank + axis] = before, after
    return t.op("Pad", value, t.shape_input(pads))


@rule("slice_backward.default")
def _slice_backward(
    t: Translation, grad_output: ir.Value, input_sizes: Sequence[Dim], dim: int, start: Any, end: Any, step: int
) -> ir.Value:
    axis = dim % len(input_sizes)
    size = input_sizes[axis]
    first = _bound(start, size, 0)
    count = t.dims(grad_output)[axis]
    grad = grad_output
    if step != 1:
        grad = _dilated(t, grad, axis, step)
        count = (count - 1) * step + 1
    return t.typed(padded(t, grad, axis, first, size - first - count), t.out_dtype(), t.out_dims())


def _dilated(t: Translation, value: ir.Value, axis: int, step: int) -> ir.Value:
    """``value`` with ``step - 1`` zeros between elements along an axis."""
    dims = list(t.dims(value))
    wide = padded(t, t.reshape(value, [*dims[: axis + 1], 1, *dims[axis + 1 :]]), axis + 1, 0, step - 1)
    flat = t.reshape(wide, [*dims[:axis], dims[axis] * step, *dims[axis + 1 :]])
    return sliced(t, flat, axis, 0, (dims[axis] - 1) * step + 1)


@rule("select_backward.default")
def _select_backward(
    t: Translation, grad_output: ir.Value, input_sizes: Sequence[Dim], dim: int, index: Any
) -> ir.Value:
    axis = dim % len(input_sizes)
    size = input_sizes[axis]
    at = size + index if isinstance(index, int) and index < 0 else index
    dims = list(t.dims(grad_output))
    grad = t.reshape(grad_output, [*dims[:axis], 1, *dims[axis:]])
    return padded(t, grad, axis, at, size - at - 1)


@rule("slice_scatter.default")
def _slice_scatter(
    t: Translation, self: ir.Value, src: ir.Value, dim: int, start: Any, end: Any, step: int
) -> ir.Value:
    dims = t.dims(self)
    axis = dim % len(dims)
    first, last = _bound(start, dims[axis], 0), _bound(end, dims[axis], dims[axis])
    if step != 1:
        return _strided_scatter(t, self, src, axis, (first, last, step))
    before = [] if first == 0 else [sliced(t, self, axis, 0, first)]
    after = [] if last == dims[axis] else [sliced(t, self, axis, last, dims[axis])]
    return joined(t, [*before, src, *after], axis)


def _strided_scatter(
    t: Translation, value: ir.Value, src: ir.Value, axis: int, bounds: tuple[Dim, Dim, int]
) -> ir.Value:
    """The source with gaps between its elements, chosen by a constant mask."""
    dims, (first, last, step) = t.dims(value), bounds
    size = dims[axis]
    if not all(isinstance(d, int) for d in (size, first, last)):
        raise t.unsupported("writing every n-th element of a symbolic dimension", "keep this dimension static")
    taken = range(int(first), int(last), step)
    if not taken:
        return value
    wide = _dilated(t, src, axis, step)
    assert src.dtype is not None
    wide = t.typed(wide, src.dtype, [*dims[:axis], taken[-1] - taken[0] + 1, *dims[axis + 1 :]])
    wide = padded(t, wide, axis, taken[0], int(size) - taken[-1] - 1)
    mask = np.zeros([int(size), *[1] * (len(dims) - axis - 1)], bool)
    mask[list(taken)] = True
    return t.op("Where", t.const(mask), t.typed(wide, src.dtype, dims), value)


@rule("select_scatter.default")
def _select_scatter(t: Translation, self: ir.Value, src: ir.Value, dim: int, index: Any) -> ir.Value:
    dims = t.dims(self)
    axis = dim % len(dims)
    at = index + dims[axis] if isinstance(index, int) and index < 0 else index
    row = t.reshape(src, [*dims[:axis], 1, *dims[axis + 1 :]])
    before = [] if at == 0 else [sliced(t, self, axis, 0, at)]
    after = [] if at + 1 == dims[axis] else [sliced(t, self, axis, at + 1, dims[axis])]
    return joined(t, [*before, row, *after], axis)


def joined(t: Translation, parts: Sequence[ir.Value], axis: int) -> ir.Value:
    return parts[0] if len(parts) == 1 else t.op("Concat", *parts, axis=axis)


@rule("cat.default")
def _cat(t: Translation, tensors: Sequence[ir.Value], dim: int) -> ir.Value:
    dtype = t.out_dtype()
    parts = [t.cast(v, dtype) for v in tensors if t.dims(v) != (0,)]
    return joined(t, parts, dim % len(t.out_dims()))


@rule("stack.default")
def _stack(t: Translation, tensors: Sequence[ir.Value], dim: int) -> ir.Value:
    dtype, out = t.out_dtype(), t.out_dims()
    axis = dim % len(out)
    rows = [t.reshape(t.cast(v, dtype), [*out[:axis], 1, *out[axis + 1 :]]) for v in tensors]
    return joined(t, rows, axis)


@rule("split_with_sizes.default", "split.Tensor", "chunk.default", "split_with_sizes_copy.default")
def _split(t: Translation, self: ir.Value, dim: int, **_: Any) -> Sequence[ir.Value]:
    axis = dim % len(t.dims(self))
    assert t.fx is not None
    sizes = [t.dims_of(fake)[axis] for fake in t.fx.meta["val"]]
    if len(sizes) == 1:
        return [self]
    return t.multi("Split", self, t.shape_input(sizes), outputs=len(sizes), axis=axis)


@rule("unbind.int")
def _unbind(t: Translation, self: ir.Value, dim: int) -> Sequence[ir.Value]:
    axis = dim % len(t.dims(self))
    assert t.fx is not None
    return [t.op("Gather", self, t.scalar(i, ir.DataType.INT64), axis=axis) for i in range(len(t.fx.meta["val"]))]


@rule("repeat.default")
def _repeat(t: Translation, self: ir.Value, repeats: Sequence[Dim]) -> ir.Value:
    dims = t.dims(self)
    wide = t.reshape(self, [*([1] * (len(repeats) - len(dims))), *dims])
    if all(r == 1 for r in repeats):
        return wide
    return t.op("Tile", wide, t.shape_input(repeats))


@rule("flip.default")
def _flip(t: Translation, self: ir.Value, dims: Sequence[int]) -> ir.Value:
    axes = [d % len(t.dims(self)) for d in dims]
    if not axes:
        return self
    n = len(axes)
    return t.op(
        "Slice", self, t.build.ints([-1] * n), t.build.ints([-_END] * n), t.build.ints(axes), t.build.ints([-1] * n)
    )


@rule("roll.default")
def _roll(t: Translation, self: ir.Value, shifts: Sequence[int], dims: Sequence[int]) -> ir.Value:
    shape = t.dims(self)
    if not dims:
        total: Dim = 1
        for d in shape:
            total = total * d
        flat = t.reshape(self, [total])
        return t.reshape(_rolled(t, flat, 0, shifts[0]), shape)
    value = self
    for shift, dim in zip(shifts, dims, strict=True):
        value = _rolled(t, value, dim % len(shape), shift)
    return value


def _rolled(t: Translation, value: ir.Value, axis: int, shift: int) -> ir.Value:
    size = t.dims(value)[axis]
    if isinstance(size, sympy.Basic):
        raise t.unsupported("roll along a symbolic dimension", "keep this dimension static")
    cut = (-shift) % size if size else 0
    if cut == 0:
        return value
    dims = t.dims(value)
    assert value.dtype is not None
    rolled = joined(t, [sliced(t, value, axis, cut, size), sliced(t, value, axis, 0, cut)], axis)
    return t.typed(rolled, value.dtype, dims)


@rule("constant_pad_nd.default")
def _constant_pad(t: Translation, self: ir.Value, pad: Sequence[Dim], value: Any) -> ir.Value:
    rank = len(t.dims(self))
    before: list[Dim] = [0] * rank
    after: list[Dim] = [0] * rank
    for i in range(len(pad) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    if all(p == 0 for p in (*before, *after)):
        return self
    return t.op("Pad", self, t.shape_input([*before, *after]), t.scalar(value, t.out_dtype()))


@rule("tril.default", "triu.default")
def _triangle(t: Translation, self: ir.Value, diagonal: int) -> ir.Value:
    assert t.fx is not None
    upper = "triu" in str(t.fx.target)
    dtype = t.out_dtype()
    # ONNX Runtime 1.19 has Trilu for float, double, int64 and bool only
    held = t.cast(self, ir.DataType.INT64) if dtype.is_integer() else self
    made = t.op("Trilu", held, t.scalar(diagonal, ir.DataType.INT64), upper=int(upper))
    return t.cast(made, dtype)
