"""Graphs whose values lost their shapes or element types: passes skip them or say so, none asserts."""

import random

import onnx_ir as ir
import pytest
import torch

import ortgraph
from ortgraph.errors import OrtgraphError
from ortgraph.manager.instruments import Instrument

PLANNERS = ("plan-memory", "select-recompute")  # slow, and behind lowering, which refuses


class ByHand(torch.nn.Module):
    """A layer norm, GELU, softmax and loss in their parts, and a tied head."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.scale, self.shift = torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.zeros(8))
        self.qkv, self.wide, self.narrow = torch.nn.Linear(8, 24), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def norm(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * self.scale + self.shift

    def forward(self, ids, labels):
        x = self.norm(self.table(ids))
        q, k, v = (part.view(2, 6, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = torch.exp(q @ k.transpose(-1, -2) / 2)
        p = torch.nn.functional.dropout(scores / scores.sum(-1, keepdim=True), 0.1)
        x = self.norm(x + (p @ v).transpose(1, 2).reshape(2, 6, 8))
        h = self.wide(x)
        x = x + self.narrow(0.5 * h * (1 + torch.erf(h / 2**0.5)))
        return torch.nn.functional.cross_entropy((x @ self.table.weight.T).flatten(0, 1), labels.flatten())


class Forgetful(Instrument):
    """Runs each pass on copies of the graph that forgot a part of their types."""

    def __init__(self, what, share):
        self.what, self.share, self.raised, self.runs = what, share, [], 0

    def before(self, p, graph):
        if p.name in PLANNERS:
            return
        copy, rng = graph.clone(), random.Random(p.name)
        for value in [o for node in copy.graph for o in node.outputs if rng.random() < self.share]:
            if self.what == "dimensions" and value.shape is not None:
                value.shape = ir.Shape([ir.SymbolicDim(None)] * len(value.shape))
            elif self.what == "shapes":
                value.shape = None
            elif self.what == "types":
                value.type = None
        self.runs += 1
        try:
            p(copy.model)
        except OrtgraphError:
            pass
        except Exception as error:  # noqa: BLE001 - each is a finding
            self.raised.append(f"{p.name}: {type(error).__name__} {error}")


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    return ortgraph.capture(ByHand(), {"ids": torch.randint(0, 11, (2, 6)), "labels": torch.randint(0, 11, (2, 6))})


@pytest.mark.parametrize("what", ["shapes", "types", "dimensions"])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.05])
def test_passes_skip_what_they_do_not_know(captured, what, share):
    forgetful = Forgetful(what, share)
    ortgraph.optimize(captured, "O2", optimizer=ortgraph.optim.AdamW(lr=1e-3), instruments=[forgetful], verify="off")
    assert forgetful.raised == [] and forgetful.runs > 50
