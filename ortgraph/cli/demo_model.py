"""The demo's model: a Transformer encoder that classifies, in plain PyTorch."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortgraph.cli.demo_data import CLASSES, LENGTH, PADDING, VOCABULARY

_EMBEDDING_SCALE = 0.02  # small embeddings move quickly: the demo learns something in a minute


@dataclasses.dataclass(frozen=True)
class Size:
    """Dimensions of the model. The default has 4.3 million parameters."""

    vocabulary: int = VOCABULARY
    length: int = LENGTH
    classes: int = len(CLASSES)
    width: int = 256
    heads: int = 4
    layers: int = 4
    inner: int = 1024
    dropout: float = 0.0


class Layer(nn.Module):
    """One encoder layer: normalization first, then self-attention and a GELU network, each added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attended = nn.Linear(size.width, size.width)
        self.norm_inner = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, size.inner)
        self.down = nn.Linear(size.inner, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [B, S, width], bias [B, 1, 1, S] added to attention scores; returns [B, S, width]."""
        q, k, v = (self._split(part) for part in self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
        mixed = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.attended(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_inner(x)))))

    def _split(self, x: Tensor) -> Tensor:
        """[B, S, width] to [B, heads, S, width / heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Classifier(nn.Module):
    """Token ids to a class: mean over the tokens that are no padding, then a linear layer."""

    def __init__(self, size: Size = Size()) -> None:  # noqa: B008 - frozen
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width, padding_idx=PADDING)
        self.positions = nn.Parameter(torch.zeros(size.length, size.width))
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.classes)
        with torch.no_grad():
            self.words.weight.mul_(_EMBEDDING_SCALE)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """tokens int64 [B, S], labels int64 [B]; returns the mean cross-entropy (scalar) and logits [B, classes]."""
        kept = (tokens != PADDING).to(self.positions.dtype)
        bias = (1.0 - kept)[:, None, None, :] * -1e4
        x = self.words(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, bias)
        weights = (kept / kept.sum(dim=1, keepdim=True)).unsqueeze(-1)
        logits = self.head((self.norm(x) * weights).sum(dim=1))
        return F.cross_entropy(logits, labels), logits


def make_model(size: Size = Size(), seed: int = 0) -> Classifier:  # noqa: B008 - frozen
    """A model with the same initial weights at every call; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Classifier(size)
