"""Drop-in trainers for Hugging Face scripts. Imports ``transformers`` and ``torch`` on first use of a name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortgraph.trainer.arguments import ORTOptimizerNames, ORTSeq2SeqTrainingArguments, ORTTrainingArguments
    from ortgraph.trainer.trainer import ORTSeq2SeqTrainer, ORTTrainer

__all__ = [
    "ORTOptimizerNames",
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
    "ORTTrainer",
    "ORTTrainingArguments",
]

_WHERE = {
    "ORTOptimizerNames": "arguments",
    "ORTSeq2SeqTrainer": "trainer",
    "ORTSeq2SeqTrainingArguments": "arguments",
    "ORTTrainer": "trainer",
    "ORTTrainingArguments": "arguments",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ortgraph.trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ortgraph.trainer.{_WHERE[name]}"), name)
