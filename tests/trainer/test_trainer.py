"""ORTTrainer: resuming, precision, budgets, tasks, files."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import TrainingArguments

import ortgraph
from ortgraph.errors import InputError
from ortgraph.trainer import (
    ORTSeq2SeqTrainer,
    ORTSeq2SeqTrainingArguments,
    ORTTrainer,
    ORTTrainingArguments,
)


def trainer_of(small: Any, folder: Any, name: str = "bert", dropout: float = 0.0, **given: Any) -> ORTTrainer:
    args = ORTTrainingArguments(**small.settings(folder, **given))
    rows = small.data(name)
    return ORTTrainer(small.model(name, dropout), args, train_dataset=rows, eval_dataset=rows)


def test_dropout_differs_by_step_and_repeats_by_seed(small: Any, tmp_path: Any) -> None:
    runs = []
    for seed in (3, 3, 4):  # a trainer seeds when it is made
        trainer = trainer_of(small, tmp_path, dropout=0.3, learning_rate=0.0, max_steps=16, seed=seed)
        trainer.train()
        runs.append(list(small.losses(trainer)))
    assert runs[0] == runs[1] != runs[2]
    first, second = runs[0][:8], runs[0][8:]  # two epochs over the same rows, weights unchanged
    assert abs(np.mean(first) - np.mean(second)) > 1e-4  # the order of the rows alone changes last bits


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_classifier_is_compiled_once(small: Any, tmp_path: Any, name: str) -> None:
    """Its first forward call writes the problem's type into the configuration, which graphs depend on."""
    trainer = trainer_of(small, tmp_path, name, max_steps=3)
    before = counters["stats"]["unique_graphs"]
    trainer.train()
    assert counters["stats"]["unique_graphs"] == before + 1
    assert trainer.model.config.problem_type == "single_label_classification"


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_low_precision_learns_alike(small: Any, tmp_path: Any, precision: str) -> None:
    full, low = (trainer_of(small, tmp_path, precision=p, optim="adamw_ort_fused") for p in ("fp32", precision))
    full.train()
    low.train()
    assert all(p.dtype == torch.float32 for p in low.model.parameters())
    difference = np.abs(small.losses(low) - small.losses(full)) / small.losses(full)
    assert 0 < difference.max() < 0.02
    assert (low.accelerator.scaler is not None) == (precision == "fp16")


@pytest.mark.slow
def test_a_budget_changes_no_loss(small: Any, tmp_path: Any) -> None:
    """Given as a number it must be met, or the run would stop."""
    runs = [
        trainer_of(small, tmp_path, "t5", per_device_train_batch_size=32, memory_budget=budget, max_steps=4)
        for budget in (None, "90%")
    ]
    for trainer in runs:
        trainer.train()
    assert list(small.losses(runs[0])) == list(small.losses(runs[1]))


@pytest.mark.slow
def test_checkpointing_of_a_graph_that_is_too_small(small: Any, tmp_path: Any) -> None:
    plain, tight = (trainer_of(small, tmp_path, activation_checkpointing=on, max_steps=2) for on in (None, True))
    plain.train()
    with pytest.warns(UserWarning, match="planned without a budget"):
        tight.train()
    assert list(small.losses(plain)) == list(small.losses(tight))


def test_the_training_graph_is_saved(small: Any, tmp_path: Any) -> None:
    trainer = trainer_of(small, tmp_path, save_onnx=True, onnx_prefix="bert", max_steps=1)
    trainer.train()
    path = tmp_path / "bert_training.onnx"
    assert len(ortgraph.load(path).graph) > 10
    written = path.stat().st_mtime_ns
    again = trainer_of(small, tmp_path, save_onnx=True, onnx_prefix="bert", max_steps=1)
    with pytest.warns(UserWarning, match="is there already"):
        again.train()
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize("limit", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_the_norm_of_gradients_is_without_the_loss_scale(small: Any, tmp_path: Any, limit: float) -> None:
    norms = []
    for precision in ("fp32", "fp16"):
        trainer = trainer_of(small, tmp_path, precision=precision, max_grad_norm=limit, max_steps=1)
        trainer.train()
        norms.append(next(x["grad_norm"] for x in trainer.state.log_history if "grad_norm" in x))
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


def test_plain_arguments_are_enough(small: Any, tmp_path: Any) -> None:
    args = TrainingArguments(**small.settings(tmp_path, max_steps=2))
    trainer = ORTTrainer(model=small.model("bert"), args=args, train_dataset=small.data("bert"))
    assert np.isfinite(trainer.train().training_loss)
    with pytest.raises(InputError, match="ORTTrainingArguments"):
        args = TrainingArguments(**small.settings(tmp_path, bf16=True))
        ORTTrainer(model=small.model("bert"), args=args)


@pytest.mark.slow
def test_training_twice_goes_on(small: Any, tmp_path: Any) -> None:
    trainer = trainer_of(small, tmp_path, max_steps=4)
    first = trainer.train().training_loss
    assert trainer.train().training_loss < first
    assert type(trainer.model).__name__ == "BertForSequenceClassification"


def test_feature_is_checked(small: Any, tmp_path: Any) -> None:
    args = ORTTrainingArguments(**small.settings(tmp_path))
    for name in ("sequence-classification", "text-classification"):
        ORTTrainer(small.model("bert"), args, feature=name)
    for name in ("causal-lm", "default", "nonsense"):
        with pytest.raises(InputError, match="feature"):
            ORTTrainer(small.model("bert"), args, feature=name)


def test_seq2seq_generates(small: Any, tmp_path: Any) -> None:
    given = {"predict_with_generate": True, "generation_max_length": 6, "max_steps": 2}
    args = ORTSeq2SeqTrainingArguments(**small.settings(tmp_path, **given))
    rows = small.data("t5")
    trainer = ORTSeq2SeqTrainer(small.model("t5"), args, train_dataset=rows, eval_dataset=rows)
    assert isinstance(trainer, ORTTrainer)
    trainer.train()
    predicted = trainer.predict(rows[:4])
    assert predicted.predictions.shape[0] == 4
    assert np.isfinite(predicted.metrics["test_loss"])
    trainer.model.eval()
    batch = torch.stack([r["input_ids"] for r in rows[:4]])
    words = trainer.model.generate(batch, max_length=6).numpy()
    assert np.array_equal(predicted.predictions[:, : words.shape[1]], words)


def test_best_model_is_loaded(small: Any, tmp_path: Any) -> None:
    given = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 4}
    trainer = trainer_of(small, tmp_path, load_best_model_at_end=True, **given)
    trainer.train()
    best = pathlib.Path(trainer.state.best_model_checkpoint)
    assert best.is_dir()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)
