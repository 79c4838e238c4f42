"""Text encoders of ``transformers``."""

from __future__ import annotations

import functools
from typing import Any

from bench.coverage.registry import ATTENTION, DROPOUT, family
from bench.coverage.texts import DROPS, POSITIONS, SIZES, WORDS, text_model

USUAL = {**SIZES, **POSITIONS, **DROPS}
_DISTIL = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, **POSITIONS, "dropout": DROPOUT,
    "attention_dropout": DROPOUT, "seq_classif_dropout": DROPOUT, "qa_dropout": DROPOUT,
}  # fmt: skip
ROBERTA = {**USUAL, "pad_token_id": 1}
DEBERTA = {
    **USUAL, "relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": 8, "position_buckets": 4, "pooler_hidden_size": 32, "pooler_dropout": DROPOUT,
}  # fmt: skip
_SHARED = {**USUAL, "embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 1}
_MODERN = {
    **SIZES, **POSITIONS, "num_hidden_layers": 3, "global_attn_every_n_layers": 3, "local_attention": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    "attention_dropout": DROPOUT, "mlp_dropout": DROPOUT, "embedding_dropout": DROPOUT,
}  # fmt: skip
_XLNET = {
    "vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "dropout": DROPOUT,
    "summary_last_dropout": DROPOUT,
}  # fmt: skip
_FLAUBERT = {
    "vocab_size": WORDS, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "dropout": DROPOUT, "attention_dropout": DROPOUT,
    "max_position_embeddings": 40, "n_langs": 1, "pad_index": 2, "layerdrop": 0.0, "summary_first_dropout": DROPOUT,
}  # fmt: skip
_FUNNEL = {
    "vocab_size": WORDS, "d_model": 32, "block_sizes": [1, 1], "n_head": 4, "d_head": 8, "d_inner": 48,
    "num_decoder_layers": 1, "hidden_dropout": DROPOUT, "attention_dropout": DROPOUT, "activation_dropout": DROPOUT,
}  # fmt: skip
_BIGBIRD = {**USUAL, "attention_type": "original_full"}
LONGFORMER = {**USUAL, "attention_window": 4, "pad_token_id": 1}

# name: (architecture, task, attention implementations, options)
TABLE: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "bert-sequence": ("Bert", "SequenceClassification", ATTENTION, USUAL),
    "bert-token": ("Bert", "TokenClassification", ATTENTION, USUAL),
    "bert-qa": ("Bert", "QuestionAnswering", ATTENTION, USUAL),
    "bert-masked-lm": ("Bert", "MaskedLM", ATTENTION, USUAL),
    "bert-choice": ("Bert", "MultipleChoice", ("sdpa",), USUAL),
    "roberta-masked-lm": ("Roberta", "MaskedLM", ATTENTION, ROBERTA),
    "xlm-roberta-token": ("XLMRoberta", "TokenClassification", ATTENTION, ROBERTA),
    "camembert-masked-lm": ("Camembert", "MaskedLM", ATTENTION, ROBERTA),
    "distilbert-sequence": ("DistilBert", "SequenceClassification", ATTENTION, _DISTIL),
    "distilbert-qa": ("DistilBert", "QuestionAnswering", ATTENTION, _DISTIL),
    "albert-sequence": ("Albert", "SequenceClassification", ATTENTION, _SHARED),
    "albert-masked-lm": ("Albert", "MaskedLM", ATTENTION, _SHARED),
    "electra-discriminator": ("Electra", "PreTraining", ATTENTION, {**USUAL, "embedding_size": 16, "padded": False}),
    "mpnet-masked-lm": ("MPNet", "MaskedLM", (), {**USUAL, "relative_attention_num_buckets": 32}),
    "deberta-sequence": ("Deberta", "SequenceClassification", (), {**DEBERTA, "own_loss": False}),
    "deberta-v2-sequence": ("DebertaV2", "SequenceClassification", (), {**DEBERTA, "own_loss": False}),
    "deberta-v2-masked-lm": ("DebertaV2", "MaskedLM", (), {**DEBERTA, "share_att_key": True, "norm_rel_ebd": "layer_norm"}),
    "modernbert-masked-lm": ("ModernBert", "MaskedLM", ATTENTION, _MODERN),
    "squeezebert-sequence": (
        "SqueezeBert", "SequenceClassification", (),
        {**USUAL, "embedding_size": 32, **{f"{p}_groups": 2 for p in ("q", "k", "v", "post_attention", "intermediate", "output")}},
    ),
    "mobilebert-sequence": (
        "MobileBert", "SequenceClassification", (),
        {**USUAL, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16, "num_feedforward_networks": 2},
    ),
    "convbert-sequence": ("ConvBert", "SequenceClassification", (), {**USUAL, "embedding_size": 32, "conv_kernel_size": 3}),
    "layoutlm-token": ("LayoutLM", "TokenClassification", (), {**USUAL, "max_2d_position_embeddings": 64}),
    "megatron-bert-masked-lm": ("MegatronBert", "MaskedLM", (), USUAL),
    "nystromformer-sequence": (
        "Nystromformer", "SequenceClassification", (),
        {**USUAL, "segment_means_seq_len": 8, "num_landmarks": 8, "conv_kernel_size": 3},
    ),
    "xlnet-sequence": ("XLNet", "SequenceClassification", (), _XLNET),
    "flaubert-sequence": ("Flaubert", "SequenceClassification", (), _FLAUBERT),
    "funnel-sequence": ("Funnel", "SequenceClassification", (), _FUNNEL),
    "bigbird-sequence": ("BigBird", "SequenceClassification", (), _BIGBIRD),
    "ernie-masked-lm": ("Ernie", "MaskedLM", ("sdpa",), USUAL),
    "roformer-sequence": ("RoFormer", "SequenceClassification", (), {**USUAL, "embedding_size": 32}),
    "esm-masked-lm": (
        "Esm", "MaskedLM", (), {**USUAL, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 2},
    ),
    "rembert-masked-lm": ("RemBert", "MaskedLM", (), {**USUAL, "input_embedding_size": 16, "output_embedding_size": 24}),
}  # fmt: skip

for _name, (_architecture, _task, _attention, _options) in TABLE.items():
    family(_name, kind="text encoders", requires=("transformers",), attention=_attention)(
        functools.partial(text_model, _architecture, _task, **_options)
    )
