"""Small models and data for the trainers' tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

ROWS, WORDS, LENGTH, LABELS = 32, 120, 12, 3
_SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def _bert(dropout: float) -> torch.nn.Module:
    config = transformers.BertConfig(
        **_SIZES, intermediate_size=64, max_position_embeddings=32, num_labels=LABELS, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def _gpt2(dropout: float) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=1, n_head=2, n_positions=32, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _t5(dropout: float) -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16, dropout_rate=dropout,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _vit(dropout: float) -> torch.nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8,
        num_labels=LABELS, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


_MODELS: dict[str, Callable[[float], torch.nn.Module]] = {"bert": _bert, "gpt2": _gpt2, "t5": _t5, "vit": _vit}


def model(name: str, dropout: float = 0.0) -> torch.nn.Module:
    """A small model, the same weights every time."""
    torch.manual_seed(1)
    return _MODELS[name](dropout)


def data(name: str) -> list[dict[str, torch.Tensor]]:
    """Examples for a model; a part of a language model's labels is ignored, a different part in each."""
    generator = torch.Generator().manual_seed(0)

    def words(n: int) -> torch.Tensor:
        return torch.randint(2, WORDS, (n,), generator=generator)

    rows = []
    for i in range(ROWS):
        label = torch.tensor(i % LABELS)
        tokens = words(LENGTH)
        row = {"input_ids": tokens, "attention_mask": torch.ones(LENGTH, dtype=torch.long)}
        if name == "vit":
            row = {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": label}
        elif name == "bert":
            row["labels"] = label
        elif name == "t5":
            row["labels"] = words(8)
        else:
            row["labels"] = torch.where(torch.arange(LENGTH) < i % 5, -100, tokens)
        rows.append(row)
    return rows


def settings(folder: Any, **more: Any) -> dict[str, Any]:
    """Arguments for a short run that logs every step."""
    common = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 8, "logging_steps": 1, "report_to": [],
        "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "seed": 3, "learning_rate": 1e-3,
    }  # fmt: skip
    return {**common, **more}


def losses(trainer: Any) -> np.ndarray:
    """The loss of each step."""
    return np.array([x["loss"] for x in trainer.state.log_history if "loss" in x])


@pytest.fixture(scope="session")
def small() -> Any:
    """The functions of this file."""
    import types

    return types.SimpleNamespace(model=model, data=data, settings=settings, losses=losses)
