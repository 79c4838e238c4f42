"""What a step keeps besides weights: running statistics; and what it must not keep twice or compute: tied, frozen weights."""

from __future__ import annotations

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortgraph
from ortgraph.graph.edit import PHASE_KEY

PRESETS = (None, "O2")


def optimized(graph, preset, optimizer=None):
    return ortgraph.optimize(graph, preset or "O0", optimizer=optimizer).graph


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("preset", PRESETS)
def test_running_statistics_follow_pytorch_through_checkpoint_and_export(preset, tmp_path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5, momentum=0.3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 3)
    )
    theirs = copy.deepcopy(module)
    batches = [(3 * numbers(4, 2, 6, 6, seed=i) + i, torch.tensor([0, 2, 1, 1])) for i in range(4)]
    graph = ortgraph.capture(module, batches[0], loss=nn.CrossEntropyLoss())
    step = optimized(graph, preset, ortgraph.optim.SGD(lr=1e-2))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1e-2)
    first, second = ortgraph.TrainingSession(step), ortgraph.TrainingSession(step)
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        optimizer.step()
        if i == 2:
            second.load_checkpoint(first.save_checkpoint(tmp_path / "half"))
        (first if i < 2 else second).step((x, y))
    want = theirs.state_dict()
    for name, value in second.state_dict().items():
        np.testing.assert_allclose(value, want[name].numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
    assert second.state_dict()["1.num_batches_tracked"] == 4
    assert abs(first.state_dict()["1.running_mean"] - second.state_dict()["1.running_mean"]).max() > 0.1
    path = second.export_inference(tmp_path / "model.onnx")
    scores = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(
        None, {"input": x.numpy()}
    )[0]
    with torch.no_grad():
        np.testing.assert_allclose(scores, theirs.eval()(x).numpy(), rtol=1e-4, atol=1e-4)


class Tied(nn.Module):
    """One table at the bottom and at the top, and as the weight of two layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head.weight, self.two.weight = self.table.weight, self.one.weight

    def forward(self, ids, labels):
        h = self.two(torch.tanh(self.one(self.table(ids))))
        return F.cross_entropy(self.head(h), labels)


@pytest.mark.parametrize("preset", PRESETS)
def test_tied_weights_are_one_parameter_with_one_gradient_and_one_state(preset) -> None:
    torch.manual_seed(1)
    module = Tied()
    theirs = copy.deepcopy(module)
    batch = {"ids": torch.tensor([0, 3, 3, 6]), "labels": torch.tensor([1, 3, 0, 6])}
    session = ortgraph.TrainingSession(
        optimized(ortgraph.capture(module, batch), preset, ortgraph.optim.AdamW(lr=1e-2, weight_decay=0.1))
    )
    theirs(**batch).backward()
    want = {n: p.grad.numpy() for n, p in theirs.named_parameters()}
    got = session.gradients(batch)
    assert set(got) == set(want) == {"table.weight", "one.weight", "one.bias", "two.bias"}
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)
    states = session.optimizer_state_dict()
    assert sorted(n for n in states if "/" in n) == sorted(f"{k}/{n}" for k in ("exp_avg", "exp_avg_sq") for n in want)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        theirs(**batch).backward()
        optimizer.step()
        session.step(batch)
    state = session.state_dict()
    assert np.array_equal(state["head.weight"], state["table.weight"])
    for name, value in theirs.state_dict().items():
        np.testing.assert_allclose(state[name], value.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


def frozen(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


class Adapted(nn.Module):
    """A frozen layer with trainable low-rank factors beside it."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.base = frozen(nn.Linear(into, out))
        self.down, self.up = nn.Linear(into, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def backward(graph) -> list:
    return [n for n in graph.graph if n.metadata_props.get(PHASE_KEY) == "backward"]


def products(nodes) -> int:
    return sum(n.op_type in ("MatMul", "Gemm", "FusedMatMul", "LinearGrad") for n in nodes)


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_flows_back_into_a_frozen_base(preset) -> None:
    torch.manual_seed(2)
    head = nn.Linear(9, 3)
    base = frozen(nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 9), nn.Tanh()))
    x, y = numbers(4, 5), torch.tensor([0, 1, 2, 1])
    whole = ortgraph.capture(nn.Sequential(base, head), (x, y), loss=nn.CrossEntropyLoss())
    alone = ortgraph.capture(head, (base(x), y), loss=nn.CrossEntropyLoss())
    assert sorted(n.op_type for n in backward(whole)) == sorted(n.op_type for n in backward(alone))
    step = optimized(whole, preset, ortgraph.optim.AdamW(lr=1e-2))
    assert {p.name for p in step.signature.parameters if p.update} == {"1.weight", "1.bias"}
    session = ortgraph.TrainingSession(step)
    before = session.state_dict()
    session.step((x, y))
    changed = {n for n, v in session.state_dict().items() if not np.array_equal(v, before[n])}
    assert changed == {"1.weight", "1.bias"}
    assert not any("0." in n for n in session.optimizer_state_dict())


def test_adapters_cost_no_gradient_of_the_base() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(Adapted(5, 7), nn.Tanh(), Adapted(7, 11), nn.Tanh(), Adapted(11, 3))
    for layer in (m for m in module if isinstance(m, Adapted)):
        nn.init.normal_(layer.up.weight)
    batch = (numbers(4, 5), torch.tensor([0, 1, 2, 1]))
    graph = ortgraph.capture(module, batch, loss=nn.CrossEntropyLoss())
    F.cross_entropy(module(batch[0]), batch[1]).backward()
    # each layer: gradients of both factors and of what lies between; of the layer's input, through base and
    # factors, in all but the first
    assert products(backward(graph)) == 3 * 3 + 2 * 2
    shapes = {tuple(n.outputs[0].shape) for n in backward(graph) if n.op_type in ("MatMul", "Gemm")}
    assert not shapes & {s for into, out in ((5, 7), (7, 11), (11, 3)) for s in ((into, out), (out, into))}
    got = ortgraph.TrainingSession(graph).gradients(batch)
    want = {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
    assert set(got) == set(want) and len(got) == 6
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)
