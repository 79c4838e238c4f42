"""The report of differences to PyTorch names the first module that departs."""

from __future__ import annotations

import pytest

import ortgraph
from ortgraph.errors import InputError
from ortgraph.runtime.activation_differences import activation_differences

torch = pytest.importorskip("torch")
nn = torch.nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x, labels):
        h = self.norm(self.first(x))
        return {"loss": nn.functional.cross_entropy(self.head(h + self.block(h)), labels)}


@pytest.fixture(scope="module")
def net():
    module = Net()
    batch = {"x": torch.randn(5, 6), "labels": torch.tensor([0, 1, 2, 1, 0])}
    return module, batch, ortgraph.capture(module, batch, loss="loss")


MODULES = ["first", "norm", "block.0", "block.1", "block.2", "block", "head"]


def test_float32_agrees_in_order_of_computation(net):
    module, batch, graph = net
    report = activation_differences(module, graph, batch)
    assert [r.module for r in report.rows if r.kind == "activation"] == MODULES
    assert {r.module for r in report.rows if r.kind == "gradient"} == dict(module.named_parameters()).keys()
    assert report.first_departure is None and report.unmatched == () and report.overflows == ()
    assert report.text.startswith(f"all {len(report.rows)} agree") and all(p.grad is None for p in module.parameters())


def test_bfloat16_agrees_with_autocast_within_its_tolerance(net):
    module, batch, graph = net
    cast = ortgraph.optimize(graph, "mark-optimized,cast-precision").graph
    report = activation_differences(module, cast, batch, autocast=torch.bfloat16)
    assert report.first_departure is None and report.tolerance > 1e-2
    against = activation_differences(module, cast, batch, tolerance=1e-4)  # float32
    assert against.first_departure is not None and against.first_departure.module == "first"


def test_the_first_operator_that_departs_is_named(net):
    module, batch, graph = net
    wrong = graph.clone()
    wrong.values = {**wrong.values, "block.2.bias": wrong.values["block.2.bias"] + 0.5}
    first = activation_differences(module, wrong, batch).first_departure
    assert first is not None and first.module == "block.2" and first.error > 0.1 and "Add" in first.node + "Gemm Add"
    backward = graph.clone()
    node = next(n for n in backward.graph if n.op_type == "GeluGrad")
    node.replace_input_with(0, node.inputs[1])
    report = activation_differences(module, backward, batch)
    assert report.first_departure.kind == "gradient" and report.first_departure.module.startswith("block.0")
    assert report.text.startswith("gradient of block.0")


def test_an_overflow_is_named_with_its_module(net):
    module, batch, graph = net
    large = graph.clone()
    large.values = {**large.values, "first.weight": large.values["first.weight"] * 1e6}
    cast = ortgraph.optimize(large, "mark-optimized,cast-precision{precision=fp16}").graph
    report = activation_differences(module, cast, batch)
    assert report.overflows and "overflow in" in report.text
    assert report.first_departure.module == "first"


def test_a_module_without_a_loss_is_refused(net):
    _, batch, graph = net
    plain = nn.Linear(6, 2)
    with pytest.raises(InputError, match="no scalar loss"):
        activation_differences(lambda_module(plain), graph, batch)


def lambda_module(inner):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x, labels):
            return self.inner(x)

    return Wrapped()
