"""Checks of values in forward(): those that only raise, and those for numbers that are not finite, are left out.

``if labels.max() >= self.classes: raise ValueError(...)`` looks at values, and no graph holds the question. A trace goes
on as a run does that meets nothing wrong; where more than an error or a message is left out, a warning says so.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from ortgraph.capture.torch_substitutes import substitute

_FINITE = {"isfinite": True, "isinf": False, "isnan": False}
_SAID = {"warn", "warning", "warning_once", "info", "debug", "error", "print"}
Position = tuple[int, int]


@substitute(torch.Tensor.__bool__, torch.Tensor.item)
def passed(self: torch.Tensor) -> Any:
    """What the question would be answered in a run that meets nothing wrong; NotImplemented for other questions."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back  # type: ignore[assignment]
    return NotImplemented if frame is None else _answer(frame)


def _answer(frame: FrameType) -> Any:
    if sys.version_info < (3, 11):  # code has lines there, no columns
        return NotImplemented
    positions = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if positions is None or positions[0] is None or positions[2] is None:
        return NotImplemented
    at = (positions[0], positions[2])
    for statement in _questions(frame.f_code.co_filename):
        leaves = list(_leaves(statement.test, isinstance(statement, ast.Assert)))
        asked = [pair for pair in leaves if _holds(pair[0], at)]
        if not asked and at == (statement.lineno, statement.col_offset):
            asked = leaves  # for "not" and "assert", code names the statement
        if asked:
            answers = {_known(leaf, answer, statement) for leaf, answer in asked}
            if len(answers) != 1 or None in answers:
                return NotImplemented
            if not _only_raises(statement):
                _tell(frame)
            return answers.pop()
    return NotImplemented


def _tell(frame: FrameType) -> None:
    """Say that something else than an error is left out."""
    warnings.warn(
        f"{frame.f_code.co_filename}:{frame.f_lineno} asks for numbers that are not finite: the graph goes on as for finite ones",
        stacklevel=2,
    )


def _known(leaf: ast.expr, answer: bool, statement: ast.If | ast.Assert) -> bool | None:
    finite = _finite(leaf)
    return finite if finite is not None else answer if _only_raises(statement) and not _reads(leaf) else None


@functools.lru_cache(maxsize=64)
def _questions(path: str) -> tuple[ast.If | ast.Assert, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:  # not the source of this code
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.Assert)))


def _leaves(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a test with the answers that make the whole ``wanted``."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _leaves(part, wanted)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not wanted)
    else:
        yield test, wanted


def _holds(leaf: ast.expr, at: Position) -> bool:
    """Whether a part is asked at a place of the code."""
    if isinstance(leaf, ast.Call) and isinstance(leaf.func, ast.Name) and leaf.func.id == "bool" and leaf.args:
        return at == (leaf.lineno, leaf.col_offset) or _holds(leaf.args[0], at)
    return at == (leaf.lineno, leaf.col_offset)


def _reads(leaf: ast.expr) -> bool:
    """Whether numbers are read inside of a larger question, as in ``x.item() > 1``."""
    inner = [node for node in ast.walk(leaf) if node is not leaf]
    return any(isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "item" for node in inner)


def _finite(leaf: ast.expr) -> bool | None:
    """The answer to ``isfinite(x).all()``, ``x.isnan().any()`` and the like, where all numbers are finite."""
    while isinstance(leaf, ast.Call):
        name = getattr(leaf.func, "attr", getattr(leaf.func, "id", ""))
        if name in _FINITE:
            return _FINITE[name]
        first = leaf.args[0] if leaf.args and isinstance(getattr(leaf.func, "value", None), ast.Name) else None
        within = getattr(leaf.func, "value", None) if first is None else first  # torch.any(x) or x.any()
        if name not in ("any", "all", "item", "bool") or within is None:
            return None
        leaf = within
    return None


def _only_raises(statement: ast.If | ast.Assert) -> bool:
    return isinstance(statement, ast.Assert) or all(_says(line) for line in statement.body)


def _says(line: ast.stmt) -> bool:
    if isinstance(line, ast.Raise):
        return True
    called = line.value.func if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call) else None
    return called is not None and getattr(called, "attr", getattr(called, "id", "")) in _SAID
