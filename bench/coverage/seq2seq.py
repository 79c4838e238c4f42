"""Encoders with decoders, of ``transformers``."""

from __future__ import annotations

import functools
from typing import Any

from bench.coverage.registry import ATTENTION, DROPOUT, Built, family
from bench.coverage.texts import WORDS, configured, ends_early, model, words

_T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": WORDS,
    "dropout_rate": DROPOUT, "decoder_start_token_id": 0, "use_cache": False, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}  # fmt: skip
_BART = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 40,
    "dropout": DROPOUT, "attention_dropout": DROPOUT, "activation_dropout": DROPOUT, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "use_cache": False, "decoder_start_token_id": 2,
}  # fmt: skip
_PAD = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

# name: (model, configuration, attention implementations, options)
TABLE: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", ATTENTION, _T5),
    "t5-gated": (
        "T5ForConditionalGeneration", "T5Config", ATTENTION,
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", ("sdpa",), _T5),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", (), _T5),
    "longt5": (
        "LongT5ForConditionalGeneration", "LongT5Config", (), {**_T5, "local_radius": 3, "global_block_size": 4},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", ATTENTION, {**_BART, **_PAD}),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", ATTENTION, {**_BART, **_PAD}),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", ATTENTION, {**_BART, "pad_token_id": 0}),
    "marian": ("MarianMTModel", "MarianConfig", ATTENTION, {**_BART, "pad_token_id": 0, "decoder_vocab_size": WORDS}),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", ATTENTION, {**_BART, **_PAD}),
    "plbart": ("PLBartForConditionalGeneration", "PLBartConfig", ("sdpa",), {**_BART, **_PAD}),
    "blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", ATTENTION, {**_BART, "pad_token_id": 0}),
}  # fmt: skip


def translation(name: str, config: str, attention: str = "", **options: Any) -> Built:
    """A model with a padded source and a padded target."""
    module = model(name, configured(config, attention, **options))
    ids, mask, target = words(), ends_early(), words(length=6)
    labels = target.masked_fill(ends_early(length=6).flip(0) == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Built(module, batch)


for _name, (_model, _config, _attention, _options) in TABLE.items():
    family(_name, kind="encoder-decoder", requires=("transformers",), attention=_attention)(
        functools.partial(translation, _model, _config, **_options)
    )
