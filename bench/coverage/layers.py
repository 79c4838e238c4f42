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


class UNet(nn.Module):
    """Two levels: group norms, SiLU, a transposed convolution on the way up, and the skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self._block(3, 8), self._block(8, 16)
        self.down, self.up = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last, self.head = self._block(16, 8), nn.Conv2d(8, 4, 1)
        self.drop = nn.Dropout2d(DROPOUT)

    def _block(self, channels: int, filters: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, filters, 3, padding=1), nn.GroupNorm(4, filters), nn.SiLU())

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        skip = self.first(pixels)
        deep = self.drop(self.second(self.down(skip)))
        return self.head(self.last(torch.cat([skip, self.up(deep)], 1)))


@family("unet", kind="torch.nn")
def unet() -> Built:
    """A class for each pixel."""
    batch = (torch.randn(2, 3, 12, 12), torch.randint(0, 4, (2, 12, 12)))
    return Built(UNet(), batch, loss=nn.CrossEntropyLoss())
