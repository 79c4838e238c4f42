"""Views by strides, as adaptive pooling and its gradient make them: of a tensor that lies row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.capture.torch_dims import Dim
from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation


def _is_whole(dims: Sequence[Dim], size: Sequence[Dim], stride: Sequence[Dim], offset: Any) -> bool:
    """Whether the view reads every element once, in order: a reshape."""
    wanted: Dim = 1
    for extent, step in zip(reversed(size), reversed(stride), strict=True):
        if extent != 1 and step != wanted:
            return False
        wanted = wanted * extent
    return not offset and wanted == math.prod(dims)


def _places(t: Translation, size: Sequence[Dim], stride: Sequence[Dim], offset: Any) -> np.ndarray:
    """Flat position of every element of a view."""
    if not all(isinstance(n, int) for n in (*size, *stride, offset or 0)):
        raise t.unsupported("a view by strides of a symbolic size", "keep this dimension static")
    at = np.full((1,) * len(size), int(offset or 0), np.int64)
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        lying = [1] * len(size)
        lying[axis] = int(extent)
        at = at + (np.arange(int(extent), dtype=np.int64) * int(step)).reshape(lying)
    return at


def _refuse_other_layouts(t: Translation) -> None:
    if not t.fake_argument("self").is_contiguous():
        raise t.unsupported("a view by strides of a tensor that does not lie row by row", "use reshape or index")


@rule("as_strided.default")
def _as_strided(
    t: Translation, self: ir.Value, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Any = None
) -> ir.Value:
    _refuse_other_layouts(t)
    if _is_whole(t.dims(self), size, stride, storage_offset):
        return t.reshape(self, t.out_dims())
    flat = t.op("Reshape", self, t.build.ints([-1]))
    return t.op("Gather", flat, t.const(_places(t, size, stride, storage_offset)), axis=0)


@rule("as_strided_scatter.default")
def _as_strided_scatter(
    t: Translation,
    self: ir.Value,
    src: ir.Value,
    size: Sequence[Dim],
    stride: Sequence[Dim],
    storage_offset: Any = None,
) -> ir.Value:
    _refuse_other_layouts(t)
    if _is_whole(t.dims(self), size, stride, storage_offset):
        return t.reshape(src, t.out_dims())
    at = _places(t, size, stride, storage_offset).reshape(-1)
    if len(np.unique(at)) < len(at):
        raise t.unsupported("writing into a view whose elements overlap", "clone it first")
    flat, lying = (t.op("Reshape", v, t.build.ints([-1])) for v in (self, src))
    placed = t.typed(
        t.op("ScatterElements", flat, t.const(at), lying, axis=0), t.out_dtype(), (math.prod(t.dims(self)),)
    )
    return t.reshape(placed, t.out_dims())
