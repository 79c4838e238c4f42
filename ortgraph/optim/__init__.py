"""Optimizers that become part of the graph, learning-rate schedules, and two optimizers for PyTorch scripts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ortgraph.errors import InputError
from ortgraph.optim import schedules
from ortgraph.optim.adamw import AdamW
from ortgraph.optim.base import Group, Optimizer, name_of
from ortgraph.optim.lamb import LAMB
from ortgraph.optim.loss_scale import LossScale
from ortgraph.optim.sgd import SGD

if TYPE_CHECKING:
    from ortgraph.optim.fp16_optimizer import FP16_Optimizer
    from ortgraph.optim.fused_adam import FusedAdam
    from ortgraph.optim.fused_lamb import FusedLAMB

# These need PyTorch: imported on use.
_FOR_SCRIPTS = {"FusedAdam": "fused_adam", "FusedLAMB": "fused_lamb", "FP16_Optimizer": "fp16_optimizer"}
BY_TEXT: dict[str, type[Optimizer]] = {cls.TEXT: cls for cls in (AdamW, LAMB, SGD)}


def parse(text: str) -> Optimizer:
    """The optimizer that a text form stands for: ``adamw(lr=0.01)``, ``lamb``, ``sgd(momentum=0.9)``.

    Raises:
        InputError: The text does not parse, or the optimizer is unknown.
    """
    cls = BY_TEXT.get(name_of(text))
    if cls is None:
        raise InputError(f"optimizer {text!r} does not parse", f"one of {', '.join(BY_TEXT)}, as adamw(lr=0.001)")
    return cls.parse(text)


def __getattr__(name: str) -> Any:
    if name in _FOR_SCRIPTS:
        return getattr(importlib.import_module(f"ortgraph.optim.{_FOR_SCRIPTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "LAMB", "SGD", "AdamW", "FP16_Optimizer", "FusedAdam", "FusedLAMB", "Group", "LossScale", "Optimizer", "parse", "schedules",
]  # fmt: skip
