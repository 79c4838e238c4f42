"""Modules of the memory benchmarks, written with plain PyTorch operators."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class GptBlock(nn.Module):
    """Pre-norm block: softmax attention without mask, separate projections, GELU feed-forward of ratio 4."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, dim=-1)
        x = x + self.project((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GptClassifier(nn.Module):
    """Blocks, and a linear classifier on the mean over the sequence; returns the cross-entropy."""

    def __init__(self, width: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean(1)), labels)
