"""Predicted cost: every operator has one, it grows with size, and it is near what a profile says."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.analysis import cost
from ortgraph.analysis.cost import load_node_table, predict
from ortgraph.errors import InputError
from ortgraph.ops import cost_file
from ortgraph.ops.spec import all_specs
from ortgraph.ops.work import CLASSES, TERMS, class_of, work_of

F = ir.DataType.FLOAT


@pytest.fixture(autouse=True)
def shipped(monkeypatch):
    """The shipped table, whatever was calibrated here."""
    monkeypatch.setattr(cost, "default_table", load_node_table)


def value(name, *shape, dtype=F):
    return ir.val(name, dtype=dtype, shape=list(shape))


def node(op_type, inputs, output=None, domain="", **attributes):
    outputs = [value("y", *(output if output is not None else inputs[0].shape))]
    found = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]
    return ir.Node(domain, op_type, inputs, found, outputs=outputs)


def test_every_operator_has_a_class_and_a_price():
    entries = load_node_table().entries
    for spec in all_specs():
        x = value("x", 4, 4)
        made = node(spec.op_type, [x] * 8, domain=spec.domain)
        assert class_of(made) in CLASSES, spec.op_type
        assert class_of(made) in entries, class_of(made)
        assert predict(made).microseconds >= 0


def test_shipped_table_is_complete_and_ascending():
    for name, entry in load_node_table().entries.items():
        assert ("points" in entry) != ("terms" in entry), name
        points = entry.get("points", [])
        assert all(a[0] < b[0] and a[1] <= b[1] for a, b in zip(points, points[1:], strict=False)), name
        assert all(price >= 0 for price in entry.get("terms", {}).values()), name


@pytest.mark.parametrize("op_type", ["Add", "Exp", "Softmax", "Transpose", "ReduceSum", "LayerNormalization"])
def test_more_bytes_take_longer(op_type):
    times = [
        predict(node(op_type, [value("x", n, 256), value("z", n, 256)])).microseconds for n in (1, 64, 1024, 50000)
    ]
    assert times == sorted(times) and times[-1] > 20 * times[1]


def test_products_follow_operations_and_forms():
    def gemm(m, k, n, **options):
        a = (k, m) if options.get("transA") else (m, k)
        b = (n, k) if options.get("transB") else (k, n)
        return node("Gemm", [value("a", *a), value("b", *b)], (m, n), **options)

    small, large = predict(gemm(256, 256, 256)), predict(gemm(1024, 1024, 1024))
    assert 40 < large.microseconds / small.microseconds < 90
    assert large.moved == 3 * 4 * 1024**2
    features = work_of(gemm(64, 32, 16, transA=1, transB=1)).features
    assert features["flops"] == 2 * 64 * 32 * 16 and set(features) == set(TERMS["product"])
    assert work_of(gemm(8, 8, 8, transB=1)).names[0] == "product:NT"
    batched = node("FusedMatMul", [value("a", 32, 128, 64), value("b", 32, 64, 128)], (32, 128, 128), "com.microsoft")
    assert work_of(batched).features["calls"] == 32


def test_views_cost_next_to_nothing_and_move_nothing():
    x = value("x", 4096, 4096)
    view = predict(node("Reshape", [x, value("s", 1, dtype=ir.DataType.INT64)], (16777216,)))
    assert view.moved == 0 and view.microseconds < 5 < predict(node("Neg", [x])).microseconds


def test_lookups_move_what_they_fetch():
    table, ids = value("t", 30000, 256), value("i", 8, dtype=ir.DataType.INT64)
    assert predict(node("Gather", [table, ids], (8, 256))).moved == 2 * 8 * 256 * 4 + 64


def test_forms_of_one_operator():
    x = value("x", 64, 256)
    assert work_of(node("Add", [x, value("b", 256)])).names[0] == "Add:row"
    assert work_of(node("Add", [x, value("b", 64, 1)])).names[0] == "Add:column"
    assert work_of(node("Add", [x, value("b")])).names == ("Add", "elementwise")
    assert work_of(node("Gelu", [x], domain="ortgraph.kernels", approximate="tanh")).names[0].endswith("Gelu:tanh")
    heads = value("h", 8, 128, 4, 64)
    assert work_of(node("Transpose", [heads], perm=[0, 2, 1, 3])).names[0] == "Transpose:rows"


def test_scratch_is_part_of_the_cost():
    x, c = value("x", 256, 512), value("c", 256, 512, dtype=ir.DataType.BOOL)
    assert predict(node("Where", [c, x, x], (256, 512))).scratch == 2 * 4 * 256 * 512
    assert predict(node("Add", [x, x])).scratch == 0


def test_symbolic_dimensions_count_as_64():
    symbolic, static = (predict(node("Exp", [value("x", d, 256)])) for d in ("n", 64))
    assert symbolic.moved == static.moved and symbolic.microseconds == static.microseconds


@pytest.mark.parametrize("text", ["", "{}", '{"nodes": {}}', '{"nodes": {"other": {}}}', '{"nodes": 3}'])
def test_bad_tables(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(InputError, match="not a node cost table"):
        load_node_table(str(path))


def test_a_table_is_written_in_parts(tmp_path):
    path = tmp_path / "folder" / "table.json"
    cost_file.write(path, {"threads": 1}, nodes={"other": {"points": [[0, 7.0]]}})
    data = json.loads(path.read_text())
    assert data["machine"] == {"threads": 1} and data["entries"] == json.loads(cost_file.SHIPPED.read_text())["entries"]
    table = load_node_table(str(path))
    assert predict(node("Exp", [value("x", 4)]), table).microseconds == 7.0


def test_the_machine_table_is_the_one_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTGRAPH_CACHE_DIR", str(tmp_path))
    assert cost_file.machine_table() == ""
    cost_file.write(cost_file.machine_path(), {"threads": 1})
    assert cost_file.machine_table() == str(tmp_path / "cost_table.json")


def test_prediction_is_near_the_profile(classifier_graph):
    """Loose: the shipped table is of another moment, maybe another machine, and the machine may be busy."""
    pytest.importorskip("onnxruntime")
    from ortgraph.runtime.session import TrainingSession

    graph = classifier_graph(batch=64, length=128)
    rng = np.random.default_rng(0)
    batch = {"ids": rng.integers(0, 5, (64, 128)), "labels": rng.integers(0, 11, (64, 128))}
    session = TrainingSession(graph, threads=2)
    times = session.profile(batch, runs=20)
    (program,) = session.programs
    nodes = {n.name: n for n in program.order}
    own = min(t.microseconds for t in times)  # what the profiler itself takes per node
    measured = sum(t.microseconds - own for t in times)
    predicted = sum(predict(nodes[t.node]).microseconds for t in times)
    assert 0.05 < predicted / measured < 5
