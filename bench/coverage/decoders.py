"""Causal language models of ``transformers``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from bench.coverage.registry import ATTENTION, DROPOUT, Built, family
from bench.coverage.texts import POSITIONS, SIZES, WORDS, text_model

_GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 40, "resid_pdrop": DROPOUT,
    "embd_pdrop": DROPOUT, "attn_pdrop": DROPOUT, "use_cache": False,
}  # fmt: skip
_NEW = {**SIZES, **POSITIONS, "use_cache": False, "attention_dropout": DROPOUT}
_GROUPED = {**_NEW, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
EXPERTS = {
    **_GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "experts_implementation": "batched_mm",
}  # fmt: skip
_HIDDEN = {"hidden_dropout": DROPOUT}
_MAMBA = {"vocab_size": WORDS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "use_cache": False}

# name: (architecture, attention implementations, options)
TABLE: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "gpt2": ("GPT2", ATTENTION, _GPT2),
    "gpt2-sequence": ("GPT2", ("sdpa",), {**_GPT2, "pad_token_id": 0, "name": "GPT2ForSequenceClassification"}),
    "llama": ("Llama", ATTENTION, _GROUPED),
    "mistral": ("Mistral", ATTENTION, {**_GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2", ATTENTION, _GROUPED),
    "qwen3": ("Qwen3", ATTENTION, _GROUPED),
    "gemma": ("Gemma", ATTENTION, _GROUPED),
    "gemma2": ("Gemma2", ("eager",), {**_GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", ATTENTION, {**_GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 8, "config": "Gemma3TextConfig"}),
    "phi": ("Phi", ATTENTION, {**_NEW, "resid_pdrop": DROPOUT, "embd_pdrop": DROPOUT}),
    "phi3": ("Phi3", ATTENTION, {**_GROUPED, "resid_pdrop": DROPOUT, "embd_pdrop": DROPOUT}),
    "opt": (
        "OPT", ATTENTION,
        {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48,
         **POSITIONS, "dropout": DROPOUT, "attention_dropout": DROPOUT, "use_cache": False},
    ),
    "bloom": (
        "Bloom", (),
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "hidden_dropout": DROPOUT,
         "attention_dropout": DROPOUT, "use_cache": False},
    ),
    "gpt-neo": (
        "GPTNeo", ("eager",),
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
         "intermediate_size": 48, "window_size": 4, **POSITIONS, "resid_dropout": DROPOUT, "embed_dropout": DROPOUT,
         "attention_dropout": DROPOUT, "use_cache": False},
    ),
    "gpt-neox": ("GPTNeoX", ATTENTION, {**_NEW, **_HIDDEN}),
    "gpt-j": ("GPTJ", ("eager",), {**_GPT2, "rotary_dim": 4}),
    "falcon": (
        "Falcon", ATTENTION,
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS,
         "hidden_dropout": DROPOUT, "attention_dropout": DROPOUT, "use_cache": False, "new_decoder_architecture": False},
    ),
    "smollm3": ("SmolLM3", ATTENTION, {**_GROUPED, "no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", ATTENTION, _GROUPED),
    "cohere": ("Cohere", ATTENTION, _GROUPED),
    "stablelm": ("StableLm", ATTENTION, {**_GROUPED, **_HIDDEN}),
    "starcoder2": ("Starcoder2", ATTENTION, {**_GROUPED, "residual_dropout": DROPOUT, "embedding_dropout": DROPOUT}),
    "granite": ("Granite", ATTENTION, _GROUPED),
    "mixtral": ("Mixtral", ("sdpa",), {**EXPERTS, "output_router_logits": True}),
    "qwen2-moe": ("Qwen2Moe", ("sdpa",), {**EXPERTS, "shared_expert_intermediate_size": 24, "output_router_logits": True}),
    "qwen3-moe": ("Qwen3Moe", ATTENTION, EXPERTS),
    "olmoe": ("Olmoe", ("sdpa",), EXPERTS),
    "gpt-oss": ("GptOss", ("eager",), {**EXPERTS, "sliding_window": 4}),
    "deepseek-v3": (
        "DeepseekV3", ("sdpa",),
        {**EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
         "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
    ),
    "mamba": ("Mamba", (), _MAMBA),
    "mamba2": ("Mamba2", (), {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4}),
    "rwkv": (
        "Rwkv", (),
        {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 16, "use_cache": False},
    ),
    "recurrent-gemma": ("RecurrentGemma", (), {**_GROUPED, "lru_width": 32, "attention_window_size": 4, "num_hidden_layers": 3}),
    "gpt-bigcode": ("GPTBigCode", ("sdpa",), _GPT2),
    "glm4": ("Glm4", ("sdpa",), _GROUPED),
    "olmo3": ("Olmo3", ("sdpa",), {**_GROUPED, "sliding_window": 4}),
    "falcon-mamba": ("FalconMamba", (), _MAMBA),
    "codegen": ("CodeGen", ("eager",), {**_GPT2, "rotary_dim": 4}),
    "xglm": (
        "XGLM", (),
        {"vocab_size": WORDS, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4,
         "max_position_embeddings": 40, "dropout": DROPOUT, "attention_dropout": DROPOUT, "layerdrop": 0.0,
         "use_cache": False},
    ),
}  # fmt: skip

_NAMES = {"GPT2": "GPT2LMHeadModel"}

for _name, (_architecture, _attention, _options) in TABLE.items():
    _task = "SequenceClassification" if "Sequence" in str(_options.get("name", "")) else "CausalLM"
    _given = {"name": _NAMES.get(_architecture, ""), **_options}
    family(_name, kind="causal language models", requires=("transformers",), attention=_attention)(
        functools.partial(text_model, _architecture, _task, **_given)
    )


def _one_by_one(module: torch.nn.Module) -> None:
    module.config._experts_implementation = "batched_mm"


def grouped(architecture: str, **options: Any) -> Built:
    """A mixture of experts as ``transformers`` runs it by default: rows sorted by expert, in one grouped product."""
    built = text_model(
        architecture, "CausalLM", "sdpa", **{**EXPERTS, "experts_implementation": "grouped_mm"}, **options
    )
    return dataclasses.replace(built, exact=_one_by_one)


for _name, _architecture, _options in (
    ("mixtral-grouped", "Mixtral", {"output_router_logits": True}),
    ("qwen3-moe-grouped", "Qwen3Moe", {}),
):
    family(_name, kind="causal language models", requires=("transformers",))(
        functools.partial(grouped, _architecture, **_options)
    )
