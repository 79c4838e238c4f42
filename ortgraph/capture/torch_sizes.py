"""What code asks about symbolic sizes while it is traced: the answers hold for the graph, and not for every batch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_HOW_SIZES_ASK = ("sym_node.py", "symbolic_shapes.py", "recording.py", "contextlib.py")
# Of PyTorch's own questions: equal sizes, clamped slices, numbers of parts. All others are about layout and speed (a
# convolution of 16 rows and more prefers another one).
_MATTERS = ("_decomp/decompositions.py", "_refs/__init__.py")
_SLICE = "_compute_slice_index"
_LAYOUT = ("_prims_common", "fake_tensor.py", "functional_tensor.py", "_python_dispatch.py", "graph.py")
# Attention of one query is the same with and without the causal mask, which is all that it asks for.
_HARMLESS = ("transformers/integrations/sdpa_attention.py",)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A condition on sizes, by the trace's symbols, that held while tracing; and the line that asked, if it is known."""

    condition: sympy.Basic
    place: str

    def text(self, names: Mapping[sympy.Symbol, sympy.Expr]) -> str:
        """The condition in Python, over the user's names of dimensions."""
        return str(PythonPrinter().doprint(self.condition.xreplace(dict(names))))


@contextlib.contextmanager
def watch_sizes() -> Iterator[list[Asked]]:
    """Note what decides about symbolic sizes: each question of the user's code, and those of PyTorch that become guards.

    PyTorch takes sizes for at least 2, and answers questions of the user's code about 0 and 1 without a guard.
    """
    found: dict[sympy.Basic, Asked] = {}
    asked: list[Asked] = []
    evaluate = ShapeEnv.evaluate_expr

    def noting(self: ShapeEnv, expression: Any, *args: Any, **options: Any) -> Any:
        guards = len(self.guards)
        answer = evaluate(self, expression, *args, **options)
        if not isinstance(expression, sympy.Basic) or not expression.free_symbols:
            return answer
        frame = _asking(sys._getframe(1))
        condition = _holds(expression, answer)
        if condition not in found and _decides(frame, condition, len(self.guards) > guards):
            found[condition] = Asked(condition, _place(frame))
            asked.append(found[condition])
        return answer

    ShapeEnv.evaluate_expr = noting  # type: ignore[method-assign, assignment]
    try:
        yield asked
    finally:
        ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign]


def _holds(expression: Any, answer: Any) -> sympy.Basic:
    if answer in (True, sympy.true):
        return expression
    if answer in (False, sympy.false):
        return sympy.Not(expression)
    return sympy.Eq(expression, answer)


def _decides(frame: FrameType, condition: sympy.Basic, is_guard: bool) -> bool:
    file = frame.f_code.co_filename.replace(os.sep, "/")
    if file.endswith(_HARMLESS):
        return False
    if not file.startswith((_TORCH, _OWN)):
        return True
    if isinstance(condition, sympy.Eq):
        return is_guard and not any(part in file for part in _LAYOUT)
    matters = file.endswith(_MATTERS) or frame.f_code.co_name == _SLICE
    return is_guard and matters and not isinstance(condition, sympy.Ne)


def _asking(frame: FrameType) -> FrameType:
    """The frame that compares sizes, without what implements the comparison."""
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.endswith(_HOW_SIZES_ASK) and file != f"{_TORCH}__init__.py" and file != __file__:
            break
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> str:
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith((_TORCH, _OWN, "<")):
        at = at.f_back
    if at is None:
        return ""
    return f"{'/'.join(at.f_code.co_filename.replace(os.sep, '/').split('/')[-2:])}:{at.f_lineno}"
