"""Expressions of a fused region: what one row of it computes, element by element.

A region has *rows*; every value is either one number per row or a row of some width. Rows are numbered in memory order, so
values of shapes [4, 128, 256] and [512, 256] are the same rows. Expressions know nothing of the number of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

Width = str | int  # "" for one number per row, else the name of a width or a static one
ROW: Width = ""

# What an expression yields: a number (float32 inside whatever its type outside) or a choice.
NUMBER, CHOICE = "number", "choice"
REDUCTIONS = frozenset({"sum", "max", "min", "peak"})  # peak: the maximum where NaN shows anyway


@dataclasses.dataclass(frozen=True)
class Access:
    """How an input is read.

    Attributes:
        input: Which one.
        leading: (dimension, varies) for each leading dimension of the values that it is broadcast to.
        last: The width that it is broadcast to.
        varies: Whether it varies along the row.
    """

    input: int
    leading: tuple[tuple[str | int, bool], ...]
    last: Width
    varies: bool

    @property
    def dense(self) -> bool:
        """Every row has numbers of its own."""
        return all(varies for size, varies in self.leading if size != 1)

    @property
    def uniform(self) -> bool:
        """The same for all rows."""
        return not any(varies for size, varies in self.leading if size != 1)

    @property
    def mixed(self) -> bool:
        """Rows share numbers along some of the leading dimensions."""
        return not self.dense and not self.uniform


@dataclasses.dataclass(frozen=True)
class Expr:
    """One expression; operands are earlier expressions of the region by index.

    Attributes:
        op: ``load``, ``const``, ``width``, ``slice``, ``concat``, ``pad``, ``draw``, ``uniform``, a reduction, or an
            element-wise function of ``source.FUNCTIONS``.
        args: Operands.
        width: Width of the row, ROW for one number per row.
        kind: NUMBER or CHOICE.
        data: The number of a constant, the Access of a load, columns of a slice, ...
    """

    op: str
    args: tuple[int, ...] = ()
    width: Width = ROW
    kind: str = NUMBER
    data: Any = None


@dataclasses.dataclass(frozen=True)
class Result:
    """An output: rows, one number per row, or (``column``) the sums of all rows by column.

    Attributes:
        expr: What is written or summed.
        column: Whether it is summed over the rows.
        dtype: Element type outside.
        width: Width of its rows, whatever that of the expression: a number per row may be written along a row.
    """

    expr: int
    column: bool
    dtype: ir.DataType
    width: Width


@dataclasses.dataclass(frozen=True)
class Region:
    """A fused region.

    Attributes:
        exprs: In order of definition.
        results: One per output.
        inputs: Element types.
        draws: Names of the attributes that hold the numbers of drawing nodes, one for each ``draw`` or ``uniform``.
        rows: Leading dimensions of its values, before and behind each reshape: the products are the number of rows.
    """

    exprs: tuple[Expr, ...]
    results: tuple[Result, ...]
    inputs: tuple[ir.DataType, ...]
    draws: tuple[str, ...] = ()
    rows: tuple[tuple[str | int, ...], ...] = ((),)

    @property
    def accesses(self) -> tuple[Access, ...]:
        return tuple(e.data for e in self.exprs if isinstance(e.data, Access) and e.op == "load")

    @property
    def widths(self) -> tuple[Width, ...]:
        """All widths: that of column sums first, which all have the same one, then in order of first use."""
        found: dict[Width, None] = {r.width: None for r in self.results if r.column}
        found.update((r.width, None) for r in self.results if r.width != ROW)
        for e in self.exprs:
            for width in (e.width, e.data if e.op in REDUCTIONS or e.op == "width" else ROW):
                if width != ROW:
                    found[width] = None
        return tuple(found)

    @property
    def has_rows(self) -> bool:
        """Whether rows have to stay whole: something is reduced over them, or columns change places."""
        return any(e.op in REDUCTIONS or e.op in ("slice", "concat", "pad", "width") for e in self.exprs)


class Maker:
    """Collects expressions; equal ones are made once."""

    def __init__(self) -> None:
        self.exprs: list[Expr] = []
        self._known: dict[tuple[Expr, str], int] = {}

    def add(self, expr: Expr) -> int:
        key = expr, repr(expr.data)  # why: zeros of both signs compare equal
        if key not in self._known:
            self._known[key] = len(self.exprs)
            self.exprs.append(expr)
        return self._known[key]

    def op(self, name: str, *args: int, kind: str = NUMBER, data: object = None) -> int:
        """An element-wise function; its width is that of its operands."""
        folded = self._folded(name, args)
        if folded is not None:
            return folded
        return self.add(Expr(name, args, self._width(args), kind, data))

    def const(self, value: float) -> int:
        return self.add(Expr("const", data=float(value)))

    def choice(self, value: bool) -> int:
        return self.add(Expr("const", kind=CHOICE, data=bool(value)))

    def reduce(self, name: str, arg: int, width: Width) -> int:
        return self.add(Expr(name, (arg,), ROW, NUMBER, width))

    def mean(self, arg: int, width: Width) -> int:
        return self.op("div", self.reduce("sum", arg, width), self.add(Expr("width", data=width)))

    def _width(self, args: Sequence[int]) -> Width:
        found = {self.exprs[a].width for a in args} - {ROW}
        if len(found) > 1:
            raise ValueError(f"operands of widths {sorted(map(str, found))}")
        return found.pop() if found else ROW

    def _folded(self, name: str, args: Sequence[int]) -> int | None:
        """x * 1 and x / 1: the only identities that hold for every number."""
        if name in ("mul", "div") and len(args) == 2:
            a, b = args
            if self.exprs[b].op == "const" and self.exprs[b].data == 1.0:
                return a
            if name == "mul" and self.exprs[a].op == "const" and self.exprs[a].data == 1.0:
                return b
        return None
