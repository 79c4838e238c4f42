"""Models that cannot become one graph, each with the error that says so and what to do instead."""

from __future__ import annotations

import functools
from typing import Any

from bench.coverage.decoders import EXPERTS
from bench.coverage.encoders import DEBERTA, LONGFORMER, ROBERTA, USUAL
from bench.coverage.registry import family
from bench.coverage.texts import POSITIONS, SIZES, WORDS, text_model

# name: (architecture, task, words of the error, options)
TABLE: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # scores of unmasked words are picked, as many as there are
    "electra-masked": ("Electra", "PreTraining", "boolean mask", {**USUAL, "embedding_size": 16}),
    # its loss looks for rows that have a label
    "deberta-v2-own-loss": ("DebertaV2", "SequenceClassification", "data-dependent", DEBERTA),
    # asks whether any word attends to all others
    "longformer": ("Longformer", "SequenceClassification", "data-dependent", LONGFORMER),
    # a Fourier transform
    "fnet": ("FNet", "SequenceClassification", "complex", {**SIZES, **POSITIONS}),
    # clips the labels that it is given, in place
    "splinter": ("Splinter", "QuestionAnswering", "in place", USUAL),
    # moves a layer to another type while it runs
    "switch-transformer": (
        "SwitchTransformers", "ConditionalGeneration", "Linear.weight",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS, "num_experts": 4,
         "decoder_start_token_id": 0},
    ),
    # integer arithmetic that looks at ranges
    "ibert": ("IBert", "SequenceClassification", "data-dependent", ROBERTA),
    # a loop over the experts that have words
    "mixtral-loop": ("Mixtral", "CausalLM", "batched_mm", {**EXPERTS, "experts_implementation": "eager"}),
}  # fmt: skip

for _name, (_architecture, _task, _refused, _options) in TABLE.items():
    family(_name, kind="refused", requires=("transformers",), refused=_refused)(
        functools.partial(text_model, _architecture, _task, **_options)
    )
