"""Models that the benchmarks run: random weights, dropout off, fixed seed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def bert(
    hidden: int = 256, layers: int = 4, batch: int = 8, sequence: int = 128, attention: str = "sdpa"
) -> dict[str, Any]:
    """BERT sequence classification, 30,522 words, heads of 64."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = attention
    module = transformers.BertForSequenceClassification(config).train()
    return {
        "module": module,
        "batch": {
            "input_ids": torch.randint(0, config.vocab_size, (batch, sequence)),
            "attention_mask": torch.ones(batch, sequence, dtype=torch.long),
            "labels": torch.randint(0, 2, (batch,)),
        },
    }


def bert_masked(
    hidden: int = 256,
    layers: int = 4,
    batch: int = 8,
    sequence: int = 128,
    attention: str = "sdpa",
    share: float = 0.15,
) -> dict[str, Any]:
    """BERT masked language model, 30,522 words, tied head; ``share`` of the positions have a label, the rest -100."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = attention
    ids = torch.randint(0, config.vocab_size, (batch, sequence))
    labels = torch.full_like(ids, -100)
    chosen = torch.randperm(batch * sequence)[: round(share * batch * sequence)]
    labels.view(-1)[chosen] = ids.view(-1)[chosen]
    mask = torch.ones(batch, sequence, dtype=torch.long)
    return {
        "module": transformers.BertForMaskedLM(config).train(),
        "batch": {"input_ids": ids, "attention_mask": mask, "labels": labels},
    }


def t5(
    hidden: int = 256, layers: int = 3, batch: int = 8, sequence: int = 64, attention: str = "sdpa"
) -> dict[str, Any]:
    """T5 with as many decoder as encoder layers, ReLU, 8,192 words, tied head; inputs and targets of one length."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=hidden,
        d_kv=64,
        d_ff=4 * hidden,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=hidden // 64,
        vocab_size=8192,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    config._attn_implementation = attention
    ids, labels = torch.randint(1, config.vocab_size, (2, batch, sequence))
    mask = torch.ones(batch, sequence, dtype=torch.long)
    return {
        "module": transformers.T5ForConditionalGeneration(config).train(),
        "batch": {"input_ids": ids, "attention_mask": mask, "labels": labels},
    }


def llama(
    hidden: int = 256, layers: int = 4, batch: int = 4, sequence: int = 128, attention: str = "sdpa"
) -> dict[str, Any]:
    """Llama: rotary embeddings, RMS norm, SwiGLU of ratio 8 / 3, 8,192 words, a head of its own."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        intermediate_size=-(-8 * hidden // (3 * 32)) * 32,
        vocab_size=8192,
        max_position_embeddings=sequence,
        use_cache=False,
    )
    config._attn_implementation = attention
    ids = torch.randint(0, config.vocab_size, (batch, sequence))
    return {
        "module": transformers.LlamaForCausalLM(config).train(),
        "batch": {"input_ids": ids, "labels": ids.clone()},
    }


def gpt2(
    hidden: int = 256, layers: int = 4, batch: int = 8, sequence: int = 128, attention: str = "sdpa", words: int = 8192
) -> dict[str, Any]:
    """GPT-2 language model with a tied head."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=hidden,
        n_layer=layers,
        n_head=hidden // 64,
        vocab_size=words,
        n_positions=sequence,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    config._attn_implementation = attention
    ids = torch.randint(0, config.vocab_size, (batch, sequence))
    return {"module": transformers.GPT2LMHeadModel(config).train(), "batch": {"input_ids": ids, "labels": ids.clone()}}


def vit(
    hidden: int = 192, layers: int = 6, batch: int = 8, pixels: int = 96, attention: str = "sdpa"
) -> dict[str, Any]:
    """ViT image classification, patches of 8, 10 classes."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        image_size=pixels,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = attention
    return {
        "module": transformers.ViTForImageClassification(config).train(),
        "batch": {"pixel_values": torch.randn(batch, 3, pixels, pixels), "labels": torch.randint(0, 10, (batch,))},
    }


def gpt_blocks(
    width: int = 128, layers: int = 4, batch: int = 8, sequence: int = 128, heads: int = 4
) -> dict[str, Any]:
    """The memory reports' GPT: pre-norm blocks without mask, float input, 10 classes on the mean over the sequence."""
    import torch

    from bench.blocks import GptClassifier

    torch.manual_seed(0)
    return {
        "module": GptClassifier(width, layers, heads, classes=10).train(),
        "batch": {"x": torch.randn(batch, sequence, width), "labels": torch.randint(0, 10, (batch,))},
    }


def resnet(batch: int = 16, pixels: int = 96) -> dict[str, Any]:
    """ResNet-18 image classification with batch statistics, 10 classes."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    module = transformers.ResNetForImageClassification(config).train()
    return {
        "module": module,
        "batch": {"pixel_values": torch.randn(batch, 3, pixels, pixels), "labels": torch.randint(0, 10, (batch,))},
    }


WORKLOADS: dict[str, Callable[..., dict[str, Any]]] = {
    "bert-256x4": lambda **k: bert(256, 4, 8, 128, **k),
    "bert-768x4": lambda **k: bert(768, 4, 4, 128, **k),
    "bert-base": lambda **k: bert(768, 12, 2, 64, **k),
    "bert-mlm-256x4": lambda **k: bert_masked(256, 4, 8, 128, **k),
    "gpt2-256x4": lambda **k: gpt2(256, 4, 8, 128, **k),
    "gpt2-32k-128x2": lambda **k: gpt2(128, 2, 4, 128, words=32000, **k),
    "gpt2-32k-512x2": lambda **k: gpt2(512, 2, 4, 128, words=32000, **k),
    "t5-256x3": lambda **k: t5(256, 3, 8, 64, **k),
    "llama-256x4": lambda **k: llama(256, 4, 4, 128, **k),
    "vit-192x6": lambda **k: vit(192, 6, 8, 96, **k),
    "gpt-128x4": lambda: gpt_blocks(128, 4, 8, 128),
    "bert-base-8x128": lambda **k: bert(768, 12, 8, 128, **k),
    "resnet-18": lambda: resnet(16, 96),
    "resnet-18-b8": lambda: resnet(8, 96),
}
# The workloads of docs/benchmarks.md, in its order.
MEASURED = (
    "bert-256x4", "bert-768x4", "gpt2-256x4", "t5-256x3", "llama-256x4", "vit-192x6", "resnet-18-b8", "bert-mlm-256x4",
)  # fmt: skip


def attentions(workload: str) -> tuple[str, ...]:
    """Attention implementations that a workload can be built with; one empty name where there is no choice."""
    if workload not in WORKLOADS:
        return ("",)
    takes = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(WORKLOADS[workload]).parameters.values())
    return ("sdpa", "eager") if takes else ("",)


def build(workload: str, attention: str = "") -> dict[str, Any]:
    """``module``, ``batch`` and perhaps ``loss`` of a workload by name, or of a user's ``file.py:function``."""
    if workload in WORKLOADS:
        return WORKLOADS[workload](**({"attention": attention} if attention else {}))
    from ortgraph.capture.build_spec import load_build

    spec = load_build(workload)
    return {"module": spec.module, "batch": spec.batch, "loss": spec.loss}
