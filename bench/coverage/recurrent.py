"""Families of recurrent layers, alignment losses, embedding bags and sampling."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench.coverage.registry import DROPOUT, Built, family

WORDS = 30


class Recurrent(nn.Module):
    """Token ids through an embedding and recurrent layers to classes."""

    def __init__(self, kind: str, layers: int, both: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = getattr(nn, kind)(8, 12, layers, batch_first=True, bidirectional=both)
        self.drop, self.head = nn.Dropout(DROPOUT), nn.Linear(24 if both else 12, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.layers(self.embed(ids))[0]).mean(1))


def _classifier(kind: str, layers: int, both: bool) -> Built:
    batch = {"ids": torch.randint(0, WORDS, (4, 9)), "target": torch.randint(0, 3, (4,))}
    dynamic = {"ids": {0: "batch"}, "target": {0: "batch"}}
    return Built(Recurrent(kind, layers, both), batch, loss=nn.CrossEntropyLoss(), dynamic=dynamic)


@family("lstm-classifier", kind="torch.nn")
def lstm_classifier() -> Built:
    return _classifier("LSTM", 1, False)


@family("gru-classifier", kind="torch.nn")
def gru_classifier() -> Built:
    """Two layers in both directions."""
    return _classifier("GRU", 2, True)


@family("ctc-recurrent", kind="torch.nn")
def ctc_recurrent() -> Built:
    """Convolution, LSTM and CTC with padded labels and lengths."""

    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Conv1d(6, 12, 3, stride=2, padding=1)
            self.layers, self.head = nn.LSTM(12, 10, bidirectional=True), nn.Linear(20, 7)

        def forward(
            self, sound: torch.Tensor, labels: torch.Tensor, frames: torch.Tensor, counts: torch.Tensor
        ) -> torch.Tensor:
            steps = torch.relu(self.front(sound)).permute(2, 0, 1)
            scores = self.head(self.layers(steps)[0]).log_softmax(2)
            return F.ctc_loss(scores, labels, frames, counts, zero_infinity=True)

    batch = {
        "sound": torch.randn(3, 6, 24), "labels": torch.randint(1, 7, (3, 4)), "frames": torch.tensor([12, 9, 12]),
        "counts": torch.tensor([4, 2, 3]),
    }  # fmt: skip
    return Built(Speech(), batch)


@family("embedding-bags", kind="torch.nn")
def embedding_bags() -> Built:
    """Two towers of bags, compared by the distances of all pairs."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.EmbeddingBag(WORDS, 8), nn.EmbeddingBag(WORDS, 8, mode="sum", padding_idx=0)
            self.project = nn.Linear(8, 8)

        def forward(self, left: torch.Tensor, right: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            far = torch.cdist(self.project(self.left(left)), self.right(right, starts))
            return F.cross_entropy(-far, torch.arange(far.shape[0]))

    batch = {
        "left": torch.randint(0, WORDS, (4, 5)), "right": torch.randint(0, WORDS, (11,)),
        "starts": torch.tensor([0, 3, 4, 9]),
    }  # fmt: skip
    return Built(Towers(), batch)


@family("spatial-transformer", kind="torch.nn")
def spatial_transformer() -> Built:
    """An image sampled at places that the model computes."""

    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look, self.place = nn.Conv2d(1, 4, 3, stride=2), nn.Linear(4, 6)
            self.read, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            seen = torch.tanh(self.look(image)).mean((2, 3))
            theta = self.place(seen).reshape(-1, 2, 3) + torch.eye(2, 3)
            grid = F.affine_grid(theta, list(image.shape), align_corners=False)
            moved = F.grid_sample(image, grid, align_corners=False)
            return self.head(torch.tanh(self.read(moved)).mean((2, 3)))

    batch = (torch.randn(4, 1, 9, 8), torch.randint(0, 3, (4,)))
    return Built(Sampler(), batch, loss=nn.CrossEntropyLoss())
