"""Models as people write them: language models, taggers, graphs, densities, losses of derivatives."""

from __future__ import annotations

import torch
from torch import distributions, nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from bench.coverage.registry import DROPOUT, Built, family
from bench.coverage.texts import WORDS


def _words(count: int, length: int) -> torch.Tensor:
    return torch.randint(3, WORDS, (count, length))


class LanguageModel(nn.Module):
    """Two LSTM layers with dropout between them, and the table of words as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, 12), nn.LSTM(12, 12, 2, dropout=DROPOUT, batch_first=True)
        self.drop, self.head = nn.Dropout(DROPOUT), nn.Linear(12, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        seen = self.drop(self.layers(self.drop(self.embed(ids)))[0])
        return F.cross_entropy(self.head(seen).flatten(0, 1), following.flatten())


@family("lstm-language-model", kind="written by hand")
def lstm_language_model() -> Built:
    return Built(LanguageModel(), {"ids": _words(3, 7), "following": _words(3, 7)})


class Packed(nn.Module):
    """Rows of different lengths, packed: the last states of both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers, self.head = nn.GRU(8, 10, bidirectional=True, batch_first=True), nn.Linear(20, 3)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        last = self.layers(packed)[1]
        return self.head(torch.cat([last[0], last[1]], -1))


@family("packed-gru", kind="written by hand")
def packed_gru() -> Built:
    batch = {"ids": _words(4, 6), "lengths": torch.tensor([3, 6, 1, 4]), "target": torch.randint(0, 3, (4,))}
    return Built(Packed(), batch, loss=nn.CrossEntropyLoss())


class Tagger(nn.Module):
    """A conditional random field over the scores of a small encoder: log-sum-exp in a loop."""

    def __init__(self, tags: int = 4) -> None:
        super().__init__()
        self.embed, self.score = nn.Embedding(WORDS, 8), nn.Linear(8, tags)
        self.step, self.first = nn.Parameter(torch.randn(tags, tags) / 5), nn.Parameter(torch.randn(tags) / 5)

    def forward(self, ids: torch.Tensor, tags: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        if tags.max() >= self.step.shape[0]:
            raise ValueError("unknown tag")
        scores = self.score(self.embed(ids).cumsum(1).tanh())
        every = self.first + scores[:, 0]
        given = self.first[tags[:, 0]] + scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, ids.shape[1]):
            later = torch.logsumexp(every.unsqueeze(2) + self.step + scores[:, t].unsqueeze(1), 1)
            every = torch.where(inside[:, t : t + 1], later, every)
            own = self.step[tags[:, t - 1], tags[:, t]] + scores[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            given = given + own * inside[:, t]
        return (torch.logsumexp(every, 1) - given).mean()


@family("crf-tagger", kind="written by hand")
def crf_tagger() -> Built:
    inside = torch.arange(5) < torch.tensor([[5], [3], [2]])
    return Built(Tagger(), {"ids": _words(3, 5), "tags": torch.randint(0, 4, (3, 5)), "inside": inside})


class GraphAttention(nn.Module):
    """Attention over the edges of a graph, by scattered maxima and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.score, self.head = nn.Linear(5, 8, bias=False), nn.Linear(16, 1), nn.Linear(8, 3)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        seen, (start, end), count = self.project(nodes), edges.unbind(0), nodes.shape[0]
        scores = F.leaky_relu(self.score(torch.cat([seen[start], seen[end]], -1)), 0.2).squeeze(-1)
        largest = torch.full((count,), -1e9).scatter_reduce(0, end, scores.detach(), "amax")
        weights = (scores - largest[end]).exp()
        sums = seen.new_zeros(count).scatter_add(0, end, weights)
        shares = (weights / (sums[end] + 1e-9)).unsqueeze(-1)
        return self.head(torch.zeros_like(seen).index_add(0, end, seen[start] * shares))


@family("graph-attention", kind="written by hand")
def graph_attention() -> Built:
    batch = {"nodes": torch.randn(6, 5), "edges": torch.randint(0, 6, (2, 14)), "target": torch.randint(0, 3, (6,))}
    return Built(GraphAttention(), batch, loss=nn.CrossEntropyLoss())


class Variational(nn.Module):
    """A variational autoencoder in terms of ``torch.distributions``, whose checks are on."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 6), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        found = distributions.Normal(mean, F.softplus(spread))
        made = distributions.Bernoulli(logits=self.decode(found.rsample()))
        far = distributions.kl_divergence(found, distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean)))
        return far.sum(-1).mean() - made.log_prob((x > 0).to(x.dtype)).sum(-1).mean()


@family("variational-autoencoder", kind="written by hand")
def variational_autoencoder() -> Built:
    return Built(Variational(), (torch.randn(5, 12),))


class Critic(nn.Module):
    """A critic with a penalty on its gradients, which the loss differentiates again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, real: torch.Tensor, made: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        between = (share * real + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(self.body(between).sum(), between, create_graph=True)
        return self.body(made).mean() - self.body(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


@family("gradient-penalty", kind="written by hand")
def gradient_penalty() -> Built:
    return Built(Critic(), {"real": torch.randn(5, 4), "made": torch.randn(5, 4), "share": torch.rand(5, 1)})
