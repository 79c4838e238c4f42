"""The table of ATen → ONNX rules. The rules themselves stand in ``torch_rules_<family>.py``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# A rule takes the translation and the operator's arguments by their schema names (all of them, defaults filled in)
# and returns one value per result of the operator. None stands for an absent result.
Rule = Callable[..., Any]

FAMILIES = (
    "elementwise",
    "activation",
    "create",
    "movement",
    "strided",
    "indexing",
    "matmul",
    "reduction",
    "normalization",
    "loss",
    "convolution",
    "pooling",
    "attention",
    "random",
    "draws",
    "special",
    "ctc",
)

_RULES: dict[str, Rule] = {}
_loaded = False


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen overloads (``add.Tensor``)."""

    def decorate(function: Rule) -> Rule:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"aten.{target} has two rules")
            _RULES[target] = function
        return function

    return decorate


def rules() -> dict[str, Rule]:
    """All rules by overload name without the ``aten.`` prefix."""
    global _loaded
    if not _loaded:
        for family in FAMILIES:
            importlib.import_module(f"ortgraph.capture.torch_rules_{family}")
        _loaded = True
    return _RULES
