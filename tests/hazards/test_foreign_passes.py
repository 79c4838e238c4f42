"""Foreign passes that are wrong only where the first batch does not show it: zeros and ones taken for constants."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

import ortgraph
from ortgraph.errors import VerificationError
from ortgraph.manager import PassManager, numerics


class Shifted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(6, 6)
        self.shift = torch.nn.Parameter(torch.zeros(6))

    def forward(self, x):
        hidden = torch.tanh(self.body(x) + self.shift)
        return torch.sin(hidden + self.shift)


class TakeForZero(ir.passes.InPlacePass):
    """x + shift = x, for the first or for all readers, since the shift holds zeros when the pass runs."""

    def __init__(self, count):
        self.count = count

    def call(self, model):
        shift = next(v for v in model.graph.inputs if v.name == "shift")
        for use in [u for u in shift.uses() if u.node.op_type == "Add"][: self.count]:
            if list(use.node.outputs[0].shape) == [4, 6]:
                ir.convenience.replace_all_uses_with(use.node.outputs[0], use.node.inputs[1 - use.idx])
        return ir.passes.PassResult(model, True)


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    return ortgraph.capture(Shifted(), (torch.randn(4, 6), torch.randn(4, 6)), loss=torch.nn.MSELoss())


def optimized(captured, *passes):
    optimizer = ortgraph.optim.AdamW(lr=1e-2)
    return ortgraph.optimize(captured, "O1", optimizer=optimizer, passes_after={"stepped": passes}).graph


def test_a_parameter_whose_only_reader_is_its_update_is_caught(captured):
    with pytest.raises(
        VerificationError, match="inputs-keep-their-effect.*TakeForZero.*%shift no longer reaches the loss"
    ):
        optimized(captured, TakeForZero(2))


def test_one_of_two_readers_that_took_a_zero_parameter_for_zero_shows_in_numbers(captured):
    rng = np.random.default_rng(0)
    batch = {n: rng.standard_normal((4, 6)).astype(np.float32) for n in captured.signature.inputs}
    assert numerics.compare(captured, optimized(captured), batch).equal
    wrong = optimized(captured, TakeForZero(1))
    assert not numerics.compare(captured, wrong, batch).equal
    assert not wrong.values["shift"].any()  # the graphs are compared elsewhere, but stay as they are


class Reshaped(ir.passes.InPlacePass):
    """Gives the model's output another type or shape, and records it truthfully: no rule within one graph is broken."""

    def __init__(self, operator, attributes, dtype, shape):
        self.made = (operator, attributes, dtype, shape)

    def call(self, model):
        operator, attributes, dtype, shape = self.made
        graph = model.graph
        old = next(v for v in graph.outputs if v.name == "output")
        node = ir.node(operator, [old], attributes, name="foreign")
        new = node.outputs[0]
        old.name, new.name = "output.old", "output"
        new.type, new.shape = ir.TensorType(dtype), ir.Shape(shape)
        graph.append(node)
        graph.outputs[list(graph.outputs).index(old)] = new
        return ir.passes.PassResult(model, True)


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        (Reshaped("Cast", {"to": ir.DataType.DOUBLE}, ir.DataType.DOUBLE, ["batch", 6]), "was FLOAT, is DOUBLE"),
        (Reshaped("Flatten", {"axis": 0}, ir.DataType.FLOAT, [1, "n"]), r"was \['batch', 6\], is \[1, 'n'\]"),
        (Reshaped("Identity", {}, ir.DataType.FLOAT, [4, 6]), r"was \['batch', 6\], is \[4, 6\]"),
    ],
)
def test_an_output_of_another_type_or_size_is_caught(foreign, words):
    batch = (torch.randn(4, 6), torch.randn(4, 6))
    graph = ortgraph.capture(
        Shifted(), batch, loss=torch.nn.MSELoss(), dynamic={"x": {0: "batch"}, "target": {0: "batch"}}
    )
    with pytest.raises(VerificationError, match=f"outputs-keep-their-type.*Reshaped: output %output {words}"):
        PassManager([foreign]).run(graph)
