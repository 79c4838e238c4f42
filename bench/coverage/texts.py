"""Batches of token ids, and how ``transformers`` models get their tiny configurations."""

from __future__ import annotations

from typing import Any

import torch

from bench.coverage.registry import DROPOUT, Built

ROWS, LENGTH, WORDS = 3, 8, 60
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
POSITIONS = {"vocab_size": WORDS, "max_position_embeddings": 40}
DROPS = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}


def configured(name: str, attention: str = "", **options: Any) -> Any:
    """A configuration of ``transformers`` by class name, with an attention implementation where one is given."""
    import transformers

    if attention:
        options["attn_implementation"] = attention
    return getattr(transformers, name)(**options)


def model(name: str, config: Any) -> torch.nn.Module:
    """A model of ``transformers`` by class name, with random weights."""
    import transformers

    return getattr(transformers, name)(config)


def words(rows: int = ROWS, length: int = LENGTH, count: int = WORDS, lowest: int = 3) -> torch.Tensor:
    """Random token ids, none of them special."""
    return torch.randint(lowest, count, (rows, length))


def ends_early(rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    """An attention mask in which the second row is padded at its end."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1, length * 3 // 4 :] = 0
    return mask


def _sequence(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"labels": torch.randint(0, 3, ids.shape[:1])}


def _token(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"labels": torch.randint(0, 3, ids.shape).masked_fill(mask == 0, -100)}


def _question(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    start = torch.randint(0, 4, ids.shape[:1])
    return {"start_positions": start, "end_positions": start + 2}


def _masked(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.3, -100)
    labels[0, 0] = ids[0, 0]
    return {"labels": labels}


def _causal(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"labels": ids.masked_fill(mask == 0, -100)}


def _discriminator(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"labels": torch.randint(0, 2, ids.shape)}


def _choice(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"labels": torch.zeros(1, dtype=torch.long)}


TASKS = {
    "SequenceClassification": _sequence,
    "TokenClassification": _token,
    "QuestionAnswering": _question,
    "MaskedLM": _masked,
    "CausalLM": _causal,
    "ConditionalGeneration": _causal,
    "PreTraining": _discriminator,
    "MultipleChoice": _choice,
}


def text_model(
    architecture: str, task: str, attention: str = "", *, config: str = "", name: str = "", padded: bool = True,
    own_loss: bool = True, **options: Any,
) -> Built:  # fmt: skip
    """``<architecture>For<task>`` with a batch of its task.

    Args:
        architecture: Prefix of the class names, such as ``Bert``.
        task: A key of ``TASKS``.
        attention: Attention implementation; empty leaves the model's own.
        config: Class name of the configuration, where it is not ``<architecture>Config``.
        name: Class name of the model, where it is not ``<architecture>For<task>``.
        padded: Whether a row ends early, with an attention mask that says so.
        own_loss: Whether the model computes the loss; else a cross entropy over its scores.
        options: Of the configuration.
    """
    if task in ("SequenceClassification", "TokenClassification"):
        options["num_labels"] = 3
    settings = configured(config or f"{architecture}Config", attention, **options)
    module = model(name or f"{architecture}For{task}", settings)
    ids, mask = words(), ends_early() if padded else torch.ones(ROWS, LENGTH, dtype=torch.long)
    batch = {"input_ids": ids, **({"attention_mask": mask} if padded else {}), **TASKS[task](ids, mask)}
    if task == "MultipleChoice":
        batch = {k: v if k == "labels" else v[None] for k, v in batch.items()}
    return Built(module, batch, loss=None if own_loss else torch.nn.CrossEntropyLoss())
