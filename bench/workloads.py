"""Models that the benchmarks run: random weights, dropout off, fixed seed."""

from __future__ import annotations

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
    "gpt2-256x4": lambda **k: gpt2(256, 4, 8, 128, **k),
    "gpt2-32k-128x2": lambda **k: gpt2(128, 2, 4, 128, words=32000, **k),
    "gpt2-32k-512x2": lambda **k: gpt2(512, 2, 4, 128, words=32000, **k),
    "vit-192x6": lambda **k: vit(192, 6, 8, 96, **k),
    "gpt-128x4": lambda **k: gpt_blocks(128, 4, 8, 128),
    "bert-base-8x128": lambda **k: bert(768, 12, 8, 128, **k),
    "resnet-18": lambda **k: resnet(16, 96),
}
