"""Optimizers that ``optim=`` names in an ``ORTTrainer``'s arguments."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments

from ortgraph.errors import InputError
from ortgraph.optim.fused_adam import FusedAdam
from ortgraph.optim.fused_lamb import FusedLAMB
from ortgraph.trainer.arguments import ORTOptimizerNames


def optimizer_of(args: TrainingArguments) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and keyword arguments for ``args.optim``; ``args.optim_args`` (``momentum=0.9,nesterov=true``) win.

    Raises:
        InputError: ``optim_args`` cannot be read, or names what the optimizer lacks.
    """
    adam: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    kinds: dict[ORTOptimizerNames, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        ORTOptimizerNames.ADAMW_ORT_FUSED: (FusedAdam, adam),
        ORTOptimizerNames.LAMB_ORT: (FusedLAMB, adam),
        ORTOptimizerNames.SGD_ORT: (torch.optim.SGD, {"lr": args.learning_rate, "foreach": True}),
    }
    kind, known = kinds[ORTOptimizerNames(args.optim)]
    return kind, {**known, **_options(args.optim_args, kind)}


def _options(text: str | None, kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    allowed = set(kind.__init__.__code__.co_varnames) - {"self", "params"}
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in allowed:
            raise InputError(f"optim_args: {part!r} for {kind.__name__}", "name=value of its constructor, with commas")
        given[name] = _read(value, part)
    return given


def _read(value: str, part: str) -> Any:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return float(value)
    except ValueError as error:
        raise InputError(f"optim_args: {part!r}", "a number, true or false") from error
