"""Sizes as numbers or expressions of the user's dimension names."""

from __future__ import annotations

import re
from typing import TypeAlias

import sympy

Dim: TypeAlias = int | sympy.Expr
_NAME = re.compile(r"[A-Za-z_]\w*(?!\w*\()")


def parse_dim(text: str | None) -> sympy.Expr:
    """The expression of a recorded symbolic dimension."""
    assert text is not None, "a dimension without a name"
    names = {n: named_dim(n) for n in _NAME.findall(text)}  # sympy has meanings of its own for N, S, beta, ...
    return sympy.sympify(text, locals=names)


def named_dim(name: str) -> sympy.Symbol:
    """The symbol of a dimension that the user named."""
    return sympy.Symbol(name, integer=True, positive=True)


def is_whole(expression: sympy.Expr) -> bool:
    """Whether a term of a size can be computed in integers by itself."""
    return not (expression.is_Rational and not expression.is_Integer) and not isinstance(expression, sympy.Pow)


def reshape_pattern(before: tuple[Dim, ...], after: tuple[Dim, ...]) -> list[int] | None:
    """A constant Reshape input with 0 (copied) and at most one -1, or None when sizes have to be computed."""
    if any(d == 0 for d in after):
        return None if not all(isinstance(d, int) for d in after) else [int(d) for d in after]
    shape: list[int] = []
    for i, dim in enumerate(after):
        if isinstance(dim, int):
            shape.append(dim)
        elif i < len(before) and before[i] == dim:
            shape.append(0)
        else:
            shape.append(-1)
    return shape if shape.count(-1) <= 1 else None
