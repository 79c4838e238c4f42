"""What capture takes: batches, losses, names of inputs and outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortgraph
from ortgraph.graph.verify import verify

# --- batches and losses -----------------------------------------------------------------------------------------


def test_criterion_module_takes_the_last_item(check_capture, scores, plain_loss):
    module, x, y = scores
    graph = ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss())
    assert graph.signature.inputs == ("x", "target") and graph.signature.outputs == ("output",)
    batch = {"x": x, "target": y}
    check_capture(module, batch, loss=nn.CrossEntropyLoss(), loss_of=plain_loss)
    check_capture(module, batch, loss=F.cross_entropy, loss_of=plain_loss)


@pytest.mark.parametrize(
    "loss", [lambda out, y: F.cross_entropy(out, y), lambda out, y_true: F.cross_entropy(out, y_true)]
)
def test_a_function_of_output_and_target_is_told_by_a_name(check_capture, scores, plain_loss, loss):
    module, x, y = scores
    check_capture(module, {"x": x, "target": y}, loss=loss, loss_of=plain_loss)


def test_criterion_weights_are_a_buffer(run_captured, scores):
    module, x, y = scores
    weight = torch.tensor([1.0, 2.0, 3.0])
    graph = ortgraph.capture(module, (x, y), loss=nn.CrossEntropyLoss(weight=weight))
    assert [b.name for b in graph.signature.buffers] == ["loss.weight"]
    got = run_captured(graph, {"x": x, "target": y})[0]["loss"]
    assert got == pytest.approx(F.cross_entropy(module(x), y, weight=weight).item(), rel=1e-6)


def test_callable_loss_of_outputs_and_batch(check_capture, scores):
    module, x, y = scores
    batch = {"x": x, "y": y}

    def of(module, batch):
        return F.cross_entropy(module(batch["x"]), batch["y"])

    check_capture(module, batch, loss=lambda outputs, batch: F.cross_entropy(outputs, batch["y"]), loss_of=of)
    graph = ortgraph.capture(module, batch, loss=lambda outputs: outputs.square().mean())
    assert graph.signature.loss == "loss" and graph.signature.inputs == ("x", "y")


def test_tuple_item_that_forward_does_not_take_goes_to_the_loss(run_captured, scores):
    module, x, y = scores
    graph = ortgraph.capture(module, (x, None, y), loss=lambda outputs, batch: F.cross_entropy(outputs, batch[2]))
    assert graph.signature.inputs == ("x", "batch_2")
    got = run_captured(graph, {"x": x, "batch_2": y})[0]["loss"]
    assert got == pytest.approx(F.cross_entropy(module(x), y).item(), rel=1e-6)


class Several(nn.Module):
    """A tuple, a dict or an object, as asked."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(5, 3), kind

    def forward(self, batch: dict, factor: float = 1.0):
        scores = self.linear(batch["x"]["values"]) * factor
        error = (scores - batch["y"][0]).square()
        if self.kind == "tuple":
            return scores, error.mean(), error.sum()
        if self.kind == "dict":
            return {"scores": scores, "hidden": [scores * 2, {"deep": scores + 1}], "cost": error.sum(), "none": None}
        return scores


def nested(factor: float = 2.0) -> dict:
    return {"batch": {"x": {"values": torch.ones(4, 5)}, "y": [torch.zeros(4, 3), None]}, "factor": factor}


def test_nested_batches_and_outputs(run_captured):
    torch.manual_seed(0)
    module = Several("dict")
    graph = ortgraph.capture(module, nested(), loss="cost")
    assert graph.signature.inputs == ("batch.x.values", "batch.y.0")
    assert graph.signature.loss == "cost"
    assert graph.signature.outputs == ("scores", "hidden.0", "hidden.1.deep")
    feed = {"batch.x.values": np.ones((4, 5), np.float32), "batch.y.0": np.zeros((4, 3), np.float32)}
    got = run_captured(graph, feed)[0]
    want = module(**nested())
    assert got["cost"] == pytest.approx(want["cost"].item(), rel=1e-5)
    np.testing.assert_allclose(got["hidden.1.deep"], want["hidden"][1]["deep"].detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(("loss", "which"), [(None, 1), (1, 1), (2, 2), (-1, 2)])
def test_tuple_results(run_captured, loss, which):
    torch.manual_seed(0)
    module = Several("tuple")
    graph = ortgraph.capture(module, nested(), loss=loss)
    assert graph.signature.loss == "loss"
    assert graph.signature.outputs == tuple(f"output_{i}" for i in range(3) if i != which)
    feed = {"batch.x.values": np.ones((4, 5), np.float32), "batch.y.0": np.zeros((4, 3), np.float32)}
    assert run_captured(graph, feed)[0]["loss"] == pytest.approx(module(**nested())[which].item(), rel=1e-5)


def test_one_tensor_and_numpy_batches(plain):
    for batch in (torch.ones(2, 5), np.ones((2, 5), np.float32), [torch.ones(2, 5)]):
        assert ortgraph.capture(plain, batch, loss=lambda o: o.sum()).signature.inputs == ("x",)


class Output(nn.Module):
    """Its result has a field that an input, a parameter and an inner operator could be called."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, add: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x + self.x
        return {"loss": (y * add).sum(), "add": y + 1, "same": add, "again": y, "twice": y, "mul": self.x}


def test_colliding_names_and_passed_through_outputs(run_captured):
    graph = ortgraph.capture(Output(), {"x": torch.ones(3), "add": torch.full((3,), 2.0)})
    verify(graph, "types")
    assert graph.signature.parameters[0].name == "x" and graph.signature.inputs == ("x.1", "add")
    assert graph.signature.outputs == ("add.1", "same", "again", "twice", "mul")
    got = run_captured(graph, {"x.1": np.ones(3, np.float32), "add": np.full(3, 2, np.float32)})[0]
    assert got["same"].tolist() == [2, 2, 2] and got["again"].tolist() == got["twice"].tolist() == [2, 2, 2]
    assert got["add.1"].tolist() == [3, 3, 3] and got["mul"].tolist() == [1, 1, 1]
