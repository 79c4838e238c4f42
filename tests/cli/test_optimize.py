"""``ortgraph optimize``: what it writes, what it refuses, and that it never harms its input."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortgraph.graph import load

PIPELINE = "eliminate-dead-code"
PLUGIN = """
import dataclasses
from typing import ClassVar
from collections import Counter
from ortgraph.manager import Changes, GraphPass


@dataclasses.dataclass(frozen=True)
class Spoil(GraphPass):
    '''Negates the loss's gradient: wrong numbers in a valid graph.'''

    name: ClassVar[str] = "spoil"
    after: ClassVar[str] = "optimized"

    def run(self, graph):
        import onnx_ir as ir

        changes = Changes()
        for node in tuple(graph.graph):
            if node.op_type == "MatMul" and any(o.name == "w.grad" for o in node.outputs):
                negated = ir.node("Neg", [node.inputs[1]], name="spoiled")
                negated.outputs[0].name = "spoiled"
                negated.outputs[0].shape, negated.outputs[0].type = node.inputs[1].shape, node.inputs[1].type
                graph.graph.insert_before(node, negated)
                node.replace_input_with(1, negated.outputs[0])
                changes.counts["spoiled"] += 1
        return changes
"""


@pytest.fixture(scope="module")  # why: a second file with a pass of this name would be refused
def spoiler(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "spoil.py"
    path.write_text(PLUGIN)
    return path


def test_json_report(cli, graph_file, tmp_path):
    out = tmp_path / "out.onnx"
    ran = cli("optimize", graph_file, "-o", out, "-p", PIPELINE, "--json")
    assert ran.code == 0
    report = ran.json
    assert {"nodes_before", "nodes_after", "passes", "verified"} <= set(report)
    (record,) = report["passes"]
    assert {"name", "modified", "counts", "seconds"} <= set(record)
    assert record["name"] == PIPELINE and record["modified"] is False
    assert report["verified"] == "signature" and load(out).node_count() == report["nodes_after"]
    assert len(ran.out.strip().splitlines()) == 1, "tables are off"


def test_preset_with_optimizer_runs_to_a_planned_graph(cli, graph_file, tmp_path):
    out, page = tmp_path / "out.onnx", tmp_path / "r.html"
    ran = cli("optimize", graph_file, "-o", out, "-O2", "--optimizer", "adamw{lr=0.5}", "--verify", "numerics",
              "--report", page, "--time-passes", "--explain", "lower", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["verified"] == "numerics" and ran.json["stage"] == "planned"
    assert ran.json["explain"]["pass"] == "lower" and ran.json["explain"]["runs"] == 1
    beside = ran.json["explain"]["beside"]
    assert beside["pass"] == "fuse-regions" and any("bytes" in row["reason"] for row in beside["refusals"])
    graph = load(out)
    assert graph.stage == "planned" and graph.signature.scalars == {"learning_rate": 0.5}
    assert page.read_text().startswith("<!doctype html>")


def test_tables(cli, graph_file, tmp_path):
    ran = cli("optimize", graph_file, "-o", tmp_path / "o.onnx", "-p", PIPELINE, "--time-passes", "--print-after")
    assert ran.code == 0
    assert "verify ms" in ran.out and "--- after eliminate-dead-code" in ran.out and "stage captured" in ran.out


def refused(cli, *words) -> str:
    ran = cli("optimize", *words)
    assert ran.code == 2, ran.err
    assert "Traceback" not in ran.err and ran.err.startswith("error: ") and "try: " in ran.err
    return ran.err


def test_user_mistakes(cli, graph_file, tmp_path):
    out = tmp_path / "out.onnx"
    assert "absent.onnx" in refused(cli, tmp_path / "absent.onnx", "-o", out)
    text = tmp_path / "text.onnx"
    text.write_text("no model")
    assert "`ortgraph export model.py:build -o train.onnx` first" in refused(cli, "model.py:build", "-o", out)
    assert "not a readable ONNX model" in refused(cli, text, "-o", out)
    assert "eliminate-dead-code" in refused(cli, graph_file, "-o", out, "-p", "eliminate-dead-cod")
    assert "eliminate-dead-code" in refused(cli, graph_file, "-o", out, "--explain", "eliminate-dead-cod")
    assert "-O2" in refused(cli, graph_file, "-o", out, "-O7")
    assert "--shapes" in refused(cli, graph_file, "-o", out, "--shapes", "batch:8")
    assert "'batch'" in refused(cli, graph_file, "-o", out, "--shapes", "batch=8")
    assert "level 'all'" in refused(cli, graph_file, "-o", out, "--verify", "all")
    assert "missing.npz: no such file" in refused(cli, graph_file, "-o", out, "--batch", tmp_path / "missing.npz")
    assert "target 'gpu'" in refused(cli, graph_file, "-o", out, "--target", "gpu")
    assert "no output" in refused(cli, graph_file)
    assert "no such folder" in refused(cli, graph_file, "-o", tmp_path / "no" / "o.onnx")
    assert ".html" in refused(cli, graph_file, "-o", out, "--report", tmp_path / "r.txt")
    assert "plugin" in refused(cli, graph_file, "-o", out, "--plugin", tmp_path / "absent.py")
    assert "preset" in refused(cli, graph_file, "-o", out, "-p", PIPELINE, "--optimizer", "adamw")
    assert not out.exists()


def test_a_plain_onnx_file_has_no_signature(cli, tmp_path):
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[2])
    node = ir.node("Relu", [x])
    node.outputs[0].name = "y"
    path = tmp_path / "plain.onnx"
    onnx.save_model(
        ir.to_proto(ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 18}), ir_version=10)), path
    )
    assert "no ortgraph signature" in refused(cli, path, "-o", tmp_path / "o.onnx")
    ran = cli("inspect", path)
    assert ran.code == 0 and "no ortgraph signature" in ran.out and "Relu" in ran.out


def test_wrong_stage(cli, graph_file, tmp_path):
    planned = tmp_path / "planned.onnx"
    assert cli("optimize", graph_file, "-o", planned, "-O1").code == 0
    ran = cli("optimize", planned, "-o", tmp_path / "o.onnx", "-O2")
    assert ran.code == 2 and "the graph is planned" in ran.err and not (tmp_path / "o.onnx").exists()


def test_the_input_survives(cli, graph_file):
    before = graph_file.read_bytes()
    assert "never overwritten" in refused(cli, graph_file, "-o", graph_file, "-p", PIPELINE)
    assert graph_file.read_bytes() == before
    assert cli("optimize", graph_file, "-o", graph_file, "-p", PIPELINE, "--force").code == 0


def test_a_failed_verification_writes_nothing(cli, graph_file, tmp_path, spoiler):
    out, page = tmp_path / "out.onnx", tmp_path / "r.html"
    ran = cli(
        "optimize", graph_file, "-o", out, "-p", "spoil", "--plugin", spoiler, "--verify", "numerics", "--report", page
    )
    assert ran.code == 1 and "numbers changed" in ran.err
    assert not out.exists() and not out.with_suffix(".safetensors").exists() and not page.exists()


def test_bisect_names_the_pass(cli, graph_file, tmp_path, spoiler):
    out = tmp_path / "out.onnx"
    words = ("-p", f"{PIPELINE},spoil", "--plugin", spoiler, "--bisect", "--json")
    ran = cli("optimize", graph_file, "-o", out, *words)
    assert ran.code == 1 and not out.exists()
    assert ran.json["culprit"]["name"] == "spoil" and "w" in ran.json["culprit"]["reason"]
    ran = cli("optimize", graph_file, "-p", PIPELINE, "--bisect", "--json")
    assert ran.code == 0 and ran.json == {"culprit": None}


@pytest.mark.parametrize("more", [("-O1",), ("-O2", "--optimizer", "adamw")])
def test_bisect_runs_a_preset_with_its_plugins(cli, graph_file, tmp_path, more):
    name, plugin = f"spoil-at{more[0].lower()}", tmp_path / "spoil.py"
    plugin.write_text(
        PLUGIN.replace('"spoil"', f'"{name}"').replace(
            'after: ClassVar[str] = "optimized"', 'after: ClassVar[str] = "captured"'
        )
    )
    ran = cli("optimize", graph_file, *more, "--plugin", plugin, "--bisect", "--json")
    assert ran.code == 1 and ran.json["culprit"]["name"] == name


def test_a_plugin_is_inserted_into_a_preset(cli, graph_file, tmp_path, spoiler):
    ran = cli("optimize", graph_file, "-o", tmp_path / "out.onnx", "-O1", "--plugin", spoiler, "--json")
    assert ran.code == 0, ran.err
    names = [p["name"] for p in ran.json["passes"]]
    assert names.index("spoil") == names.index("mark-optimized") + 1


def test_reproducer(cli, graph_file, tmp_path):
    plugin = tmp_path / "raise.py"
    plugin.write_text(PLUGIN.replace('"spoil"', '"explode"').replace("changes = Changes()", "raise ValueError('boom')"))
    folder = tmp_path / "repro"
    ran = cli(
        "optimize", graph_file, "-o", tmp_path / "o.onnx", "-p", "explode", "--plugin", plugin, "--reproducer", folder
    )
    assert ran.code == 2 and "boom" in ran.err
    assert load(folder / "before.onnx").node_count() == load(graph_file).node_count()
    assert "explode" in (folder / "reproduce.txt").read_text()


def test_values_are_kept(cli, graph_file, tmp_path):
    out = tmp_path / "out.onnx"
    cli("optimize", graph_file, "-o", out, "-O1")
    want, got = load(graph_file).values, load(out).values
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.fixture
def artifacts(tmp_path):
    """A folder that ONNX Runtime's generator wrote."""
    api = pytest.importorskip("onnxruntime.training.artifacts")
    h = onnx.helper
    rng = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n)
        for n, s in (("w", (3, 2)), ("b", (2,)))
    ]
    x, y = (h.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [4, k]) for n, k in (("x", 3), ("y", 2)))
    graph = h.make_graph(
        [h.make_node("MatMul", ["x", "w"], ["xw"]), h.make_node("Add", ["xw", "b"], ["y"])], "g", [x], [y], weights
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    folder = tmp_path / "artifacts"
    folder.mkdir()
    api.generate_artifacts(
        model,
        requires_grad=["w", "b"],
        loss=api.LossType.MSELoss,
        optimizer=api.OptimType.AdamW,
        artifact_directory=str(folder),
    )
    return folder


def on_device_losses(folder, steps: int = 4) -> list[float]:
    from onnxruntime.training import api

    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = api.Optimizer(folder / "optimizer_model.onnx", module)
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((4, k)).astype(np.float32) for k in (3, 2))
    losses = []
    for _ in range(steps):
        module.train()
        losses.append(float(module(x, y)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def test_a_folder_of_artifacts(cli, artifacts, tmp_path):
    out = tmp_path / "out"
    ran = cli(
        "optimize", artifacts, "-o", out, "-O2", "--verify", "numerics", "--report", tmp_path / "r.html", "--json"
    )
    assert ran.code == 0, ran.err
    assert ran.json["verified"] == "numerics" and ran.json["stage"] == "optimized"
    # The generator's own optimizer model has an IR version that the runtime refuses; the checkpoint is the same.
    optimizer = onnx.load_model(artifacts / "optimizer_model.onnx")
    optimizer.ir_version = 8
    onnx.save_model(optimizer, artifacts / "optimizer_model.onnx")
    losses = on_device_losses(out)
    np.testing.assert_allclose(losses, on_device_losses(artifacts), rtol=1e-5)
    assert losses[-1] < losses[0]


def test_artifact_mistakes(cli, artifacts, tmp_path):
    assert "training_model.onnx" in refused(cli, tmp_path, "-o", tmp_path / "out")
    assert "not an empty folder" in refused(cli, artifacts, "-o", artifacts)
    assert "own optimizer" in refused(cli, artifacts, "-o", tmp_path / "out", "--optimizer", "adamw")
    assert "--bisect" in refused(cli, artifacts, "--bisect")
    assert not (tmp_path / "out").exists()


def test_numbers_are_compared_with_standard_operators(cli, tmp_path, build_file):
    """A wrong kernel must not be compared with itself."""
    from ortgraph.manager.numerics import reference_form

    path = tmp_path / "net.onnx"
    assert cli("export", f"{build_file}:build", "-o", path).code == 0
    captured = load(path)
    assert any(n.domain == "ortgraph" for n in captured.graph)
    assert {n.domain for n in reference_form(captured).graph} == {""}
    planned = tmp_path / "planned.onnx"
    assert cli("optimize", path, "-o", planned, "-O2", "--optimizer", "adamw", "--verify", "numerics").code == 0
    assert reference_form(load(planned)).stage == "planned"


def test_a_plugin_whose_option_has_no_default_is_refused_under_a_preset(cli, graph_file, tmp_path):
    path, out = tmp_path / "needs.py", tmp_path / "out.onnx"
    text = PLUGIN.replace("class Spoil", "class Needs").replace('= "spoil"', '= "needs"')
    path.write_text(text.replace("    def run", "    size: int\n\n    def run"))
    ran = cli("optimize", graph_file, "-o", out, "-O1", "--plugin", path)
    assert ran.code == 2 and "'needs' cannot be made without options" in ran.err and not out.exists()


def test_a_plugin_whose_replacement_names_other_values_is_told_with_its_place(cli, graph_file, tmp_path):
    path, out = tmp_path / "names.py", tmp_path / "out.onnx"
    path.write_text(
        "from ortgraph.manager import fusion\n\n\n"
        "def pattern(op, x, w):\n    return op.MatMul(x, w)\n\n\n"
        "@fusion('wrong-names', pattern, after='captured')\n"
        "def WrongNames(op, a, b):\n    return op.MatMul(a, b)\n"
    )
    said = refused(cli, graph_file, "-o", out, "-O1", "--plugin", path)
    assert f"{path}:8: the replacement of pass wrong-names" in said and "(op, x, w)" in said and not out.exists()


def test_a_budget_over_symbolic_dimensions_is_left_to_the_session(cli, build_file, tmp_path):
    path, out = tmp_path / "net.onnx", tmp_path / "out.onnx"
    words = ("--dynamic", "x:0=batch", "--dynamic", "y:0=batch")
    assert cli("export", f"{build_file}:build", "-o", path, *words).code == 0
    line = "the session meets it for each batch shape"
    assert line in cli("optimize", path, "-o", out, "--memory-budget", "90%").out
    assert line not in cli("optimize", path, "-o", out).out
