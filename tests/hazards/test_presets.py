"""Classes of faults that broke other tools, through every preset and the session, on models that hold several at once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.graph import Parameter, Signature, State, TrainingGraph
from ortgraph.ops import Builder

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402

LEVELS = ("O0", "O1", "O2")


def gradients_of(module, batch):
    module.zero_grad()
    loss = module(**batch)
    loss.backward()
    return loss.item(), {k: p.grad.numpy().copy() for k, p in module.named_parameters() if p.grad is not None}


def require_right(module, batch, level, threads=2, repeats=3):
    """Loss and gradients by the design's measure, repeated runs bit-equal."""
    loss, near = gradients_of(module, batch)
    double = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    _, exact = gradients_of(module.double(), double)
    module.float()
    result = ortgraph.optimize(ortgraph.capture(module, batch), level, verify="types")
    session = ortgraph.TrainingSession(result.graph, threads=threads)
    arrays = {k: v.numpy() for k, v in batch.items()}
    runs = [session.gradients(arrays) for _ in range(repeats)]
    assert session.loss(arrays) == pytest.approx(loss, rel=1e-5)
    median = np.median([np.linalg.norm(v) for v in exact.values()])
    for name, want in exact.items():
        assert all(np.array_equal(r[name], runs[0][name]) for r in runs), f"{name} differs between runs"
        allowed = 4 * np.linalg.norm(near[name] - want) + 1e-6 * max(np.linalg.norm(want), median)
        assert np.linalg.norm(runs[0][name] - want) <= allowed, name
    return result.graph


class Hazards(torch.nn.Module):
    """Zero-valued and equal parameters, tied weight, repeated rows, x * 1 and x + 0 with parameters, odd names."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(6, 4, padding_idx=0)
        self.zero_a, self.zero_b = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
        self.one_a, self.one_b = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
        self.scalar = torch.nn.Parameter(torch.tensor(0.0))
        self.frozen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_parameter("weight_1", torch.nn.Parameter(torch.eye(4)))
        self.register_parameter("weight_2", torch.nn.Parameter(torch.eye(4)))
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        h = self.table(ids) + self.zero_a + self.zero_b + self.frozen + self.scalar
        h = h * self.one_a * self.one_b
        h = h @ self.weight_1 + h @ self.weight_2
        return torch.nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 2])
def test_parameters_are_never_constants_whatever_their_value(level, threads):
    torch.manual_seed(0)
    ids = torch.randint(0, 3, (5, 7))
    batch = {"ids": ids, "labels": torch.where(ids == 1, 5, ids)}
    graph = require_right(Hazards(), batch, level, threads)
    names = {p.name for p in graph.signature.parameters}
    assert names == {"table.weight", "zero_a", "zero_b", "one_a", "one_b", "scalar", "frozen", "weight_1", "weight_2"}
    assert not names & set(graph.graph.initializers)


@pytest.mark.parametrize("level", [*LEVELS, "O3"])
def test_names_in_are_names_out_through_every_pass_and_file(level, tmp_path):
    """Parameters that presets transpose, cast, merge or group keep their names, in the graph and in its values' file."""
    torch.manual_seed(0)
    ids = torch.randint(0, 3, (5, 7))
    batch = {"ids": ids, "labels": torch.where(ids == 1, 5, ids)}
    captured = ortgraph.capture(Hazards(), batch)
    names = {p.name for p in captured.signature.parameters}
    for options in ({}, {"optimizer": ortgraph.optim.AdamW(), "precision": "bf16"}):
        graph = ortgraph.optimize(captured, level, **options).graph
        graph.save(tmp_path / "a.onnx")
        loaded = ortgraph.load(tmp_path / "a.onnx")
        for found in (graph, loaded):
            assert {p.name for p in found.signature.parameters} == names == set(found.values) & names
            assert names <= {v.name for v in found.graph.inputs}
        assert names <= set(ortgraph.TrainingSession(loaded).state_dict())


class TwoDropouts(torch.nn.Module):
    """Two draws on one input, returned so that they can be compared."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))
        self.a, self.b = torch.nn.Dropout(0.5), torch.nn.Dropout(0.5)

    def forward(self, x):
        h = x * self.scale
        a, b = self.a(h), self.b(h)
        return {"loss": (a * b).sum(), "a": a, "b": b}


@pytest.mark.parametrize("level", LEVELS)
def test_two_dropouts_on_one_input_stay_two(level):
    x = torch.ones(32, 64)
    graph = ortgraph.capture(TwoDropouts(), {"x": x})
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, level).graph)
    # d/d scale of sum (2 s)(2 s) over the positions that both kept: 8 each, a quarter of them if independent.
    both = session.gradients({"x": x.numpy()})["scale"].sum() / 8 / x.numel()
    assert 0.2 < both < 0.3, "one draw serves both"
    evaluated = session.evaluate({"x": x.numpy()})
    np.testing.assert_array_equal(evaluated["a"], x.numpy())


@pytest.mark.parametrize("level", LEVELS)
def test_dropout_that_keeps_everything_is_no_identity_of_masks(level):
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = torch.nn.Linear(5, 5), torch.nn.Dropout(0.0)

        def forward(self, x):
            return (self.drop(self.linear(x)) ** 2).mean()

    require_right(Net(), {"x": torch.randn(3, 5)}, level)


def numbered_graph() -> TrainingGraph:
    """Tensors called "1", "2", ...; nodes without names; a value that only an If branch reads; a random state."""
    f = ir.DataType.FLOAT
    x, w = ir.val("1", dtype=f, shape=[2, 3]), ir.val("2", dtype=f, shape=[2, 3])
    seed, flag = ir.val("3", dtype=f, shape=[]), ir.val("4", dtype=ir.DataType.BOOL, shape=[])
    graph = ir.Graph([x, w, seed, flag], [], nodes=[], opset_imports={"": 18}, name="g")
    build = Builder(graph, "capture")
    product = build.op("Mul", x, w)
    only_inside = build.op("Identity", build.op("Tanh", w))
    bodies = []
    for op_type in ("Neg", "Identity"):
        inner = ir.node(op_type, [only_inside])
        inner.outputs[0].name, inner.outputs[0].dtype, inner.outputs[0].shape = f"inside_{op_type}", f, ir.Shape([2, 3])
        bodies.append(ir.Graph([], [inner.outputs[0]], nodes=[inner], name=op_type))
    picked = build.op("If", flag, then_branch=bodies[0], else_branch=bodies[1])
    picked.dtype, picked.shape = f, ir.Shape([2, 3])
    loss = build.op("ReduceSum", product, keepdims=0)
    grad = build.op("Mul", build.op("Identity", x), seed)
    for number, node in enumerate(graph):
        node.name = None
        for o in node.outputs:
            o.name = str(10 + number)
    for value, name in ((loss, "5"), (grad, "6"), (picked, "7")):
        value.name = name
        graph.outputs.append(value)
    signature = Signature(
        loss="5", inputs=("1", "4"), parameters=(Parameter("2", gradient="6"),), outputs=("7",), loss_gradient="3"
    )
    return TrainingGraph(ir.Model(graph, ir_version=10), signature, {"2": np.full((2, 3), 0.5, np.float32)})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("flag", [True, False])
def test_numbered_names_and_values_read_only_in_a_branch(level, flag):
    result = ortgraph.optimize(numbered_graph(), level)
    session = ortgraph.TrainingSession(result.graph)
    batch = {"1": np.arange(6, dtype=np.float32).reshape(2, 3), "4": np.array(flag)}
    out = session.evaluate(batch)
    np.testing.assert_allclose(out["7"], np.tanh(np.full((2, 3), 0.5, np.float32)) * (-1 if flag else 1), rtol=1e-6)
    np.testing.assert_array_equal(session.gradients(batch)["2"], batch["1"])


@pytest.mark.parametrize("level", LEVELS)
def test_state_that_nothing_reads_but_the_next_step(level):
    """A counter whose only reader is its own update is not dead."""
    graph = numbered_graph()
    counter = ir.val("count", dtype=ir.DataType.INT64, shape=[])
    graph.graph.inputs.append(counter)
    build = Builder(graph.graph, "capture")
    following = build.op("Add", counter, build.const(1, ir.DataType.INT64), name="count.next")
    graph.graph.outputs.append(following)
    state = State("count", "count", "count.next", "random_step")
    graph.signature = graph.signature.replace(states=(state,))
    graph.values["count"] = np.array(7, np.int64)
    result = ortgraph.optimize(graph, level, optimizer=ortgraph.optim.AdamW(lr=0.0))
    session = ortgraph.TrainingSession(result.graph)
    batch = {"1": np.ones((2, 3), np.float32), "4": np.array(True)}
    for _ in range(3):
        session.step(batch)
    assert int(session.optimizer_state_dict()["count"]) == 10


@pytest.mark.parametrize("level", LEVELS)
def test_update_waits_for_the_last_reader_of_the_weight(level):
    """The gradient of the lower layer reads the upper weight after the upper weight's own gradient is ready."""
    torch.manual_seed(0)
    mine = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(4)))
    theirs = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(4)))
    theirs.load_state_dict(mine.state_dict())
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    loss = torch.nn.MSELoss()
    graph = ortgraph.capture(mine, (x, y), loss=loss)
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, level, optimizer=ortgraph.optim.AdamW(lr=0.1)).graph)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss(theirs(x), y).backward()
        optimizer.step()
        session.step((x, y))
    for name, value in theirs.state_dict().items():
        np.testing.assert_allclose(session.state_dict()[name], value.numpy(), atol=2e-4, err_msg=name)
