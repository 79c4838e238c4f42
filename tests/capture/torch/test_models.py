"""Model families: every gradient against PyTorch and float64, at 1 and 2 threads, repeated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortgraph

transformers = pytest.importorskip("transformers")


class Mlp(nn.Module):
    """Two layers with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(x + self.down(torch.tanh(self.up(x))))
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


class Cnn(nn.Module):
    """Convolutions, batch statistics and three kinds of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(6), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2, bias=False)
        self.max, self.average = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1)
        self.head = nn.Linear(8 * 2 * 2, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.max(torch.relu(self.norm1(self.first(x))))
        h = self.average(torch.relu(self.norm2(self.second(h))))
        h = nn.functional.adaptive_avg_pool2d(h, (2, 2))
        logits = self.head(h.flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


class Classifier(nn.Module):
    """nn.TransformerEncoder over token ids with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        logits = self.head(h.mean(1))
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def test_mlp(check_capture):
    torch.manual_seed(0)
    graph = check_capture(Mlp(), {"x": torch.randn(5, 6), "y": torch.randint(0, 3, (5,))})
    assert graph.signature.outputs == ("logits",)


def test_cnn(check_capture):
    torch.manual_seed(0)
    module = Cnn().train()
    check_capture(module, {"x": torch.randn(4, 3, 16, 16), "y": torch.randint(0, 4, (4,))}, repeats=20)


def test_transformer_encoder(check_capture):
    torch.manual_seed(0)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    batch = {"ids": torch.randint(0, 30, (3, 7)), "padding": padding, "y": torch.randint(0, 3, (3,))}
    check_capture(Classifier().train(), batch)


def _bert(cls: str, attention: str, dropout: float = 0.0, **options) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=60,
        max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation=attention, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, cls)(config).train()


def _text(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": torch.randint(0, 60, (3, 8)), "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert_masked_lm(check_capture, attention):
    module = _bert("BertForMaskedLM", attention)
    labels = torch.randint(0, 60, (3, 8))
    labels[0, ::2] = -100
    graph = check_capture(module, _text(labels), repeats=20 if attention == "sdpa" else 3)
    tied = {p.name: p.tied for p in graph.signature.parameters if p.tied}
    assert "cls.predictions.decoder.weight" in tied["bert.embeddings.word_embeddings.weight"]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert_classifier(check_capture, attention):
    check_capture(_bert("BertForSequenceClassification", attention, num_labels=3), _text(torch.tensor([0, 2, 1])))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gpt2(check_capture, attention):
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=60, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 60, (2, 9))
    check_capture(module, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_vit(check_capture, attention):
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.ViTForImageClassification(config).train()
    check_capture(module, {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([1, 3, 0])})


class Recurrent(nn.Module):
    """An LSTM into a GRU: taken apart into their steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(5, 6, batch_first=True), nn.GRU(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(x)[0])[0].square().mean()


class UpAndDown(nn.Module):
    """Strided, transposed and one-dimensional convolutions, PReLU, Bilinear."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(2, 4, 3, 2, 1), nn.ConvTranspose2d(4, 2, 3, 2, 1, output_padding=1)
        self.line, self.prelu, self.pair = nn.Conv1d(2, 3, 3), nn.PReLU(), nn.Bilinear(3, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.prelu(self.down(x)))
        z = self.line(y[:, :, 0])
        return (y - x).abs().mean() + z.square().mean() + self.pair(z.mean(2), z.amax(2)).sum()


@pytest.mark.parametrize("module", [Recurrent, UpAndDown])
def test_further_layers(check_capture, module):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5) if module is Recurrent else torch.randn(2, 2, 8, 8)
    check_capture(module(), {"x": x}, repeats=2)


def _further(name: str, attention: str):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "attn_implementation": attention}
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (2, 8))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    if name == "roberta":
        config = transformers.RobertaConfig(
            **sizes, num_attention_heads=2, vocab_size=60, max_position_embeddings=40, pad_token_id=1,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.RobertaForMaskedLM(config), text
    if name == "llama":
        config = transformers.LlamaConfig(
            **sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=60, max_position_embeddings=40
        )
        return transformers.LlamaForCausalLM(config), text
    if name == "t5":
        config = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=60, dropout_rate=0.0,
            decoder_start_token_id=0, attn_implementation=attention,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    images = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}
    return transformers.ResNetForImageClassification(config), images


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["roberta", "llama", "t5", "resnet"])
def test_further_families(check_capture, name, attention):
    module, batch = _further(name, attention)
    check_capture(module.train(), batch, repeats=20)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_dropout_models_repeat_bit_for_bit(run_captured, attention):
    batch = _text(torch.randint(0, 60, (3, 8)))
    graph = ortgraph.capture(_bert("BertForMaskedLM", attention, dropout=0.1), batch)
    runs = run_captured(graph, batch, 2, repeats=20)
    assert all(all((run[k] == runs[0][k]).all() for k in run) for run in runs)
