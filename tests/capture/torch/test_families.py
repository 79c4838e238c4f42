"""Model families from capture through the presets: every gradient against PyTorch and float64, threads, repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

Built = tuple[nn.Module, dict[str, torch.Tensor]]


def _texts(words: int, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Word ids, and a mask in which the second sentence ends early."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, length * 3 // 4 :] = 0
    return torch.randint(2, words, (batch, length)), mask


def _t5(attention: str, large: bool, **options: Any) -> Built:
    """Encoder and decoder, relative positions, RMS norm; labels end early too."""
    width, layers, batch, length, words = (256, 3, 8, 64, 2048) if large else (32, 1, 3, 8, 60)
    config = transformers.T5Config(
        d_model=width, d_kv=width // 4, d_ff=3 * width, num_layers=layers, num_decoder_layers=layers, num_heads=4,
        vocab_size=words, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False, attn_implementation=attention,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, **options,
    )  # fmt: skip
    ids, mask = _texts(words, batch, length)
    labels = torch.randint(2, words, (batch, length)).masked_fill(mask.flip(0) == 0, -100)
    module = transformers.T5ForConditionalGeneration(config)
    return module, {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _t5_gated(attention: str, large: bool) -> Built:
    """The form of T5 1.1: gated GELU, an untied head."""
    return _t5(attention, large, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def _llama(attention: str, large: bool) -> Built:
    """Grouped queries, rotary positions, RMS norm, SwiGLU; padding is labelled -100."""
    width, layers, batch, length, words = (256, 4, 4, 128, 2048) if large else (32, 1, 3, 8, 60)
    config = transformers.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, intermediate_size=width * 11 // 4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=words, max_position_embeddings=length, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    ids, mask = _texts(words, batch, length)
    module = transformers.LlamaForCausalLM(config)
    return module, {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _masked_lm(attention: str, large: bool) -> Built:
    """BERT with its tied head; a sixth of the words carries a label."""
    width, layers, batch, length, words = (256, 4, 8, 128, 30_522) if large else (32, 1, 3, 8, 60)
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=4 * width,
        vocab_size=words, max_position_embeddings=length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )  # fmt: skip
    ids, mask = _texts(words, batch, length)
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)
    labels[0, 0] = ids[0, 0]
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _resnet(attention: str, large: bool) -> Built:
    """ResNet-18 with batch statistics; there is no attention."""
    sizes, depths, pixels = ([64, 128, 256, 512], [2] * 4, 96) if large else ([8, 16], [1, 1], 32)
    config = transformers.ResNetConfig(
        embedding_size=sizes[0], hidden_sizes=sizes, depths=depths, layer_type="basic", num_labels=10
    )
    images = torch.randn(8 if large else 3, 3, pixels, pixels)
    labels = torch.randint(0, 10, images.shape[:1])
    return transformers.ResNetForImageClassification(config), {"pixel_values": images, "labels": labels}


FAMILIES = {"t5": _t5, "t5-gated": _t5_gated, "llama": _llama, "masked-lm": _masked_lm, "resnet": _resnet}
_ALIKE = {"t5-gated"}  # T5 but for the activation
CASES = [
    pytest.param(n, a, marks=pytest.mark.slow if n in _ALIKE else ())
    for n in FAMILIES
    for a in ("eager", "sdpa")
    if (n, a) != ("resnet", "sdpa")
]


def _built(name: str, attention: str, large: bool) -> Built:
    # The seed matters for the large T5: where rounding moves a ReLU's input across zero, its gradient jumps.
    torch.manual_seed(1)
    module, batch = FAMILIES[name](attention, large)
    return module.train(), batch


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_small_family(check_capture, check_presets, name, attention):
    module, batch = _built(name, attention, large=False)
    graph = check_capture(module, batch, repeats=2)
    check_presets(graph, module, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_large_family(check_capture, check_presets, name, attention):
    module, batch = _built(name, attention, large=True)
    graph = check_capture(module, batch)
    check_presets(graph, module, batch, repeats=10)
