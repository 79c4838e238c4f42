"""Conditions on sizes under which a captured graph is what its module computes."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ortgraph.errors import BatchError, InputError
from ortgraph.graph import TrainingGraph

METADATA_KEY = "conditions"
Condition = tuple[str, str]  # in Python, over dimension names; the line of the module's code that asked
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs, "int": int, "float": float}


def size_conditions(graph: TrainingGraph) -> tuple[Condition, ...]:
    """What the graph notes. Raises InputError where that does not parse."""
    try:
        found = json.loads(graph.signature.metadata.get(METADATA_KEY, "[]"))
        return tuple((str(ast.unparse(ast.parse(text, mode="eval"))), str(place)) for text, place in found)
    except (ValueError, TypeError, SyntaxError) as error:
        raise InputError(f"the stored conditions on sizes do not parse: {error}", "capture the graph again") from error


def check_sizes(conditions: Sequence[Condition], dims: Mapping[str, int]) -> None:
    """Raise BatchError where the module computes something else at these sizes than at those of its capture."""
    for text, place in conditions:
        names = sorted({n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)} - set(_FUNCTIONS))
        if not all(n in dims for n in names) or _value(ast.parse(text, mode="eval").body, dims):
            continue
        sizes = ", ".join(f"{n}={dims[n]}" for n in names)
        raise BatchError(
            f"the graph is of sizes with {text}, which {sizes} is not: the module computes something else there"
            f"{f' ({place})' if place else ''}",
            "capture another graph from an example of that size, or write what depends on the size with torch.where",
        )


def _value(node: ast.expr, dims: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name) if name in dims:
            return dims[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, dims), _value(right, dims))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, dims)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, dims)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(v, dims) for v in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_value(v, dims) for v in values)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, dims), _value(right, dims))
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(a, dims) for a in args))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, dims) else orelse, dims)
    raise InputError(
        f"a stored condition on sizes has {ast.unparse(node)!r}, which is no arithmetic", "capture the graph again"
    )
