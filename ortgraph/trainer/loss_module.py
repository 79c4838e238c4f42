"""The loss of a trainer as the result of one module: forward, loss and backward become one graph."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Trainer

from ortgraph.dynamo.ort_module import ORTModule, run

_CLASSIFIERS = tuple(f"For{of}Classification" for of in ("Sequence", "Image", "Video", "Audio"))


class LossModule(ORTModule):
    """Returns the loss that a trainer computes from the module's outputs, and nothing else.

    Logits that only the loss reads are never handed out, so passes may leave out the rows of ignored labels.

    Args:
        module: The model; parameters and buffers are shared, under its names.
        loss: Function of the model, the inputs and the number of items in the batch.
        options: As for ``ORTModule``.
    """

    def __init__(self, module: torch.nn.Module, loss: Callable[..., torch.Tensor], **options: Any) -> None:
        self.__dict__["_loss"] = loss
        super().__init__(module, **options)

    def _call(self) -> Callable[..., Any]:
        module, loss = self._original, self.__dict__["_loss"]

        def loss_of(inputs: Mapping[str, Any], items: Any) -> torch.Tensor:
            return loss(module, inputs, items)

        return loss_of

    def forward(self, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """The loss, a scalar.

        Args:
            inputs: Arguments of the module by name, labels among them.
            num_items_in_batch: By what a summed loss is divided; a number would mean a graph for each, so it becomes a tensor.
        """
        if isinstance(num_items_in_batch, int | float):
            num_items_in_batch = torch.tensor(float(num_items_in_batch))
        _settle_problem_type(self._original, inputs.get("labels"))
        return run(self._compiled, dict(inputs), num_items_in_batch)


def loss_of_trainer(trainer: Trainer) -> Callable[..., torch.Tensor]:
    """``Trainer.compute_loss`` as a function that Dynamo can trace: of a trainer, it sees what the loss depends on."""
    args = types.SimpleNamespace(
        average_tokens_across_devices=trainer.args.average_tokens_across_devices, n_gpu=trainer.args.n_gpu
    )
    accelerator = types.SimpleNamespace(
        parallelism_config=None, num_processes=trainer.accelerator.num_processes, unwrap_model=_same
    )
    seen = types.SimpleNamespace(
        args=args, accelerator=accelerator, label_smoother=trainer.label_smoother, get_tp_size=trainer.get_tp_size,
        compute_loss_func=trainer.compute_loss_func, model_accepts_loss_kwargs=trainer.model_accepts_loss_kwargs,
    )  # fmt: skip

    def loss(model: torch.nn.Module, inputs: dict[str, Any], items: Any) -> torch.Tensor:
        return Trainer.compute_loss(seen, model, inputs, num_items_in_batch=items)  # type: ignore[arg-type, return-value]

    return loss


def _settle_problem_type(model: Any, labels: Any) -> None:
    """Write into a classifier's configuration what its first forward call would, by the same rule.

    A graph that is compiled before would be compiled once more for the second call.
    """
    config = getattr(model, "config", None)
    if config is None or getattr(model, "loss_type", None) not in _CLASSIFIERS or not isinstance(labels, torch.Tensor):
        return
    if getattr(config, "problem_type", "") is None:
        kind = "single_label" if labels.dtype in (torch.int64, torch.int32) else "multi_label"
        config.problem_type = "regression" if config.num_labels == 1 else f"{kind}_classification"


def _same(model: torch.nn.Module) -> torch.nn.Module:
    return model
