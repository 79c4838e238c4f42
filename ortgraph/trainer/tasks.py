"""The old argument ``feature``: a model's task by name, and what the model returns then."""

from __future__ import annotations

import torch

from ortgraph.errors import InputError

# Part of a class's name that says its task; the first output is the loss, the others are predictions.
_HEADS = {
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
    "multiple-choice": "ForMultipleChoice",
    "masked-lm": "ForMaskedLM",
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "seq2seq-lm": "ForConditionalGeneration",
    "image-classification": "ForImageClassification",
}
_SAME = {
    "text-classification": "sequence-classification",
    "text-generation": "causal-lm",
    "text2text-generation": "seq2seq-lm",
    "fill-mask": "masked-lm",
    "causal-lm-with-past": "causal-lm",
    "seq2seq-lm-with-past": "seq2seq-lm",
}


def check_feature(feature: str, model: torch.nn.Module) -> None:
    """Check that a model is one of a task.

    Raises:
        InputError: The task is unknown, has no loss, or is another one than the model's.
    """
    task = _SAME.get(feature, feature)
    if task not in _HEADS:
        hint = "it has no loss" if task in ("default", "feature-extraction") else f"one of {', '.join(sorted(_HEADS))}"
        raise InputError(f"feature={feature!r}", hint)
    heads = _HEADS[task]
    name = type(model).__name__
    if not any(head in name for head in (heads if isinstance(heads, tuple) else (heads,))):
        raise InputError(f"feature={feature!r} for a {name}", "the model's own task, or leave feature out")
