"""The three models whose joint graph is planned by PyTorch and by us: a GPT, a residual CNN and a U-Net."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.traceback import annotate


class _Blocks(nn.Module):
    """Runs blocks, each marked in the traced graph, so that a checkpoint on every block can be laid over it."""

    def call(self, number: int, block: nn.Module, *inputs: Tensor) -> Tensor:
        with annotate({"block": number}):
            return block(*inputs)


class GptBlock(nn.Module):
    """Pre-norm attention without mask and GELU feed-forward of ratio 4, one projection for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(_Blocks):
    """Blocks over a float input, a last norm, a 256-wide head and the mean square."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.call(number, block, x)
        return self.head(self.norm(x)).square().mean()


def _norm(channels: int) -> nn.BatchNorm2d:
    # Running statistics are updates of buffers, which the partitioner's function cannot hold.
    return nn.BatchNorm2d(channels, track_running_stats=False)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), _norm(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), _norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Cnn(_Blocks):
    """Residual blocks of one width and the mean square."""

    def __init__(self, blocks: int = 8, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for number, block in enumerate(self.blocks):
            x = self.call(number, block, x)
        return self.head(x.mean((2, 3))).square().mean()


class DoubleConv(nn.Module):
    def __init__(self, read: int, made: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(read, made, 3, padding=1, bias=False), _norm(made)
        self.conv2, self.norm2 = nn.Conv2d(made, made, 3, padding=1, bias=False), _norm(made)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class UNet(_Blocks):
    """Three levels down and up again with skips, transposed convolutions, and the mean square."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        widths = [channels << level for level in range(4)]
        self.down = nn.ModuleList(DoubleConv(r, m) for r, m in zip([3, *widths], widths, strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[2::-1])
        self.up = nn.ModuleList(DoubleConv(2 * w, w) for w in widths[2::-1])
        self.head = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for number, block in enumerate(self.down):
            x = self.call(number, block, F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        x = skips.pop()
        for number, (grow, block) in enumerate(zip(self.grow, self.up, strict=True)):
            x = self.call(len(self.down) + number, block, torch.cat([grow(x), skips.pop()], 1))
        return self.head(x).square().mean()


# Name, model, shape of the input.
MODELS: dict[str, tuple[Callable[[], _Blocks], tuple[int, ...]]] = {
    "GPT 4x128": (Gpt, (8, 128, 128)),
    "CNN 8 blocks": (Cnn, (2, 3, 16, 16)),
    "U-Net": (UNet, (2, 3, 64, 64)),
}
