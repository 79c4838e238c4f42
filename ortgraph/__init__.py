"""ortgraph: an optimizing compiler for ONNX training graphs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Eager, so that the function and not the sub-package is what ``ortgraph.capture`` names.
from ortgraph.capture import capture
from ortgraph.graph import Signature, TrainingGraph, load

if TYPE_CHECKING:
    from ortgraph import optim
    from ortgraph.capture import from_onnx
    from ortgraph.compiled import compile
    from ortgraph.dynamo.ort_module import ORTModule
    from ortgraph.manager.optimize import OptimizeResult, optimize
    from ortgraph.runtime.session import TrainingSession
    from ortgraph.trainer import ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments, ORTTrainer, ORTTrainingArguments

__version__ = "0.1.0"
__all__ = [
    "ORTModule",
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
    "ORTTrainer",
    "ORTTrainingArguments",
    "OptimizeResult",
    "Signature",
    "TrainingGraph",
    "TrainingSession",
    "capture",
    "compile",
    "from_onnx",
    "load",
    "optim",
    "optimize",
]

_LAZY = {
    "ORTModule": "ortgraph.dynamo.ort_module",
    "ORTSeq2SeqTrainer": "ortgraph.trainer",
    "ORTSeq2SeqTrainingArguments": "ortgraph.trainer",
    "ORTTrainer": "ortgraph.trainer",
    "ORTTrainingArguments": "ortgraph.trainer",
    "OptimizeResult": "ortgraph.manager.optimize",
    "TrainingSession": "ortgraph.runtime.session",
    "compile": "ortgraph.compiled",
    "from_onnx": "ortgraph.capture.from_onnx",
    "optimize": "ortgraph.manager.optimize",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module("ortgraph.optim")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ortgraph' has no attribute {name!r}")
