"""``inspect``, ``verify``, ``diff``, ``passes``, ``doctor``: the verbs that only look."""

from __future__ import annotations

import numpy as np
import pytest

from ortgraph.graph import load
from ortgraph.manager import registry


def test_inspect(cli, graph_file):
    ran = cli("inspect", graph_file)
    assert ran.code == 0 and "stage captured" in ran.out and "MatMul" in ran.out
    data = cli("inspect", graph_file, "--json").json
    assert (
        data["nodes"] == load(graph_file).node_count() == 9
        and data["trainable"] == 2
        and data["memory"] == {"parameters": 32, "states": 0}
    )
    assert cli("inspect", graph_file, "--text").out.strip() == load(graph_file).text().strip()
    assert "%b" not in ran.out and "│ b" in cli("inspect", graph_file, "--all").out


def test_inspect_shows_the_plan(cli, graph_file, tmp_path):
    out = tmp_path / "o.onnx"
    cli("optimize", graph_file, "-o", out, "-O1", "--optimizer", "adamw")
    memory = cli("inspect", out, "--json").json["memory"]
    assert memory["arena"] >= memory["arena_bound"] > 0
    assert memory["states"] >= 2 * memory["parameters"], "two moments"


def test_verify(cli, graph_file, tmp_path):
    ran = cli("verify", graph_file, "--json")
    assert ran.code == 0 and ran.json["ok"] is True and ran.json["violations"] == []
    graph = load(graph_file)
    graph.signature = graph.signature.replace(loss="lost")
    broken = graph.save(tmp_path / "broken.onnx")
    ran = cli("verify", broken, "--json")
    assert ran.code == 1 and ran.json["violations"][0]["rule"] == "outputs-are-named"
    assert "outputs-are-named" in cli("verify", broken).out
    assert cli("verify", broken, "--level", "structure").code == 0


def test_verify_against_a_reference(cli, graph_file, tmp_path):
    other = tmp_path / "o.onnx"
    cli("optimize", graph_file, "-o", other, "-O1")
    ran = cli("verify", other, "--reference", graph_file, "--json")
    assert ran.code == 0 and ran.json["numerics"]["gradient"] <= 1e-6
    graph = load(graph_file)
    graph.values["w"] = graph.values["w"] + np.float32(0.1)
    moved = graph.save(tmp_path / "moved.onnx")
    ran = cli("verify", moved, "--reference", graph_file, "--json")
    assert ran.code == 1 and ran.json["ok"] is False and ran.json["numerics"]["gradient"] > 1e-4


def test_verify_mistakes(cli, graph_file):
    assert "level" in cli("verify", graph_file, "--level", "all").err
    ran = cli("verify", graph_file, "--level", "numerics")
    assert ran.code == 2 and "--reference" in ran.err


def test_diff(cli, graph_file, tmp_path):
    assert cli("diff", graph_file, graph_file, "--json").json["same"] is True
    other = tmp_path / "o.onnx"
    cli("optimize", graph_file, "-o", other, "-O1", "--optimizer", "adamw")
    ran = cli("diff", graph_file, other, "--text")
    assert ran.code == 1 and "stage" in ran.out and "learning_rate" in ran.out and "\n+" in ran.out


def test_diff_sees_values(cli, graph_file, tmp_path):
    graph = load(graph_file)
    graph.values["w"] = graph.values["w"] + np.float32(0.5)
    ran = cli("diff", graph_file, graph.save(tmp_path / "o.onnx"), "--json")
    assert ran.code == 1 and ran.json["values"] == [["w", "differs by up to 5.0e-01"]]


def test_passes(cli):
    data = cli("passes", "--json").json
    assert [p["name"] for p in data["passes"]] == list(registry.names())
    assert not [p["name"] for p in data["passes"] if "cannot be loaded" in p["summary"]]
    assert {"O0", "O1", "O2"} <= set(data["presets"])
    assert "eliminate-dead-code" in cli("passes").out


def test_one_pass(cli):
    data = cli("passes", "lower", "--json").json
    assert data["sets_stage"] == "lowered" and "target" in {o["name"] for o in data["options"]}
    ran = cli("passes", "lowr")
    assert ran.code == 2 and "did you mean lower" in ran.err


def test_doctor(cli, monkeypatch):
    data = cli("doctor", "--json").json
    assert {"python", "onnx", "torch", "onnxruntime", "kernels", "processor"} <= {f["what"] for f in data["findings"]}


def test_doctor_with_two_runtimes(cli, monkeypatch):
    from ortgraph.runtime import detect

    detect.detect_runtime.cache_clear()
    monkeypatch.setattr(
        detect, "installed_wheels", lambda: {"onnxruntime": "1.32.0", "onnxruntime-training-cpu": "1.19.2"}
    )
    ran = cli("doctor")
    detect.detect_runtime.cache_clear()
    assert ran.code == 1 and "both installed" in ran.out and "pip uninstall" in ran.out


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0"])
def test_pytorch_outside_the_tested_range(cli, monkeypatch, build_file, tmp_path, version):
    from ortgraph.runtime import detect

    monkeypatch.setattr(detect, "torch_version", lambda: version)
    ran = cli("export", f"{build_file}:build", "-o", tmp_path / "o.onnx")
    assert ran.code == 3 and version in ran.err and "Traceback" not in ran.err
    assert cli("doctor").code == 1


def test_help_of_every_verb(cli):
    from ortgraph.cli.app import VERBS

    for name in VERBS:
        ran = cli(name, "--help")
        assert ran.code == 0 and "--json" in ran.out, name
    assert "demo" in cli("--help").out and cli("--version").out.startswith("ortgraph ")


def test_sizes_of_no_dimension_are_refused(cli, build_file, tmp_path):
    graph = tmp_path / "train.onnx"
    made = cli("export", build_file, "-o", graph, "--dynamic", "x:0=batch", "--dynamic", "y:0=batch")
    assert made.code == 0, made.err
    assert cli("verify", graph, "--reference", graph, "--shapes", "batch=3").code == 0
    ran = cli("verify", graph, "--reference", graph, "--shapes", "batsch=3")
    assert ran.code == 2 and "'batsch'" in ran.err and "did you mean batch?" in ran.err
