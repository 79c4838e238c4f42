"""ORTTrainer: transformers' Trainer on compiled graphs."""

from __future__ import annotations

import logging
import pathlib
import warnings
from typing import Any

import torch
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainingArguments

from ortgraph.dynamo.ort_module import ORTModule
from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph
from ortgraph.trainer.arguments import ORTOptimizerNames, ORTTrainingArguments, _Compiler
from ortgraph.trainer.checkpoints import last_complete
from ortgraph.trainer.loss_module import LossModule, loss_of_trainer
from ortgraph.trainer.optimizers import optimizer_of
from ortgraph.trainer.tasks import check_feature

logger = logging.getLogger(__name__)


class ORTTrainer(Trainer):
    """``transformers.Trainer`` whose model is trained and evaluated through compiled graphs.

    Everything of ``Trainer`` holds: callbacks, schedules, accumulation, clipping, checkpoints, search, distribution. A
    subclass that overrides ``compute_loss`` keeps its loss in PyTorch and gets the model's outputs from the graph.

    Args:
        model, args, ...: As for ``Trainer``; ``args`` are ``ORTTrainingArguments``, or plain ``TrainingArguments`` with the
            compiler's defaults.
        feature: The model's task under its old name (``"sequence-classification"``, ...). It is checked against the model.
        tokenizer: The old name of ``processing_class``.

    Raises:
        InputError: ``feature`` does not fit the model, or an argument contradicts another.
    """

    def __init__(
        self,
        model: PreTrainedModel | torch.nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        feature: str | None = None,
        tokenizer: Any = None,
        **others: Any,
    ) -> None:
        if args is None:
            args = ORTTrainingArguments("tmp_trainer")
        if tokenizer is not None:
            others.setdefault("processing_class", tokenizer)
        if not isinstance(args, _Compiler) and args.mixed_precision != "no":
            raise InputError(
                f"{type(args).__name__} with {args.mixed_precision}", "ORTTrainingArguments, which cast in the graph"
            )
        if feature is not None and model is not None:
            check_feature(feature, model)
        super().__init__(model, args, *positional, **others)
        self._modules_of: tuple[Any, dict[str, ORTModule]] = (None, {})
        self._saved_onnx = False
        if getattr(args, "precision", "fp32") == "fp16":
            # why: Accelerate makes a scaler for its own autocast only
            self.accelerator.scaler = torch.amp.GradScaler("cpu")

    # --- the compiled modules ------------------------------------------------------------------------------------

    def _compiled(self, kind: str) -> ORTModule:
        """The model's module ``"loss"``, ``"outputs"`` (of training) or ``"evaluation"``; made once per model."""
        model: Any = self.model
        known, made = self._modules_of
        if known is not model:
            made = {}
            self._modules_of = (model, made)
        # why: bf16_full_eval casts the model in place; low weights are the graph's as they are
        low = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
        key = f"{kind} of low weights" if low else kind
        if key not in made:
            options = self._options(training=kind != "evaluation")
            options.update({"precision": "fp32"} if low else {})
            made[key] = (
                LossModule(model, loss_of_trainer(self), **options) if kind == "loss" else ORTModule(model, **options)
            )
        return made[key]

    def _options(self, training: bool) -> dict[str, Any]:
        args: Any = self.args
        if not isinstance(args, _Compiler):
            return {}
        hooks = [self._save_onnx] if training and args.save_onnx and self.is_world_process_zero() else []
        options = {"pipeline": args.pipeline, "precision": args.precision, "after_capture": hooks}
        if not training:
            return options  # nothing is kept for a backward half
        return {
            **options, "memory_budget": args.memory_budget, "budget_required": args.budget_required,
            "remove_padding": args.remove_padding,
        }  # fmt: skip

    def _save_onnx(self, graph: TrainingGraph) -> TrainingGraph:
        """Write the first graph that is captured; a file that is there already stays, with a warning."""
        args: Any = self.args
        path = pathlib.Path(args.output_dir) / f"{args.onnx_prefix}_training.onnx"
        if self._saved_onnx:
            return graph
        self._saved_onnx = True
        if path.exists():
            warnings.warn(f"{path} is there already and stays: give another onnx_prefix, or remove it", stacklevel=2)
            return graph
        path.parent.mkdir(parents=True, exist_ok=True)
        graph.save(path)
        logger.info("training graph: %s", path)
        return graph

    @property
    def _loss_in_graph(self) -> bool:
        own = type(self).compute_loss is ORTTrainer.compute_loss
        return own and getattr(self.args, "loss_in_graph", True)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer``'s; ``resume_from_checkpoint=True`` takes the last checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete(str(self.args.output_dir)) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # --- what Trainer asks ---------------------------------------------------------------------------------------

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled module takes the model's place while Trainer wraps it, and makes its optimizer."""
        original = self.model
        self.model = self.model_wrapped = self._compiled("loss" if self._loss_in_graph else "outputs")
        try:
            prepared = super()._prepare_for_training(*args, **kwargs)
        finally:
            self.model = original
        self.callback_handler.model = original
        return prepared

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss, by the graph that holds it while training; else by ``Trainer``, from the model's outputs."""
        inner = self.accelerator.unwrap_model(model)
        if return_outputs or not isinstance(inner, LossModule):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return model(inputs, num_items_in_batch)

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer``'s, through a graph of the forward half."""
        return super().prediction_step(self._compiled("evaluation") if model is self.model else model, *args, **kwargs)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: PreTrainedModel | None = None) -> tuple[Any, Any]:
        """As ``Trainer``'s; those of ``ORTOptimizerNames`` are ortgraph's."""
        if isinstance(args.optim, ORTOptimizerNames):
            return optimizer_of(args)
        return Trainer.get_optimizer_cls_and_kwargs(args, model)

    def _clip_grad_norm(self, model: Any) -> Any:
        """As ``Trainer``'s, of gradients without the loss scale."""
        self._unscale()
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As ``Trainer``'s, of gradients without the loss scale."""
        if grad_norm is None:  # nothing was clipped
            self._unscale()
        return super()._get_grad_norm(model, grad_norm)

    def _unscale(self) -> None:
        if getattr(self.args, "precision", "fp32") == "fp16":
            for optimizer in self.accelerator._optimizers:
                self.accelerator.scaler.unscale_(optimizer.optimizer)


class ORTSeq2SeqTrainer(Seq2SeqTrainer, ORTTrainer):
    """``transformers.Seq2SeqTrainer`` on compiled graphs; ``generate`` runs the model in PyTorch."""

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``Seq2SeqTrainer``'s; the loss by a graph of the forward half."""
        return super().prediction_step(self._compiled("evaluation") if model is self.model else model, *args, **kwargs)
