"""PyTorch functions that are traced as other PyTorch code with the same results.

For functions whose own implementation has no shapes without data, has no translation of its backward half, or is
decomposed wrongly by PyTorch. The replacements are plain differentiable code, so that autograd makes their gradients.
They stand in ``torch_substitutes_<family>.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Called like the function that it replaces. NotImplemented leaves a call to the original.
Replacement = Callable[..., Any]

FAMILIES = (
    "checks", "loss", "modules", "order", "distance", "embedding", "experts", "pooling", "recurrent", "sampling",
    "sparse",
)  # fmt: skip

_TABLE: dict[Any, Replacement] = {}
_ATTRIBUTES: list[tuple[Any, str, Any]] = []
_loaded = False


def substitute(*functions: Any) -> Callable[[Replacement], Replacement]:
    """Register a replacement for functions of ``torch``, and for custom operators by name (``namespace.operator``)."""

    def decorate(replacement: Replacement) -> Replacement:
        for function in functions:
            if function in _TABLE:
                raise ValueError(f"{function} has two replacements")
            _TABLE[function] = replacement
        return replacement

    return decorate


def substitutes() -> dict[Any, Replacement]:
    """All replacements by function."""
    global _loaded
    if not _loaded:
        for family in FAMILIES:
            importlib.import_module(f"ortgraph.capture.torch_substitutes_{family}")
        _loaded = True
    return _TABLE


def in_place_of(owner: Any, name: str) -> Callable[[Any], Any]:
    """Register a value for an attribute of PyTorch's own code, for the time of a trace."""

    def decorate(value: Any) -> Any:
        _ATTRIBUTES.append((owner, name, value))
        return value

    return decorate


class Substituting(TorchFunctionMode):
    """Replaces functions while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._table = substitutes()
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Substituting:
        self._before = [(owner, name, getattr(owner, name)) for owner, name, _ in _ATTRIBUTES]
        for owner, name, value in _ATTRIBUTES:
            setattr(owner, name, value)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for owner, name, value in self._before:
            setattr(owner, name, value)
        super().__exit__(*raised)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self._table.get(str(func) if isinstance(func, torch._ops.OpOverloadPacket) else func)
        if replacement is not None:
            result = replacement(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))
