from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import safetensors.numpy

from ortgraph.errors import InputError, SignatureError, VerificationError
from ortgraph.graph import Buffer, Parameter, Signature, State, TrainingGraph, load
from ortgraph.graph.text import text_hash
from ortgraph.graph.verify import check, verify


def test_signature_round_trip():
    s = Signature(
        loss="l",
        stage="stepped",
        inputs=("x",),
        parameters=(Parameter("w", True, "g", "u", ("t",), 1),),
        buffers=(Buffer("m", "n"),),
        outputs=("y",),
        loss_gradient="seed",
        tangents={"y": "dy"},
        input_gradients={"x": "dx"},
        states=(State("s", "i", "o", "moment1", "w"),),
        scalars={"lr": 0.1},
        first_backward="n1",
        metadata={"a": "b"},
    )
    assert Signature.from_json(s.to_json()) == s


@pytest.mark.parametrize("change", [{"stage": "melted"}, {"version": 99}])
def test_signature_refuses(change):
    with pytest.raises(SignatureError):
        dataclasses.replace(Signature(loss="l"), **change)


def test_save_and_load_are_inverse(linear_graph, tmp_path):
    linear_graph.save(tmp_path / "g.onnx")
    again = load(tmp_path / "g.onnx")
    assert again.text() == linear_graph.text()
    assert all(np.array_equal(again.values[k], v) for k, v in linear_graph.values.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.onnx", "g.safetensors"]


def test_both_files_have_the_same_mode(linear_graph, tmp_path):
    path = linear_graph.save(tmp_path / "g.onnx")
    assert path.stat().st_mode == path.with_suffix(".safetensors").stat().st_mode


def test_failed_save_leaves_the_old_files(linear_graph, tmp_path, monkeypatch):
    linear_graph.save(tmp_path / "g.onnx")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr("safetensors.numpy.save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(InputError, match="cannot be written .disk full"):
        linear_graph.save(tmp_path / "g.onnx")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), (b"", "not a readable ONNX"), (b"not onnx at all", "not a readable ONNX")],
)
def test_load_errors_name_the_file(tmp_path, content, words):
    path = tmp_path / "bad.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        load(path)
    assert "bad.onnx" in str(caught.value)


def test_broken_weights(linear_graph, tmp_path):
    linear_graph.save(tmp_path / "g.onnx")
    (tmp_path / "g.safetensors").write_bytes(b"junk")
    with pytest.raises(InputError, match="g.safetensors"):
        load(tmp_path / "g.onnx")


def test_no_signature_is_a_clear_error(tmp_path):
    x = onnx.helper.make_tensor_value_info("x", 1, [2])
    y = onnx.helper.make_tensor_value_info("y", 1, [2])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    onnx.save(
        onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 18)]),
        tmp_path / "m.onnx",
    )
    with pytest.raises(SignatureError, match="no ortgraph signature"):
        _ = load(tmp_path / "m.onnx").signature


def test_text_ignores_names_of_intermediate_values(linear_graph):
    before, digest = linear_graph.text(), text_hash(linear_graph)
    for i, node in enumerate(linear_graph.graph):
        for o in node.outputs:
            if not o.is_graph_output():
                o.name = f"renamed{i}"
    assert linear_graph.text() == before and text_hash(linear_graph) == digest


@pytest.mark.parametrize("part", ["attribute", "constant", "input order", "shape"])
def test_hash_sees(linear_graph, part):
    digest = text_hash(linear_graph)
    nodes = {n.op_type: n for n in linear_graph.graph}
    if part == "attribute":
        nodes["Transpose"].attributes["perm"] = ir.AttrInt64s("perm", [0, 1])
    elif part == "constant":
        constant = next(v for v in linear_graph.graph.initializers.values() if v.dtype == ir.DataType.FLOAT)
        constant.const_value = ir.tensor(3.0, dtype=ir.DataType.FLOAT, name=constant.name)
    elif part == "input order":
        node = nodes["Add"]
        a, b = node.inputs
        node.replace_input_with(0, b)
        node.replace_input_with(1, a)
    else:
        nodes["MatMul"].outputs[0].shape = ir.Shape([4, 9])
    assert text_hash(linear_graph) != digest


def test_whole_graph_is_right(linear_graph):
    assert check(linear_graph, "runtime") == []


def break_names(g: TrainingGraph) -> None:
    a, b = list(g.graph)[:2]
    b.outputs[0].name = a.outputs[0].name


def break_gradient_shape(g: TrainingGraph) -> None:
    g.graph.outputs[2].shape = ir.Shape([7])


def break_gradient(g: TrainingGraph) -> None:
    s = g.signature
    g.signature = s.replace(parameters=(dataclasses.replace(s.parameters[0], gradient=None), s.parameters[1]))
    del g.graph.outputs[1]


def break_opset(g: TrainingGraph) -> None:
    g.graph.opset_imports[""] = 23


def break_constant(g: TrainingGraph) -> None:
    next(iter(g.graph.initializers.values())).const_value = None


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (break_names, "unique-names"),
        (break_gradient_shape, "trainable-has-gradient"),
        (break_gradient, "trainable-has-gradient"),
        (break_opset, "opset-window"),
        (break_constant, "constants-have-values"),
    ],
)
def test_each_rule_fires_under_its_name(linear_graph, damage, rule):
    damage(linear_graph)
    with pytest.raises(VerificationError, match=rule):
        verify(linear_graph, "runtime")


def test_value_read_only_in_a_subgraph_counts_as_read(linear_graph):
    from ortgraph.graph.verify import live_nodes

    g = linear_graph.graph
    outer = ir.node("Neg", [g.inputs[1]], name="outer")
    outer.outputs[0].name = "outer"
    bodies = []
    for name in ("then", "else"):
        inner = ir.node("Identity", [outer.outputs[0]], name=name)
        inner.outputs[0].name = name
        bodies.append(ir.Graph([], [inner.outputs[0]], nodes=[inner], name=name))
    condition = ir.val("condition", dtype=ir.DataType.BOOL, shape=[])
    condition.const_value = ir.tensor(True, name="condition")
    g.register_initializer(condition)
    branch = ir.node("If", [condition], {"then_branch": bodies[0], "else_branch": bodies[1]}, name="if")
    branch.outputs[0].name = "picked"
    g.append(outer)
    g.append(branch)
    g.outputs.append(branch.outputs[0])
    assert outer in live_nodes(linear_graph)
    assert any(n.name == "outer" for n in live_nodes(linear_graph.clone()))


def test_values_that_no_input_reads_are_refused(linear_graph, tmp_path):
    """A renamed or left-over tensor is another graph's file, not something to leave out silently."""
    path = linear_graph.save(tmp_path / "g.onnx")
    weights = path.with_suffix(".safetensors")
    safetensors.numpy.save_file({**linear_graph.values, "old.weight": np.zeros(2, np.float32)}, weights)
    with pytest.raises(InputError, match="no input for old.weight"):
        load(path)
    wider = linear_graph.clone()
    wider.values["more"] = np.zeros(2, np.float32)
    with pytest.raises(InputError, match="no input for more"):
        wider.save(tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_a_model_without_signature_leaves_the_file_beside_it_alone(tmp_path):
    """``model.safetensors`` beside ``model.onnx`` is a usual name for weights of something else."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [2])],
        [onnx.helper.make_tensor_value_info("y", 1, [2])],
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    safetensors.numpy.save_file({"weight": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    assert load(tmp_path / "model.onnx").values == {}


@pytest.mark.parametrize("place", ["initializer", "attribute", "branch"])
@pytest.mark.parametrize("damage", ["missing", "shorter", "outside"])
def test_values_in_other_files_are_checked(tmp_path, place, damage):
    """They are read late: without a check the first reader would fail, far from here."""
    stored = onnx.numpy_helper.from_array(np.arange(6, dtype=np.float32), "w")
    made = onnx.helper.make_tensor_value_info("y", 1, None)
    constant = onnx.helper.make_node("Constant", [], ["y"], value=stored)
    if place == "initializer":
        graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["w"], ["y"])], "g", [], [made], [stored])
    elif place == "attribute":
        graph = onnx.helper.make_graph([constant], "g", [], [made])
    else:
        branch = onnx.helper.make_graph([constant], "b", [], [made])
        node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
        graph = onnx.helper.make_graph([node], "g", [onnx.helper.make_tensor_value_info("c", 9, [])], [made])
    path, data = tmp_path / "m.onnx", tmp_path / "m.data"
    model = onnx.helper.make_model(graph)
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0, convert_attribute=True)
    load(path)
    if damage == "missing":
        data.unlink()
    elif damage == "shorter":
        data.write_bytes(data.read_bytes()[:-4])
    else:
        path.write_bytes(path.read_bytes().replace(b"m.data", b"../m.d"))
    with pytest.raises(InputError, match=damage):
        load(path)
