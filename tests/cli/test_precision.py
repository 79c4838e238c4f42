"""``--precision`` and ``--precision-overrides`` of optimize, verify and train."""

from __future__ import annotations

import pytest

from ortgraph.graph import load
from ortgraph.ops.precision import LOW


@pytest.fixture
def exported(cli, build_file, tmp_path):
    path = tmp_path / "train.onnx"
    assert cli("export", f"{build_file}:build", "-o", path).code == 0
    return path


def test_optimize_casts_explains_and_is_compared(cli, exported, tmp_path):
    out = tmp_path / "step.onnx"
    ran = cli("optimize", exported, "-o", out, "--precision", "bf16", "--optimizer", "adamw",
              "--explain", "precision", "--verify", "numerics", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    told = ran.json["explain"]
    assert told["pass"] == "cast-precision" and told["counts"]["products"] == 5
    assert 0 < told["counts"]["casts"] < told["counts"]["casts-unshared"]
    assert any("CrossEntropy stays in float32" in r["reason"] for r in told["refusals"])
    assert any(v.dtype in LOW for n in load(out).graph for v in n.outputs)
    compared = cli("verify", out, "--reference", exported, "--json").json["numerics"]
    assert compared["precision"] == "bf16" and compared["equal"] and compared["gradient_tolerance"] > 1e-2
    assert compared["gradient"] > 1e-4


def test_overrides_keep_a_module(cli, exported, tmp_path):
    ran = cli("optimize", exported, "-o", tmp_path / "step.onnx", "--precision", "fp16",
              "--precision-overrides", "keep=up;low=Gelu", "--explain", "precision", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    told = ran.json["explain"]
    assert told["counts"]["products"] == 3
    assert any("keep=up" in r["reason"] for r in told["refusals"])


@pytest.mark.parametrize(("words", "message"), [
    (("--precision", "tf32"), "unknown precision 'tf32'"),
    (("--precision-overrides", "keep=Gelu"), "overrides go with a low precision"),
    (("--precision", "bf16", "--precision-overrides", "high=Gelu"), "unknown key 'high'"),
    (("--precision", "bf16", "-p", "eliminate-dead-code"), "--precision goes with a preset"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_before_work(cli, exported, tmp_path, words, message):
    ran = cli("optimize", exported, "-o", tmp_path / "step.onnx", *words)
    assert ran.code != 0 and message in ran.err and not (tmp_path / "step.onnx").exists()


def test_train(cli, build_file, tmp_path):
    target = f"{build_file}:build"
    low = cli("train", target, "--steps", "8", "--precision", "bf16", "--json").json
    full = cli("train", target, "--steps", "8", "--json").json
    assert low["losses"] != full["losses"]
    assert low["losses"] == pytest.approx(full["losses"], rel=2e-2)
    assert cli("train", target, "--steps", "2", "--precision", "int8").code != 0


def test_bisect_knows_the_precision(cli, exported):
    ran = cli("optimize", exported, "--precision", "bf16", "--bisect", "--json")
    assert ran.code == 0 and ran.json["culprit"] is None
