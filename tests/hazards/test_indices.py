"""Indices that PyTorch refuses are refused, not counted from the end; those that it takes are taken."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")
from torch.nn import functional as F  # noqa: E402

import ortgraph  # noqa: E402
from ortgraph.errors import BatchError  # noqa: E402

ROWS = 5


class Step(torch.nn.Module):
    """A table of rows and something that reads it."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.table = torch.nn.Embedding(ROWS, 3)

    def forward(self, scale, ids):
        return (self.function(self.table, ids) * scale).sum()


def _loss(**options):
    return lambda table, ids: F.cross_entropy(table.weight.T.repeat(2, 1)[: ids.numel()], ids.reshape(-1), **options)


def _scores(ids, classes=ROWS):
    return torch.linspace(-1, 1, ids * classes).reshape(ids, classes)


def _shifted(table, ids):
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(_scores(6) * table.weight.sum(), labels.view(-1))


def _dropped_last(table, ids):
    return F.nll_loss(F.log_softmax(_scores(4) * table.weight.sum(), -1), ids[:, :-1].reshape(-1), ignore_index=2)


READERS = {
    "embedding": lambda table, ids: table(ids),
    "embedding of a view": lambda table, ids: table(ids.unsqueeze(0).view(-1).to(torch.int32)),
    "embedding of a transpose": lambda table, ids: table(ids.t()[1:]),
    "embedding of a column": lambda table, ids: table(ids[:, 1]),
    "embedding with padding": lambda table, ids: F.embedding(ids, table.weight, padding_idx=0),
    "embedding of an expanded row": lambda table, ids: table(ids[0].expand(4, 3)),
    "index_select": lambda table, ids: table.weight.index_select(0, ids.reshape(-1)),
    "index_select of columns": lambda table, ids: table.weight.T.index_select(1, ids.reshape(-1)),
    "gather": lambda table, ids: table.weight.gather(0, ids),
    "scatter_add": lambda table, ids: torch.zeros(ROWS, 3).scatter_add(0, ids, table.weight[:2]) * table.weight,
    "square brackets": lambda table, ids: table.weight[ids],
    "two axes": lambda table, ids: (table.weight @ torch.ones(3, ROWS))[ids, ids.flip(0)],
    "cross entropy": lambda table, ids: F.cross_entropy(_scores(6) * table.weight.sum(), ids.reshape(-1)),
    "cross entropy, ignored": lambda table, ids: F.cross_entropy(
        _scores(6) * table.weight.sum(), ids.reshape(-1), ignore_index=-1, reduction="sum"
    ),
    "cross entropy of images": lambda table, ids: F.cross_entropy(
        _scores(2).reshape(1, ROWS, 2, 1).expand(1, ROWS, 2, 3) * table.weight.sum(), ids[None]
    ),
    "shifted labels": _shifted,
    "dropped labels": _dropped_last,
}
VALUES = (-100, -5, -1, 0, ROWS - 1, ROWS)
PLACES = ((0, 0), (0, 1), (1, 2))


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("name", READERS)
def test_an_index_is_refused_where_pytorch_refuses_it(name, level):
    torch.manual_seed(0)
    module = Step(READERS[name])
    good = torch.tensor([[1, 2, 3], [3, 1, 4]])
    scale = torch.tensor(1.5)
    session = ortgraph.TrainingSession(ortgraph.optimize(ortgraph.capture(module, (scale, good)), level).graph)
    refused = 0
    for value in VALUES:
        for place in PLACES:
            ids = good.clone()
            ids[place] = value
            try:
                want = module(scale, ids).item()
            except (IndexError, RuntimeError):
                want = None
            for batch in ((scale, ids), {"scale": scale.numpy(), "ids": ids.numpy()}):
                if want is not None:
                    assert session.loss(batch) == pytest.approx(want, rel=1e-5, abs=1e-6), (value, place)
                    continue
                with pytest.raises(BatchError, match=rf"'ids' has {value} at \[{place[0]}, {place[1]}\]"):
                    session.gradients(batch)
                refused += 1
    assert refused


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_refused_step_changes_nothing_and_the_message_helps(level):
    module = Step(READERS["embedding"])
    good = (torch.tensor(1.0), torch.tensor([[0, 1], [2, 3]]))
    graph = ortgraph.capture(module, good, dynamic={"ids": {0: "batch"}})
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, level, optimizer=ortgraph.optim.AdamW()).graph)
    session.step(good)
    before = session.state_dict()
    bad = (torch.tensor(1.0), torch.tensor([[0, 1], [2, 3], [4, -1]], dtype=torch.int32))
    for call in (session.step, session.gradients, session.loss, session.evaluate):
        with pytest.raises(BatchError) as caught:
            call(bad)
        assert "input 'ids' has -1 at [2, 1]: embedding takes 0 to 4" in str(caught.value)
    for name, value in session.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_a_symbolic_number_of_rows_is_bound_by_the_batch():
    class Pick(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4))

        def forward(self, x, ids):
            return (x * self.w).gather(0, ids).sum()

    graph = ortgraph.capture(Pick(), (torch.randn(3, 4), torch.zeros(1, 4, dtype=torch.int64)), {"x": {0: "rows"}})
    session = ortgraph.TrainingSession(graph)
    ids = np.array([[0, 1, 2, 5]])
    with pytest.raises(BatchError, match=r"'ids' has 5 at \[0, 3\]: gather takes 0 to 2"):
        session.loss((np.ones((3, 4), np.float32), ids))
    assert session.loss((np.ones((6, 4), np.float32), ids)) == pytest.approx(4)


def test_the_notes_are_few_survive_a_file_and_cost_little(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(ROWS, 3)

        def forward(self, ids):
            h = self.table(ids)
            return F.cross_entropy((h @ self.table.weight.T).reshape(-1, ROWS), ids.reshape(-1)), self.table(ids)

    batch = torch.zeros(64, 128, dtype=torch.int64)
    graph = ortgraph.optimize(ortgraph.capture(Tied(), (batch,)), "O2").graph
    notes = json.loads(graph.signature.metadata["index_inputs"])
    assert sorted(n["reader"] for n in notes) == ["embedding", "nll_loss"]
    session = ortgraph.TrainingSession(ortgraph.load(graph.save(tmp_path / "tied.onnx")))
    with pytest.raises(BatchError, match="has -3 at"):
        session.loss((batch - 3,))
    session.program("loss", (batch,))
    start = time.process_time()
    for _ in range(20):
        session.program("loss", (batch,))
    assert (time.process_time() - start) / 20 < 2e-3  # 8192 indices, twice


def test_graphs_from_onnx_keep_the_meaning_of_onnx(tmp_path):
    """A negative index is legal in ONNX: it counts from the end."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    value = helper.make_tensor_value_info
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Gather", ["w", "ids"], ["rows"]),
                helper.make_node("ReduceSum", ["rows"], ["loss"], keepdims=0),
            ],
            "g",
            [value("ids", onnx.TensorProto.INT64, [2])],
            [value("loss", onnx.TensorProto.FLOAT, [])],
            [onnx.numpy_helper.from_array(np.arange(8, dtype=np.float32).reshape(4, 2), "w")],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )
    onnx.save(model, tmp_path / "gather.onnx")
    session = ortgraph.TrainingSession(ortgraph.from_onnx(tmp_path / "gather.onnx", loss="loss"))
    assert session.loss((np.array([0, -1]),)) == pytest.approx(0 + 1 + 6 + 7)
