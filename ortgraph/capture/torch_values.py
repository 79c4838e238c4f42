"""Building nodes over typed values: operators, casts, views, and sizes that are computed in the graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy

from ortgraph.capture.torch_dims import Dim, is_whole, parse_dim, reshape_pattern
from ortgraph.errors import UnsupportedError
from ortgraph.graph.edit import Names
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE

PASS = "capture"
_MAX_FILLED = 1024  # elements up to which a filled tensor is stored instead of expanded


class GraphValues:
    """What rules use to build nodes: every value has a dtype and dimensions, numbers or named expressions.

    Args:
        graph: Receives the nodes.

    Attributes:
        sources: The input and axis at which a named dimension can be read.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.build = Builder(graph, PASS, names=Names(graph))
        self.sources: dict[sympy.Symbol, tuple[ir.Value, int]] = {}
        self._dims: dict[ir.Value, tuple[Dim, ...]] = {}
        self._sizes: dict[sympy.Expr, ir.Value] = {}
        self._shapes: dict[tuple[Dim, ...], ir.Value] = {}
        self._transposed: dict[ir.Value, tuple[ir.Value, tuple[int, ...]]] = {}

    def dims(self, value: ir.Value) -> tuple[Dim, ...]:
        """The recorded dimensions of a value."""
        if value in self._dims:
            return self._dims[value]
        assert value.shape is not None, f"%{value.name} has no shape"
        return tuple(d if isinstance(d, int) else parse_dim(d.value) for d in value.shape)

    def typed(self, value: ir.Value, dtype: ir.DataType, dims: Sequence[Dim]) -> ir.Value:
        """Record dtype and dimensions of a value."""
        value.dtype = dtype
        value.shape = ir.Shape([d if isinstance(d, int) else str(d) for d in dims])
        self._dims[value] = tuple(dims)
        return value

    # --- nodes ---------------------------------------------------------------------------------------------------

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """A standard operator with one output."""
        return self.build.op(op_type, *inputs, **attributes)

    def multi(self, op_type: str, *inputs: ir.Value | None, outputs: int, **attributes: Any) -> tuple[ir.Value, ...]:
        return self.build.multi(op_type, *inputs, outputs=outputs, **attributes)

    def composite(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """A composite with one output (docs/operators.md)."""
        return self.build.op(op_type, *inputs, domain=COMPOSITE, **attributes)

    def composites(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int,
        wanted: Sequence[bool] | None = None,
        **attributes: Any,
    ) -> tuple[ir.Value | None, ...]:
        """A composite with several outputs, of which the unwanted ones are left out."""
        made = self.build.multi(op_type, *inputs, outputs=outputs, domain=COMPOSITE, **attributes)
        if wanted is None:
            return made
        for value, keep in zip(made, wanted, strict=True):
            if not keep:
                value.name = ""
        return tuple(value if keep else None for value, keep in zip(made, wanted, strict=True))

    def const(self, value: Any, dtype: ir.DataType | type | None = None) -> ir.Value:
        return self.build.const(value, dtype)

    def scalar(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """A scalar constant. Values outside an integer type's range become its limits, as no comparison differs."""
        if dtype.is_integer() and isinstance(value, float) and not np.isfinite(value):
            info = np.iinfo(dtype.numpy())
            value = info.max if value > 0 else info.min
        if dtype == ir.DataType.BOOL:
            value = bool(value)
        return self.build.const(value, dtype)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if value.dtype == dtype:
            return value
        dims = self.dims(value)
        return self.typed(self.op("Cast", value, to=int(dtype)), dtype, dims)

    def tensor(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """An operand (value, number or expression of dimensions) in ``dtype``."""
        if isinstance(value, ir.Value):
            return self.cast(value, dtype)
        if isinstance(value, sympy.Basic):
            size = self.op("Squeeze", self.size(value), self.build.ints([0]))
            return self.cast(self.typed(size, ir.DataType.INT64, ()), dtype)
        return self.scalar(value, dtype)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Transpose; a transpose of a transpose is merged or cancelled."""
        perm = tuple(int(p) for p in perm)
        if value in self._transposed:
            value, inner = self._transposed[value]
            perm = tuple(inner[p] for p in perm)
        if perm == tuple(range(len(perm))):
            return value
        dims = self.dims(value)
        result = self.op("Transpose", value, perm=perm)
        assert value.dtype is not None
        self.typed(result, value.dtype, [dims[p] for p in perm])
        self._transposed[result] = (value, perm)
        return result

    def reshape(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """Reshape, with 0 and -1 where sizes are symbolic and computed sizes only where these do not suffice."""
        before, dims = self.dims(value), tuple(dims)
        if before == dims:
            return value
        assert value.dtype is not None
        empty = any(isinstance(d, int) and d == 0 for d in dims)  # a 0 in the shape would copy a size
        shape = None if empty else reshape_pattern(before, dims)
        target = self.build.ints(shape) if shape is not None else self.shape_input(dims)
        reshaped = self.op("Reshape", value, target, **({"allowzero": 1} if empty else {}))
        return self.typed(reshaped, value.dtype, dims)

    def expand(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        if self.dims(value) == tuple(dims):
            return value
        assert value.dtype is not None
        return self.typed(self.op("Expand", value, self.shape_input(dims)), value.dtype, dims)

    def filled(self, value: Any, dims: Sequence[Dim], dtype: ir.DataType) -> ir.Value:
        """A tensor with one value everywhere."""
        static = [d for d in dims if isinstance(d, int)]
        if len(static) == len(dims) and int(np.prod(static)) <= _MAX_FILLED and not isinstance(value, ir.Value):
            return self.build.const(np.full(static, value), dtype)
        scalar = self.tensor(value, dtype)
        return self.expand(scalar, dims)

    # --- sizes ---------------------------------------------------------------------------------------------------

    def size(self, dim: Dim) -> ir.Value:
        """A size as an int64 tensor of one element."""
        if isinstance(dim, int) or dim.is_Integer:
            return self.build.ints([int(dim)])
        if dim not in self._sizes:
            self._sizes[dim] = self.typed(self._compute_size(dim), ir.DataType.INT64, (1,))
        return self._sizes[dim]

    def shape_input(self, dims: Sequence[Dim]) -> ir.Value:
        """A shape as an int64 tensor."""
        if all(isinstance(d, int) for d in dims):
            return self.build.ints([int(d) for d in dims])
        key = tuple(dims)
        if key not in self._shapes:
            self._shapes[key] = self._concat_sizes(key)
        return self._shapes[key]

    def _concat_sizes(self, dims: tuple[Dim, ...]) -> ir.Value:
        parts: list[ir.Value] = []
        for symbolic, run in itertools.groupby(dims, lambda d: not isinstance(d, int)):
            if symbolic:
                parts += [self.size(d) for d in run]
            else:
                parts.append(self.build.ints([int(d) for d in run]))
        if len(parts) == 1:
            return parts[0]
        return self.typed(self.op("Concat", *parts, axis=0), ir.DataType.INT64, (len(dims),))

    def _compute_size(self, dim: sympy.Expr) -> ir.Value:
        if isinstance(dim, sympy.Symbol):
            if dim not in self.sources:
                raise self.unsupported(
                    f"the size {dim}, which depends on values and on no dimension of an input,",
                    "use torch.where, masked_fill or weights: sizes may not depend on values",
                )
            value, axis = self.sources[dim]
            return self.op("Shape", value, start=axis, end=axis + 1)
        if isinstance(dim, (sympy.Add, sympy.Mul)):
            op_type = "Add" if isinstance(dim, sympy.Add) else "Mul"
            result = self.size(dim.args[0]) if is_whole(dim.args[0]) else None
            for term in dim.args[1:]:
                if result is None or not is_whole(term):
                    break
                result = self.op(op_type, result, self.size(term))
            else:
                if result is not None:
                    return result
        if type(dim).__name__ in ("FloorDiv", "CleanDiv"):
            return self.op("Div", self.size(dim.args[0]), self.size(dim.args[1]))
        if type(dim).__name__ in ("Max", "Min"):
            return self.op(type(dim).__name__, *(self.size(a) for a in dim.args))
        raise self.unsupported(f"the size {dim}", "use static shapes (dynamic=None)")

    def unsupported(self, what: str, hint: str = "") -> UnsupportedError:
        """The error for something without a translation."""
        return UnsupportedError(f"{what} has no translation to ONNX", hint)
