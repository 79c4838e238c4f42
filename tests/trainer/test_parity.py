"""An ORTTrainer against transformers' Trainer: the same seeds, the same losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from ortgraph.trainer import ORTTrainer, ORTTrainingArguments

STEPS = 50
TOLERANCE = 1e-5  # of the loss of a step, relative


def trained(small: Any, folder: Any, name: str, ours: bool, **given: Any) -> Any:
    kind, arguments = (ORTTrainer, ORTTrainingArguments) if ours else (Trainer, TrainingArguments)
    args = arguments(**small.settings(folder, **given))
    trainer = kind(small.model(name), args, train_dataset=small.data(name), eval_dataset=small.data(name))
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "vit"])
def test_losses_are_those_of_trainer(small: Any, tmp_path: Any, name: str) -> None:
    steps = {"max_steps": STEPS}
    theirs = trained(small, tmp_path, name, False, **steps)
    ours = trained(small, tmp_path, name, True, optim="adamw_ort_fused", **steps)
    expected, got = small.losses(theirs), small.losses(ours)
    assert len(got) == STEPS
    assert expected[-1] < expected[0]  # it learns
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=TOLERANCE)
    predicted, wanted = ours.predict(small.data(name)[:6]), theirs.predict(small.data(name)[:6])
    first = [p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions for p in (predicted, wanted)]
    np.testing.assert_allclose(first[0], first[1], rtol=1e-3, atol=1e-4)


def test_accumulation_is_one_large_batch(small: Any, tmp_path: Any) -> None:
    """Labels are ignored in a different part of each row, so only the number of items in the whole batch is right."""
    large = trained(small, tmp_path, "gpt2", True, per_device_train_batch_size=8, max_steps=6)
    parts = trained(
        small, tmp_path, "gpt2", True, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=6
    )
    np.testing.assert_allclose(small.losses(parts), small.losses(large), rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_label_smoothing(small: Any, tmp_path: Any, name: str) -> None:
    theirs, ours = (trained(small, tmp_path, name, o, label_smoothing_factor=0.1) for o in (False, True))
    np.testing.assert_allclose(small.losses(ours), small.losses(theirs), rtol=TOLERANCE)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=TOLERANCE)


def test_a_loss_of_ones_own(small: Any, tmp_path: Any) -> None:
    def weighted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        weight = torch.tensor([1.0, 2.0, 3.0])
        summed = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight, reduction="sum")
        return summed / num_items_in_batch

    runs = []
    for kind, arguments in ((Trainer, TrainingArguments), (ORTTrainer, ORTTrainingArguments)):
        args = arguments(**small.settings(tmp_path))
        trainer = kind(small.model("bert"), args, train_dataset=small.data("bert"), compute_loss_func=weighted)
        trainer.train()
        runs.append(small.losses(trainer))
    np.testing.assert_allclose(runs[1], runs[0], rtol=TOLERANCE)


def test_an_overridden_loss_gets_the_outputs(small: Any, tmp_path: Any) -> None:
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**{k: v for k, v in inputs.items() if k != "labels"})
        loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"]) * 2
        return (loss, outputs) if return_outputs else loss

    runs = []
    for kind, arguments in ((Trainer, TrainingArguments), (ORTTrainer, ORTTrainingArguments)):
        own = type("Own", (kind,), {"compute_loss": compute_loss})
        trainer = own(small.model("bert"), arguments(**small.settings(tmp_path)), train_dataset=small.data("bert"))
        trainer.train()
        runs.append(small.losses(trainer))
    np.testing.assert_allclose(runs[1], runs[0], rtol=TOLERANCE)
