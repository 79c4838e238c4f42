"""Recurrent layers: dropout between layers, and packed sequences, against PyTorch and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

import ortgraph
from ortgraph.ops.random import reference_mask

LENGTHS = torch.tensor([2, 4, 1])
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Layers(nn.Module):
    """Loss of outputs and last states; ``packed`` leaves out what lies behind a row's length."""

    def __init__(self, kind: str, packed: bool, **options):
        super().__init__()
        self.layers = KINDS[kind](3, 4, batch_first=True, **options)
        self.packed = packed

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return weighed(*self.layers(x))
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, last = self.layers(packed)
        out, again = rnn.pad_packed_sequence(out, batch_first=True, padding_value=0.5, total_length=x.shape[1])
        return weighed(out, last) + again.sum()


def weighed(out, last):
    parts = [out, *(last if isinstance(last, tuple) else (last,))]
    return sum((p * torch.cos(torch.arange(p.numel(), dtype=p.dtype)).reshape(p.shape)).sum() for p in parts)


def layer_by_layer(module: Layers, x: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    """Forward with given masks between layers, each layer of its own."""
    given = module.layers
    states = []
    for n in range(given.num_layers):
        one = type(given)(x.shape[-1], given.hidden_size, batch_first=True, bidirectional=given.bidirectional).to(
            x.dtype
        )
        own = {k: getattr(given, k.replace("_l0", f"_l{n}")) for k, _ in one.named_parameters()}
        x, last = torch.func.functional_call(one, own, (x,))
        states.append(last)
        x = x * masks[n] if n < len(masks) else x
    joined = (
        [torch.cat(parts) for parts in zip(*states, strict=True)] if isinstance(states[0], tuple) else torch.cat(states)
    )
    return weighed(x, tuple(joined) if isinstance(joined, list) else joined)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers(kind, run_captured):
    torch.manual_seed(1)
    module = Layers(kind, False, num_layers=3, bidirectional=True, dropout=0.4)
    batch = {"x": torch.randn(3, 4, 3), "lengths": LENGTHS}
    graph = ortgraph.capture(module, batch)
    drawn = [n for n in graph.graph if n.op_type == "Dropout" and n.domain == "ortgraph"]
    assert [n.attributes["ratio"].as_float() for n in drawn] == pytest.approx([0.4, 0.4])
    key, step = (
        int(graph.values[s.input]) for k in ("random_key", "random_step") for s in graph.signature.states if s.kind == k
    )
    shape = (4, 3, 8)  # steps first
    masks = [torch.from_numpy(reference_mask(key, step, n, shape, 0.4)).transpose(0, 1) / 0.6 for n in range(2)]
    assert all(0 < (m == 0).float().mean() < 1 for m in masks)
    got = run_captured(graph, batch)[0]
    double = layer_by_layer(module.double(), batch["x"].double(), [m.double() for m in masks])
    double.backward()
    assert got[graph.signature.loss].item() == pytest.approx(double.item(), rel=1e-5)
    for name, output in graph.signature.gradients.items():
        exact = module.get_parameter(name).grad.numpy()
        assert np.linalg.norm(got[output] - exact) <= 2e-6 * np.linalg.norm(exact), name


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind, check_capture):
    torch.manual_seed(2)
    module = Layers(kind, True, num_layers=2, bidirectional=True, bias=kind != "RNN")
    batch = {"x": torch.randn(3, 4, 3), "lengths": LENGTHS}
    other = {**batch, "lengths": torch.tensor([4, 1, 3])}
    check_capture(module, batch, run_batches=(batch, other))


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer, self.read = nn.GRU(3, 4), read

    def forward(self, x, lengths):
        return self.read(self.layer(rnn.pack_padded_sequence(x, lengths, enforce_sorted=False))[0])


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda p: rnn.pad_packed_sequence(p)[0].sum(), r"longest row.*test_recurrent\.py:\d+.*total_length=x\.shape"),
        (lambda p: F.relu(p.data).sum(), r"relu of the data of a packed sequence.*test_recurrent\.py:\d+"),
        (lambda p: p.data.sum(), "sum of the data of a packed sequence"),
    ],
)
def test_what_depends_on_the_number_of_packed_steps_is_refused(read, words):
    with pytest.raises(ortgraph.errors.UnsupportedError, match=f"(?s){words}"):
        ortgraph.capture(Reads(read), {"x": torch.randn(4, 3, 3), "lengths": LENGTHS})
