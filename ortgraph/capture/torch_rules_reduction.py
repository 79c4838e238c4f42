"""Reductions, sorting and running sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation

INT64 = ir.DataType.INT64


def reduced(t: Translation, op_type: str, value: ir.Value, dim: int | Sequence[int] | None, keepdim: bool) -> ir.Value:
    """A reduction over ``dim``; over everything when it is None or empty."""
    rank = len(t.dims(value))
    if rank == 0:
        return value
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    axes = sorted(d % rank for d in dims) or list(range(rank))
    return t.op(op_type, value, t.build.ints(axes), keepdims=int(keepdim))


def _reduction(op_type: str) -> Any:
    def apply(t: Translation, self: ir.Value, dim: Any = None, keepdim: bool = False, **_: Any) -> ir.Value:
        return reduced(t, op_type, t.cast(self, t.out_dtype()), dim, keepdim)

    return apply


rule("sum.default", "sum.dim_IntList")(_reduction("ReduceSum"))
rule("mean.default", "mean.dim")(_reduction("ReduceMean"))
rule("prod.default", "prod.dim_int")(_reduction("ReduceProd"))
rule("amax.default", "max.default")(_reduction("ReduceMax"))
rule("amin.default", "min.default")(_reduction("ReduceMin"))
rule("logsumexp.default")(_reduction("ReduceLogSumExp"))


@rule("any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims")
def _truth(t: Translation, self: ir.Value, dim: Any = None, keepdim: bool = False) -> ir.Value:
    assert t.fx is not None
    op_type = "ReduceMax" if "any" in str(t.fx.target) else "ReduceMin"
    counted = t.cast(t.cast(self, ir.DataType.BOOL), ir.DataType.INT32)
    return t.cast(reduced(t, op_type, counted, dim, keepdim), t.out_dtype())


@rule("argmax.default", "argmin.default")
def _arg(t: Translation, self: ir.Value, dim: int | None, keepdim: bool) -> ir.Value:
    assert t.fx is not None
    op_type = "ArgMax" if "argmax" in str(t.fx.target) else "ArgMin"
    if self.dtype == INT64:  # the runtime searches no int64
        self = t.cast(self, ir.DataType.DOUBLE)
    if dim is None:
        total: Any = 1
        for d in t.dims(self):
            total = total * d
        flat = t.op(op_type, t.reshape(self, [total]), axis=0, keepdims=0)
        return t.reshape(t.typed(flat, INT64, ()), t.out_dims())
    return t.op(op_type, self, axis=dim, keepdims=int(keepdim))


@rule("max.dim", "min.dim")
def _extreme(t: Translation, self: ir.Value, dim: int, keepdim: bool) -> tuple[ir.Value, ir.Value]:
    assert t.fx is not None
    kind = "Max" if "max" in str(t.fx.target) else "Min"
    boolean = self.dtype == ir.DataType.BOOL
    compared = t.cast(self, ir.DataType.INT32) if boolean else self  # ONNX orders no booleans
    indices = t.op(f"Arg{kind}", compared, axis=dim, keepdims=int(keepdim))
    extreme = reduced(t, f"Reduce{kind}", compared, dim, keepdim)
    return t.cast(extreme, ir.DataType.BOOL) if boolean else extreme, indices


@rule("topk.default")
def _topk(t: Translation, self: ir.Value, k: int, dim: int, largest: bool, sorted: bool) -> Sequence[ir.Value]:
    return t.multi("TopK", self, t.size(k), outputs=2, axis=dim, largest=int(largest), sorted=int(sorted))


@rule("sort.default", "sort.stable")
def _sort(t: Translation, self: ir.Value, dim: int, descending: bool, **_: Any) -> Sequence[ir.Value]:
    size = t.dims(self)[dim]
    return t.multi("TopK", self, t.size(size), outputs=2, axis=dim, largest=int(descending), sorted=1)


@rule("cumsum.default")
def _cumsum(t: Translation, self: ir.Value, dim: int, dtype: Any) -> ir.Value:
    out = t.out_dtype()
    held = ir.DataType.INT64 if out == ir.DataType.BOOL else out
    return t.cast(t.op("CumSum", t.cast(self, held), t.scalar(dim, INT64)), out)


@rule("var.correction")
def _variance(t: Translation, self: ir.Value, dim: Any, correction: Any, keepdim: bool) -> ir.Value:
    dtype, dims = t.out_dtype(), t.dims(self)
    axes = [d % len(dims) for d in dim] if dim else list(range(len(dims)))
    mean = reduced(t, "ReduceMean", self, axes, True)
    error = t.op("Sub", self, mean)
    count: Any = 1
    for axis in axes:
        count = count * dims[axis]
    total = reduced(t, "ReduceSum", t.op("Mul", error, error), axes, keepdim)
    return t.op("Div", total, t.tensor(count - (1 if correction is None else correction), dtype))


@rule("linalg_vector_norm.default")
def _vector_norm(t: Translation, self: ir.Value, ord: float, dim: Any, keepdim: bool, dtype: Any) -> ir.Value:
    out = t.out_dtype()
    size = t.op("Abs", t.cast(self, out))
    if ord in (float("inf"), float("-inf")):
        return reduced(t, "ReduceMax" if ord > 0 else "ReduceMin", size, dim, keepdim)
    if ord == 0:
        counted = t.cast(t.op("Greater", size, t.scalar(0, out)), out)
        return reduced(t, "ReduceSum", counted, dim, keepdim)
    if ord == 1:
        return reduced(t, "ReduceSum", size, dim, keepdim)
    if ord == 2:
        return t.op("Sqrt", reduced(t, "ReduceSum", t.op("Mul", size, size), dim, keepdim))
    power = reduced(t, "ReduceSum", t.op("Pow", size, t.scalar(ord, out)), dim, keepdim)
    return t.op("Pow", power, t.scalar(1 / ord, out))


@rule("cumprod.default")
def _cumprod(t: Translation, self: ir.Value, dim: int, dtype: Any) -> ir.Value:
    """Running products in doubling steps (Hillis and Steele): each round multiplies by what is 1, 2, 4, ... before."""
    out, dims = t.out_dtype(), t.dims(self)
    axis = dim % len(dims) if dims else 0
    value = t.cast(self, out)
    if not dims:
        return value
    size = dims[axis]
    if not isinstance(size, int):
        raise t.unsupported("cumprod along a symbolic dimension", "keep this dimension static")
    step = 1
    pads = [0] * (2 * len(dims))
    while step < size:
        kept = t.op("Slice", value, t.build.ints([0]), t.build.ints([size - step]), t.build.ints([axis]))
        pads[axis] = step
        value = t.op("Mul", value, t.op("Pad", kept, t.build.ints(pads), t.scalar(1, out)))
        step *= 2
    return value
