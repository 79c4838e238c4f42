"""Gather, scatter, embedding. Sums into repeated places use EmbeddingGrad or ScatterElements, never ScatterND."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy

from ortgraph.capture.torch_dims import Dim
from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation

INT64 = ir.DataType.INT64


@rule("embedding.default")
def _embedding(t: Translation, weight: ir.Value, indices: ir.Value, **_: Any) -> ir.Value:
    return t.op("Gather", weight, indices, axis=0)


@rule("embedding_dense_backward.default")
def _embedding_backward(
    t: Translation,
    grad_output: ir.Value,
    indices: ir.Value,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> ir.Value:
    if scale_grad_by_freq:
        raise t.unsupported("embedding with scale_grad_by_freq=True", "use scale_grad_by_freq=False")
    return t.composite("EmbeddingGrad", grad_output, indices, rows=num_weights, padding_idx=padding_idx)


@rule("index_select.default")
def _index_select(t: Translation, self: ir.Value, dim: int, index: ir.Value) -> ir.Value:
    return t.op("Gather", self, index, axis=dim)


@rule("gather.default")
def _gather(t: Translation, self: ir.Value, dim: int, index: ir.Value, sparse_grad: bool) -> ir.Value:
    return t.op("GatherElements", self, index, axis=dim)


@rule("scatter_add.default")
def _scatter_add(t: Translation, self: ir.Value, dim: int, index: ir.Value, src: ir.Value) -> ir.Value:
    return t.op("ScatterElements", self, index, _cut(t, src, index), axis=dim, reduction="add")


@rule("scatter.src")
def _scatter(t: Translation, self: ir.Value, dim: int, index: ir.Value, src: ir.Value) -> ir.Value:
    return t.op("ScatterElements", self, index, _cut(t, src, index), axis=dim)


@rule("scatter.value")
def _scatter_value(t: Translation, self: ir.Value, dim: int, index: ir.Value, value: Any) -> ir.Value:
    return t.op("ScatterElements", self, index, t.filled(value, t.dims(index), t.out_dtype()), axis=dim)


def _cut(t: Translation, src: ir.Value, index: ir.Value) -> ir.Value:
    """PyTorch lets ``src`` be larger than ``index``; ONNX does not."""
    want = t.dims(index)
    if t.dims(src) == want:
        return src
    n = len(want)
    return t.op("Slice", src, t.build.ints([0] * n), t.shape_input(want), t.build.ints(range(n)))


def _placed(t: Translation, indices: Sequence[ir.Value | None], dims: Sequence[Dim]) -> list[int]:
    """Axes that carry an index tensor. Refuses masks, whose result size depends on values."""
    axes = [i for i, index in enumerate(indices) if index is not None]
    for axis in axes:
        index = indices[axis]
        assert index is not None
        if index.dtype == ir.DataType.BOOL:
            raise t.unsupported(
                "indexing with a boolean mask", "use torch.where or masked_fill: sizes may not depend on values"
            )
    return axes


def _adjacent(axes: Sequence[int]) -> bool:
    return list(axes) == list(range(axes[0], axes[0] + len(axes)))


def _linear(t: Translation, indices: Sequence[ir.Value], sizes: Sequence[Dim]) -> ir.Value:
    """One index into the flattened indexed axes; negative indices are wrapped."""
    total: ir.Value | None = None
    for index, size in zip(indices, sizes, strict=True):
        at = t.cast(index, INT64)
        extent = t.tensor(size, INT64)
        wrapped = t.op("Where", t.op("Less", at, t.scalar(0, INT64)), t.op("Add", at, extent), at)
        total = wrapped if total is None else t.op("Add", t.op("Mul", total, extent), wrapped)
    assert total is not None
    return total


@rule("index.Tensor", "_unsafe_index.Tensor")
def _index(t: Translation, self: ir.Value, indices: Sequence[ir.Value | None]) -> ir.Value:
    dims = t.dims(self)
    axes = _placed(t, indices, dims)
    if not axes:
        return self
    if len(axes) == 1:
        return t.op("Gather", self, indices[axes[0]], axis=axes[0])
    flat, at, perm = _flattened(t, self, indices, axes)
    picked = t.op("Gather", flat, at, axis=0)
    if not _adjacent(axes) or axes[0] == 0:
        return picked
    # adjacent indices in the middle: their dimensions stay where the indexed axes were
    inner = len(t.out_dims()) - (len(dims) - len(axes))
    order = [*range(inner, inner + axes[0]), *range(inner), *range(inner + axes[0], len(t.out_dims()))]
    out = t.out_dims()
    back = [out[order.index(i)] for i in range(len(order))]
    t.typed(picked, t.out_dtype(), back)
    return t.transpose(picked, order)


def _flattened(
    t: Translation, value: ir.Value, indices: Sequence[ir.Value | None], axes: Sequence[int]
) -> tuple[ir.Value, ir.Value, list[int]]:
    dims = t.dims(value)
    perm = [*axes, *(i for i in range(len(dims)) if i not in axes)]
    first = t.transpose(value, perm)
    rows: Dim = 1
    for axis in axes:
        rows = rows * dims[axis]
    flat = t.reshape(first, [rows, *(dims[i] for i in perm[len(axes) :])])
    used = [i for i in (indices[a] for a in axes) if i is not None]
    return flat, _linear(t, used, [dims[a] for a in axes]), perm


@rule("index_put.default", "_unsafe_index_put.default")
def _index_put(
    t: Translation, self: ir.Value, indices: Sequence[ir.Value | None], values: ir.Value, accumulate: bool, **_: Any
) -> ir.Value:
    """Accumulating: rows summed by EmbeddingGrad. Otherwise ScatterND; its order matters for repeated indices only."""
    dims = t.dims(self)
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == ir.DataType.BOOL and not accumulate:
        return _masked_put(t, self, indices[0], values)
    axes = _placed(t, indices, dims)
    used = [i for i in (indices[a] for a in axes) if i is not None]
    at = _linear(t, used, [dims[a] for a in axes])
    rest = [i for i in range(len(dims)) if i not in axes]
    spread = t.dims(at)
    rows: Dim = 1
    for axis in axes:
        rows = rows * dims[axis]
    # neighbouring index tensors stay where the indexed axes were; otherwise their dimensions come first
    lead = sum(1 for i in rest if i < axes[0]) if _adjacent(axes) else 0
    full = [*(dims[i] for i in rest[:lead]), *spread, *(dims[i] for i in rest[lead:])]
    source = t.expand(values, full)
    n = len(spread)
    source = t.transpose(source, [*range(lead, lead + n), *range(lead), *range(lead + n, len(full))])
    width: Dim = 1
    for i in rest:
        width = width * dims[i]
    source = t.reshape(source, [*spread, width])
    perm = [*axes, *rest]
    inverse = [perm.index(i) for i in range(len(perm))]
    if accumulate:
        if not isinstance(rows, int):
            raise t.unsupported("a gradient summed into a symbolic number of rows", "keep the indexed dimension static")
        summed = t.composite("EmbeddingGrad", source, at, rows=rows, padding_idx=-1)
        summed = t.typed(summed, t.out_dtype(), (rows, width))
        shaped = t.transpose(t.reshape(summed, [dims[p] for p in perm]), inverse)
        return shaped if _is_zero(self) else t.op("Add", self, shaped)
    target = t.reshape(t.transpose(self, perm), [rows, width])
    put = t.op("ScatterND", target, t.reshape(at, [*spread, 1]), source)
    put = t.typed(put, t.out_dtype(), (rows, width))
    return t.transpose(t.reshape(put, [dims[p] for p in perm]), inverse)


def _masked_put(t: Translation, self: ir.Value, mask: ir.Value, values: ir.Value) -> ir.Value:
    if t.dims(values) not in ((), (1,)):
        raise t.unsupported("index_put of several values under a mask", "use torch.where")
    dims = t.dims(self)
    wide = t.reshape(mask, [*t.dims(mask), *([1] * (len(dims) - len(t.dims(mask))))])
    return t.op("Where", wide, t.reshape(values, ()), self)


def _is_zero(value: ir.Value) -> bool:
    producer = value.producer()
    if producer is not None and producer.op_type == "Expand":
        value = producer.inputs[0]  # type: ignore[assignment]
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and not tensor.numpy().any()


@rule("diagonal.default", "diagonal_copy.default")
def _diagonal(t: Translation, self: ir.Value, offset: int, dim1: int, dim2: int) -> ir.Value:
    perm, at, _ = _diagonal_places(t, t.dims(self), offset, dim1, dim2)
    flat = t.transpose(self, perm)
    dims = t.dims(flat)
    flat = t.reshape(flat, [*dims[:-2], int(dims[-2]) * int(dims[-1])])
    return t.op("Gather", flat, t.build.ints(at), axis=len(dims) - 2)


@rule("diagonal_backward.default")
def _diagonal_backward(
    t: Translation, grad_output: ir.Value, input_sizes: Sequence[Dim], offset: int, dim1: int, dim2: int
) -> ir.Value:
    """Each place of the diagonal is multiplied into its row of a constant selection matrix."""
    perm, at, count = _diagonal_places(t, input_sizes, offset, dim1, dim2)
    selection = np.zeros((len(at), count))
    selection[np.arange(len(at)), at] = 1
    flat = t.op("MatMul", grad_output, t.const(selection, t.out_dtype()))
    moved = [input_sizes[p] for p in perm]
    flat = t.typed(flat, t.out_dtype(), [*moved[:-2], count])
    inverse = [perm.index(i) for i in range(len(perm))]
    return t.transpose(t.reshape(flat, moved), inverse)


@rule("diagonal_scatter.default")
def _diagonal_scatter(t: Translation, self: ir.Value, src: ir.Value, offset: int, dim1: int, dim2: int) -> ir.Value:
    """The diagonal becomes ``src``."""
    dims = t.dims(self)
    perm, at, count = _diagonal_places(t, dims, offset, dim1, dim2)
    plane = [dims[p] for p in perm[-2:]]
    inside = np.isin(np.arange(count), at).reshape([int(d) for d in plane])
    placed = _diagonal_backward(t, src, dims, offset, dim1, dim2)
    inverse = [perm.index(i) for i in range(len(perm))]
    mask = np.transpose(inside.reshape([1] * (len(dims) - 2) + list(inside.shape)), inverse)
    return t.op("Where", t.const(mask, ir.DataType.BOOL), placed, self)


def _diagonal_places(
    t: Translation, dims: Sequence[Dim], offset: int, dim1: int, dim2: int
) -> tuple[list[int], list[int], int]:
    """The permutation that puts both axes last, the flat places of the diagonal, and the size of that plane."""
    a, b = dim1 % len(dims), dim2 % len(dims)
    height, width = dims[a], dims[b]
    if not isinstance(height, int) or not isinstance(width, int):
        raise t.unsupported("a diagonal of symbolic size", "keep these dimensions static")
    places = [i * width + i + offset for i in range(height) if 0 <= i + offset < width]
    return [*(i for i in range(len(dims)) if i not in (a, b)), a, b], places, height * width


# --- values in the order of a mask -------------------------------------------------------------------------------


def _ranks(t: Translation, mask: ir.Value, dims: Sequence[Dim]) -> tuple[ir.Value, ir.Value]:
    """A mask laid flat, and for each element how many chosen ones stand before it (chosen ones: their own rank)."""
    whole = t.expand(t.cast(mask, ir.DataType.BOOL), dims)
    flat = t.op("Reshape", whole, t.build.ints([-1]))
    counted = t.op("CumSum", t.op("Cast", flat, to=int(INT64)), t.scalar(0, INT64))
    return flat, t.op("Sub", counted, t.scalar(1, INT64))


@rule("masked_scatter.default")
def _masked_scatter(t: Translation, self: ir.Value, mask: ir.Value, source: ir.Value) -> ir.Value:
    """The chosen elements become the first values of ``source``, in order."""
    _, ranks = _ranks(t, mask, t.out_dims())
    flat = t.op("Reshape", source, t.build.ints([-1]))
    at = t.op("Max", ranks, t.scalar(0, INT64))
    taken = t.typed(t.op("Gather", flat, at, axis=0), t.out_dtype(), (sympy.prod(t.out_dims()),))
    return t.op("Where", mask, t.reshape(taken, t.out_dims()), self)


@rule("masked_scatter_backward.default")
def _masked_scatter_backward(t: Translation, grad_output: ir.Value, mask: ir.Value, sizes: Sequence[Dim]) -> ir.Value:
    """Each value of ``source`` gets the gradient of its place; those that are not chosen go to a place that is cut off."""
    chosen, ranks = _ranks(t, mask, t.dims(grad_output))
    count = t.op("ReduceProd", t.shape_input(sizes), keepdims=1)
    at = t.op("Where", chosen, ranks, count)
    zeros = t.op("Expand", t.scalar(0, t.out_dtype()), t.op("Add", count, t.build.ints([1])))
    placed = t.op("ScatterElements", zeros, at, t.op("Reshape", grad_output, t.build.ints([-1])), axis=0)
    return t.op("Reshape", t.op("Slice", placed, t.build.ints([0]), count, t.build.ints([0])), t.shape_input(sizes))
