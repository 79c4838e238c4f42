"""Operator table: operators that move, view, select or make data without arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.ops.shapes import (
    UNKNOWN,
    Types,
    attribute,
    broadcast,
    elements_flops,
    given,
    ints_of,
    like,
    normalized_axis,
    product,
    retyped,
    shape_of,
)
from ortgraph.ops.spec import InferRule, OpSpec, Shape, register

_VIEW = ((0, 0),)


def _first(rule) -> InferRule:
    """A rule for the shape of the only output, of the dtype of input 0; None leaves the node to ONNX."""

    def typed_rule(node: ir.Node) -> Types | None:
        source = given(node, 0)
        shape = shape_of(source)
        if source is None or source.dtype is None or shape is None:
            return None
        result = rule(node, shape)
        return None if result is None else [(source.dtype, result)]

    return typed_rule


@functools.lru_cache(maxsize=4096)
def _quotient(total: tuple[Any, ...], known: tuple[Any, ...]) -> Any:
    """The dimension that -1 stands for: product(total) / product(known)."""
    over, under = list(total), []
    for d in known:
        if d in over and not (isinstance(d, ir.SymbolicDim) and d.value is None):
            over.remove(d)
        else:
            under.append(d)
    top, bottom = product(over), product(under)
    if isinstance(bottom, int) and isinstance(top, int):
        return top // bottom if bottom and top % bottom == 0 else UNKNOWN
    if (isinstance(top, ir.SymbolicDim) and top.value is None) or not isinstance(bottom, int) or bottom == 0:
        return UNKNOWN
    return top if bottom == 1 else top / bottom


def _reshape(node: ir.Node, shape: Shape) -> Shape | None:
    target = ints_of(given(node, 1))
    if target is None or attribute(node, "allowzero", 0):
        return None
    dims: list[Any] = [shape[i] if d == 0 and i < len(shape) else d for i, d in enumerate(target)]
    free = [i for i, d in enumerate(target) if d == -1]
    if free:
        dims[free[0]] = _quotient(tuple(shape), tuple(d for i, d in enumerate(dims) if i != free[0]))
    return tuple(dims)


def _axes(node: ir.Node, rank: int) -> list[int] | None:
    axes = ints_of(given(node, 1))
    return None if axes is None else [normalized_axis(a, rank) for a in axes]


def _squeeze(node: ir.Node, shape: Shape) -> Shape | None:
    axes = _axes(node, len(shape))
    return None if axes is None else tuple(d for i, d in enumerate(shape) if i not in axes)


def _unsqueeze(node: ir.Node, shape: Shape) -> Shape | None:
    count = ints_of(given(node, 1))
    if count is None:
        return None
    axes = {normalized_axis(a, len(shape) + len(count)) for a in count}
    rest = iter(shape)
    return tuple(1 if i in axes else next(rest) for i in range(len(shape) + len(count)))


def _flatten(node: ir.Node, shape: Shape) -> Shape:
    axis = normalized_axis(attribute(node, "axis", 1), len(shape))
    return product(shape[:axis]), product(shape[axis:])


def _transpose(node: ir.Node, shape: Shape) -> Shape:
    perm = attribute(node, "perm", range(len(shape) - 1, -1, -1))
    return tuple(shape[i] for i in perm)


def _gather(node: ir.Node, shape: Shape) -> Shape | None:
    indices = shape_of(given(node, 1))
    if indices is None:
        return None
    axis = normalized_axis(attribute(node, "axis", 0), len(shape))
    return (*shape[:axis], *indices, *shape[axis + 1 :])


def _gather_elements(node: ir.Node, shape: Shape) -> Shape | None:
    return shape_of(given(node, 1))


def _expand(node: ir.Node, shape: Shape) -> Shape | None:
    target = ints_of(given(node, 1))
    return None if target is None else broadcast(shape, tuple(target))


def concat_shape(node: ir.Node, shape: Shape) -> Shape | None:
    """Shape of the inputs joined along ``axis``; ``shape`` is that of the first."""
    shapes = [shape_of(v) for v in node.inputs]
    if any(s is None or len(s) != len(shape) for s in shapes):
        return None
    axis = normalized_axis(attribute(node, "axis", 0), len(shape))
    return tuple(_total([s[i] for s in shapes]) if i == axis else _agreed([s[i] for s in shapes])  # type: ignore[index]
                 for i in range(len(shape)))  # fmt: skip


def _total(dims: Sequence[Any]) -> Any:
    total: Any = sum(d for d in dims if isinstance(d, int))
    for d in dims:
        if isinstance(d, int):
            continue
        if d.value is None:
            return UNKNOWN
        total = d + total if total != 0 or not isinstance(total, int) else d
    return total


def _agreed(dims: Sequence[Any]) -> Any:
    return next((d for d in dims if isinstance(d, int)), dims[0])


def _slice(node: ir.Node, shape: Shape) -> Shape | None:
    starts, ends = ints_of(given(node, 1)), ints_of(given(node, 2))
    axes = ints_of(given(node, 3)) if given(node, 3) is not None else list(range(len(starts or ())))
    steps = ints_of(given(node, 4)) if given(node, 4) is not None else [1] * len(starts or ())
    if starts is None or ends is None or axes is None or steps is None:
        return None
    dims = list(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        dim = dims[axis]
        if not isinstance(dim, int):
            if step == 1 and start == 0 and end >= 2**31 - 1:
                continue
            return None
        dims[axis] = len(range(dim)[slice(start, end, step)]) if step > 0 else _backward(dim, start, end, step)
    return tuple(dims)


def _backward(dim: int, start: int, end: int, step: int) -> int:
    start = min(max(start + dim if start < 0 else start, 0), dim - 1)
    end = -1 if end < -dim else min(max(end + dim if end < 0 else end, -1), dim - 1)
    return len(range(start, end, step))


def split_types(node: ir.Node) -> Types | None:
    """Types of the parts of Split, None when their sizes are not constant."""
    shape, sizes = shape_of(given(node, 0)), ints_of(given(node, 1))
    if shape is None:
        return None
    axis = normalized_axis(attribute(node, "axis", 0), len(shape))
    if sizes is None:
        dim, parts = shape[axis], len(node.outputs)
        if given(node, 1) is not None or not isinstance(dim, int) or dim % parts:
            return None
        sizes = [dim // parts] * parts
    return [retyped(node.inputs[0], (*shape[:axis], s, *shape[axis + 1 :])) for s in sizes]


def _constant_of_shape_types(node: ir.Node) -> Types | None:
    dims = ints_of(given(node, 0))
    value = attribute(node, "value")
    if dims is None:
        return None
    return [(ir.DataType.FLOAT if value is None else value.dtype, tuple(dims))]


def _constant_types(node: ir.Node) -> Types | None:
    value = attribute(node, "value")
    return None if value is None else [(value.dtype, tuple(value.shape))]


def _op(op_type: str, doc: str, infer: InferRule | None = None, **facts: Any) -> OpSpec:
    return OpSpec("", op_type, precision="any", infer=infer, doc=doc, **facts)


register(
    _op("Identity", "Y = X", like(0), alias=_VIEW, elementwise=True),
    _op("Reshape", "Y = X in another shape", _first(_reshape), alias=_VIEW),
    _op("Squeeze", "Y = X without dimensions of size 1", _first(_squeeze), alias=_VIEW),
    _op("Unsqueeze", "Y = X with dimensions of size 1 put in", _first(_unsqueeze), alias=_VIEW),
    _op("Flatten", "Y = X as a matrix", _first(_flatten), alias=_VIEW),
    _op("Transpose", "Y = X with permuted dimensions", _first(_transpose)),
    _op("Gather", "Y = rows of X by index along an axis", _first(_gather)),
    _op("GatherElements", "Y[i, j] = X[indices[i, j], j]", _first(_gather_elements)),
    _op("GatherND", "Y = slices of X by index tuples"),
    _op("ScatterElements", "Y = X with updates put (or added) at indices", like(0), inplace=_VIEW,
        flops=elements_flops(1)),
    # ScatterND(add) adds from several threads without atomics on CPU: no pass or expansion of ours makes it.
    _op("ScatterND", "Y = X with slices put (or added) at index tuples", like(0)),
    _op("Concat", "Y = inputs joined along an axis", _first(concat_shape)),
    _op("Split", "Y_i = parts of X along an axis", split_types),
    _op("Slice", "Y = X[start:end:step]", _first(_slice)),
    _op("Expand", "Y = X broadcast to a shape", _first(_expand)),
    _op("Tile", "Y = X repeated"),
    _op("Pad", "Y = X with a margin"),
    _op("Trilu", "Y = upper or lower triangle of X", like(0)),
    _op("DepthToSpace", "Y = blocks of channels moved to space"),
    _op("SpaceToDepth", "Y = blocks of space moved to channels"),
    _op("ReverseSequence", "Y = X with reversed sequences", like(0)),
    _op("Resize", "Y = X interpolated to another size", flops=elements_flops(8)),
    _op("Compress", "Y = slices of X where the condition holds"),
    _op("NonZero", "Y = indices of non-zero elements"),
    _op("Unique", "Y = sorted unique elements"),
    _op("OneHot", "Y = on-value at the index, else off-value"),
    _op("EyeLike", "Y = identity matrix"),
    _op("Shape", "Y = shape of X"),
    _op("Size", "Y = number of elements of X"),
    _op("Range", "Y = start, start + delta, ..."),
    _op("Constant", "Y = a constant", _constant_types),
    _op("ConstantOfShape", "Y = one value in a shape", _constant_of_shape_types),
)  # fmt: skip
