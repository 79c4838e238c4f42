"""Saving and resuming with an ORTTrainer, and what else reads or writes its checkpoints.

All of it: ``pytest -m "slow or not slow" tests/trainer/test_resume.py``.
"""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from ortgraph.trainer import ORTTrainer, ORTTrainingArguments

HALF, STEPS = 3, 6


def trainer_of(small: Any, folder: Any, **given: Any) -> ORTTrainer:
    args = ORTTrainingArguments(**small.settings(folder, optim="adamw_ort_fused", max_steps=STEPS, **given))
    rows = small.data("bert")
    trainer = ORTTrainer(small.model("bert", 0.1), args, train_dataset=rows, eval_dataset=rows)
    if args.precision == "fp16":  # a scale that overflows, backs off, and grows before and after the checkpoint
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    return trainer


@pytest.mark.parametrize(
    ("precision", "schedule"),
    [
        pytest.param("fp32", "linear", marks=pytest.mark.slow),
        pytest.param("bf16", "cosine", marks=pytest.mark.slow),
        ("fp16", "polynomial"),
    ],
)
def test_resuming_is_the_straight_run(small: Any, tmp_path: Any, precision: str, schedule: str) -> None:
    """Bit for bit: with dropout, shuffled rows, a schedule that warms up, decay groups, clipping and the loss scale."""
    given: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": HALF, "precision": precision, "lr_scheduler_type": schedule,
        "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5,
    }  # fmt: skip
    straight = trainer_of(small, tmp_path, **given)
    straight.train()
    (tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json").write_text('{"global')  # killed while it was written
    resumed = trainer_of(small, tmp_path, **given)
    resumed.train(resume_from_checkpoint=True)
    expected, got = straight.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(expected[k], got[k]) for k in expected)
    assert list(small.losses(resumed)[-HALF:]) == list(small.losses(straight)[-HALF:])
    assert resumed.lr_scheduler.get_last_lr() == straight.lr_scheduler.get_last_lr()
    if precision == "fp16":
        assert resumed.accelerator.scaler.state_dict() == straight.accelerator.scaler.state_dict()
        assert straight.accelerator.scaler.get_scale() < 2.0**24, "it backed off"
        assert straight.lr_scheduler.last_epoch < STEPS, "steps were skipped"


def test_nothing_complete_is_said(small: Any, tmp_path: Any) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match="checkpoint"):
        trainer_of(small, tmp_path).train(resume_from_checkpoint=True)
    assert (tmp_path / "checkpoint-3").is_dir()


@pytest.mark.filterwarnings("error::ortgraph.dynamo.backend.FallbackWarning")
def test_evaluation_in_bfloat16(small: Any, tmp_path: Any) -> None:
    """``bf16_full_eval`` casts the model, as Trainer does; the graph is one of bfloat16 weights then."""
    rows, metrics = small.data("bert"), []
    for kind, arguments, more in (
        (Trainer, TrainingArguments, {}),
        (ORTTrainer, ORTTrainingArguments, {"bf16": True}),
    ):
        args = arguments(**small.settings(tmp_path, bf16_full_eval=True, max_steps=2, **more))
        trainer = kind(small.model("bert"), args, train_dataset=rows, eval_dataset=rows)
        metrics.append(trainer.evaluate()["eval_loss"])
        assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert metrics[1] == pytest.approx(metrics[0], rel=0.01)


@pytest.mark.slow
def test_hyperparameter_search_finds_what_trainer_finds(small: Any, tmp_path: Any) -> None:
    optuna = pytest.importorskip("optuna", reason="the search's backend; pip install optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows, found = small.data("bert"), []
    rates = [1e-5, 3e-4]
    for kind, arguments in ((Trainer, TrainingArguments), (ORTTrainer, ORTTrainingArguments)):
        args = arguments(**small.settings(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=4))
        trainer = kind(None, args, train_dataset=rows, eval_dataset=rows, model_init=lambda: small.model("bert"))
        best = trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
            n_trials=2, backend="optuna", direction="minimize", compute_objective=lambda m: m["eval_loss"],
            sampler=optuna.samplers.GridSampler({"learning_rate": rates}, seed=0),
        )  # fmt: skip
        found.append(best)
    assert found[0].hyperparameters == found[1].hyperparameters
    assert found[1].objective == pytest.approx(found[0].objective, rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_goes_to_trainer_and_back(small: Any, tmp_path: Any) -> None:
    """Without dropout, whose masks differ: each finishes what the other began, as its own straight run."""
    runs = {}
    for kind, arguments, optim in (
        (Trainer, TrainingArguments, "adamw_torch"),
        (ORTTrainer, ORTTrainingArguments, "adamw_ort_fused"),
    ):
        for begun in (None, *runs):
            folder = tmp_path / f"{kind.__name__}-{begun}"
            common = small.settings(folder, save_strategy="steps", save_steps=HALF, max_steps=STEPS, optim=optim)
            trainer = kind(small.model("bert"), arguments(**common), train_dataset=small.data("bert"))
            at = f"checkpoint-{HALF}"
            if begun is not None:
                shutil.copytree(tmp_path / f"{begun}-None" / at, pathlib.Path(folder, at))
            trainer.train(resume_from_checkpoint=begun and str(folder / at))
            runs.setdefault(kind.__name__, trainer.model.state_dict()) if begun is None else None
            for name, value in runs["Trainer"].items():
                torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=1e-4, atol=2e-6)
