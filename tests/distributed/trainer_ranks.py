"""What each rank does for test_trainer: ORTTrainer and transformers' Trainer under one launch, their losses saved.

Labels are ignored in a part of each row that differs, so only the number of items over all ranks gives the right mean.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments

from ortgraph.trainer import ORTTrainer, ORTTrainingArguments

WORDS, LENGTH, ROWS = 40, 8, 32


class Words(torch.nn.Module):
    """A next-word model that compiles quickly, with the loss of a language model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(WORDS, 16), torch.nn.Linear(16, WORDS)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, **kwargs: Any) -> Any:
        logits = self.head(torch.nn.functional.gelu(self.table(input_ids)))
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items = kwargs.get("num_items_in_batch")
        return {"loss": total / ((labels != -100).sum() if items is None else items), "logits": logits}


def model(small: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    if small:
        return Words()
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(ROWS):
        tokens = torch.randint(2, WORDS, (LENGTH,), generator=generator)
        labels = torch.where(torch.arange(LENGTH) < (3 * i) % 7, -100, tokens)
        rows.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels})
    return rows


def losses(ours: bool, folder: str, small: bool, **given: Any) -> tuple[list[float], float]:
    """Loss of each step, and of the evaluation (0 for the small model)."""
    kind, arguments = (ORTTrainer, ORTTrainingArguments) if ours else (Trainer, TrainingArguments)
    settings = {
        "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "seed": 3, "disable_tqdm": True,
        "optim": "adamw_ort_fused" if ours else "adamw_torch",
    }  # fmt: skip
    args = arguments(folder, **{**settings, **given})
    assert args.world_size == 2, "the launcher started something else"
    trainer = kind(model(small), args, train_dataset=data(), eval_dataset=data())
    trainer.train()
    evaluated = 0.0 if small else trainer.evaluate()["eval_loss"]
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], evaluated


def without_compiled_communication() -> None:
    """DeepSpeed would compile its shared-memory all-reduce; gloo does the same sums."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    folder, size, *given = sys.argv[1:]
    options: dict[str, Any] = {"deepspeed": given[0]} if given else {}
    if given and size == "small":
        without_compiled_communication()
    found = {side: losses(side == "ours", folder, size == "small", **options) for side in ("theirs", "ours")}
    torch.save(found, f"{folder}/rank-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
