"""Training arguments: those of transformers, and what the compiler needs to know."""

from __future__ import annotations

import dataclasses
import logging
import os
from enum import Enum
from typing import Any

import torch
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from ortgraph.errors import InputError
from ortgraph.manager.precision_option import precision_hint

PRECISIONS = ("fp32", "bf16", "fp16")
CHECKPOINTING_BUDGET = "50%"  # what activation checkpointing asks for, said as a memory budget
_LEVELS = {"VERBOSE": "DEBUG", "INFO": "INFO", "WARNING": "WARNING", "ERROR": "ERROR", "FATAL": "CRITICAL"}


class ORTOptimizerNames(str, Enum):
    """Values of ``optim`` beyond those of transformers: ``FusedAdam`` and ``FusedLAMB`` (compiled), and PyTorch's SGD."""

    ADAMW_ORT_FUSED = "adamw_ort_fused"
    LAMB_ORT = "lamb_ort"
    SGD_ORT = "sgd_ort"


@dataclasses.dataclass
class _Compiler:
    """Fields that the trainers' arguments have beyond those of transformers.

    Attributes:
        precision: ``fp32``, ``bf16`` or ``fp16``: the casts are passes over the graph, parameters stay float32. None: what
            ``bf16=True`` or ``fp16=True`` say.
        memory_budget: Bytes, or a percentage of the activations' peak, as in ``ortgraph.optimize``. None: no limit, or 50 %
            where activation checkpointing is asked for.
        pipeline: Preset or text of the pass pipeline.
        remove_padding: What works token by token runs over tokens that are no padding while training
            (docs/torch-compile.md, "Padding"). Pipelines from ``O2`` on.
        loss_in_graph: Compute the loss within the graph and return it alone. ``use_module_with_loss`` is its old name.
        save_onnx: Write the captured training graph to the output folder.
        onnx_prefix: Start of its file name; needed with ``save_onnx``.
        onnx_log_level: Level of ortgraph's log.
    """

    budget_required = True  # no field: whether memory_budget was given, and not only activation checkpointing
    precision: str | None = dataclasses.field(default=None, metadata={"help": "fp32, bf16 or fp16."})
    memory_budget: str | None = dataclasses.field(default=None, metadata={"help": "Bytes, or like 50%."})
    pipeline: str = dataclasses.field(default="O2", metadata={"help": "Preset or text of the pass pipeline."})
    remove_padding: bool = dataclasses.field(default=False, metadata={"help": "Leave padding out while training."})
    loss_in_graph: bool = dataclasses.field(default=True, metadata={"help": "Compute the loss within the graph."})
    use_module_with_loss: bool | None = dataclasses.field(default=None, metadata={"help": "See loss_in_graph."})
    save_onnx: bool = dataclasses.field(default=False, metadata={"help": "Write the captured training graph."})
    onnx_prefix: str | None = dataclasses.field(default=None, metadata={"help": "Start of its file name."})
    onnx_log_level: str = dataclasses.field(default="WARNING", metadata={"help": "Level of ortgraph's log."})

    def __post_init__(self) -> None:
        if self.use_module_with_loss is not None:
            self.loss_in_graph = self.use_module_with_loss
        if self.save_onnx and not self.onnx_prefix:
            raise InputError("save_onnx without onnx_prefix", "give the start of the file's name: onnx_prefix='bert'")
        level = _LEVELS.get(str(self.onnx_log_level).upper())
        if level is None:
            raise InputError(f"onnx_log_level={self.onnx_log_level!r}", f"one of {', '.join(_LEVELS)}")
        logging.getLogger("ortgraph").setLevel(level)
        self.precision = self._chosen_precision()
        checkpointed = self._without_checkpointing()
        self.budget_required = self.memory_budget is not None
        if checkpointed and self.memory_budget is None:
            self.memory_budget = CHECKPOINTING_BUDGET
        if not torch.cuda.is_available():
            self.use_cpu = True  # why: else transformers refuses bf16=True on a machine without a GPU
        self._without_foreign_names()

    def _chosen_precision(self) -> str:
        flags: Any = self
        flagged = "bf16" if flags.bf16 else "fp16" if flags.fp16 else None
        launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        asked = self.precision or flagged or (launcher if launcher in PRECISIONS else "fp32")
        if asked not in PRECISIONS:
            raise InputError(f"precision={asked!r}", precision_hint(asked))
        if flags.bf16 and flags.fp16:
            raise InputError("bf16=True and fp16=True", "choose one")
        if flagged not in (None, asked):
            raise InputError(f"precision={asked!r} and {flagged}=True", "leave one of them out")
        return asked

    def _without_checkpointing(self) -> bool:
        """Whether activation checkpointing is asked for: a budget takes its place, PyTorch's own stays off."""
        flags: Any = self
        asked = any(getattr(flags, name, None) for name in ("gradient_checkpointing", "activation_checkpointing"))
        for name in ("gradient_checkpointing", "activation_checkpointing"):
            if hasattr(flags, name):
                setattr(flags, name, None)
        return asked

    def _without_foreign_names(self) -> None:
        """The checks of transformers, without what it does not know or what would cast or compile a second time."""
        flags: Any = self
        optim, bf16, fp16 = flags.optim, flags.bf16, flags.fp16
        own = optim in {name.value for name in ORTOptimizerNames}
        if own:
            flags.optim = "adamw_torch"
        flags.bf16 = flags.fp16 = False
        super().__post_init__()  # type: ignore[misc]
        flags.bf16, flags.fp16, flags.mixed_precision = bf16, fp16, "no"
        if own:
            flags.optim = ORTOptimizerNames(optim)
        if flags.torch_compile:
            raise InputError("torch_compile=True: the trainer compiles the model itself", "leave torch_compile out")


@dataclasses.dataclass
class ORTTrainingArguments(_Compiler, TrainingArguments):
    """``TrainingArguments`` of an ``ORTTrainer``: see the fields of ``_Compiler``, and transformers for all others."""


@dataclasses.dataclass
class ORTSeq2SeqTrainingArguments(_Compiler, Seq2SeqTrainingArguments):
    """``Seq2SeqTrainingArguments`` of an ``ORTSeq2SeqTrainer``."""
