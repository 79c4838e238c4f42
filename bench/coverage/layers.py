"""Families made of ``torch.nn`` layers."""

from __future__ import annotations

import torch
from torch import nn

from bench.coverage.registry import DROPOUT, Built, family


class Mlp(nn.Module):
    """Two layers with a residual sum, dropout and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 3)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x + self.drop(self.down(torch.tanh(self.up(x))))))


@family("mlp", kind="torch.nn")
def mlp() -> Built:
    batch = (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    return Built(Mlp(), batch, loss=nn.CrossEntropyLoss())


@family("transformer-encoder", kind="torch.nn")
def transformer_encoder() -> Built:
    """nn.TransformerEncoder over token ids with a padding mask."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 3)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=DROPOUT, batch_first=True, activation="gelu")
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding).mean(1))

    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    batch = {"ids": torch.randint(0, 30, (3, 7)), "padding": padding, "target": torch.randint(0, 3, (3,))}
    return Built(Classifier(), batch, loss=nn.CrossEntropyLoss())
