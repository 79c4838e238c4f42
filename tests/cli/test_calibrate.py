"""``ortgraph calibrate`` writes a table that loads, where it is told or in the cache folder."""

from __future__ import annotations

import json

import pytest

from ortgraph.analysis.cost import load_node_table
from ortgraph.cli.app import build_app
from ortgraph.ops import calibrate, calibrate_nodes
from ortgraph.ops.alternatives import load_table
from ortgraph.ops.cost_file import SHIPPED

pytest.importorskip("onnxruntime")
typer_testing = pytest.importorskip("typer.testing")


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Few operators, one try, a cache folder of its own."""
    monkeypatch.setattr(calibrate, "CASES", tuple(c for c in calibrate.CASES if c.op_type == "TanhGrad"))
    monkeypatch.setattr(calibrate, "_SECONDS", 0.0)
    found = {"other": {"points": [[0, 1.0]]}}
    monkeypatch.setattr(calibrate_nodes, "measure_nodes", lambda target, threads, seconds: found)
    monkeypatch.setenv("ORTGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def run(*words):
    return typer_testing.CliRunner().invoke(build_app(), ["calibrate", *words])


def test_both_parts_into_the_cache_folder(quick):
    done = run("--threads", "1", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout.splitlines()[-1])
    path = quick / "cache" / "cost_table.json"
    assert data["path"] == str(path) and data["nodes"] == 1 and data["machine"]["threads"] == 1
    assert "TanhGrad.expansion" in load_table(str(path)).entries
    assert set(load_node_table(str(path)).entries) == {"other"}


def test_one_part_keeps_the_other(quick):
    path = quick / "table.json"
    assert run("-o", str(path), "--part", "nodes").exit_code == 0
    assert load_table(str(path)).entries == json.loads(SHIPPED.read_text())["entries"]
    assert run("-o", str(path), "--part", "lowering").exit_code == 0
    assert set(load_node_table(str(path)).entries) == {"other"}


def test_an_unknown_part(quick):
    assert run("--part", "everything").exit_code == 2


@pytest.mark.parametrize(("text", "said"), [(None, "is a folder"), ("no table", "is no cost table")])
def test_a_file_that_cannot_be_the_table_is_told_before_measuring(quick, monkeypatch, text, said):
    monkeypatch.setattr(calibrate, "measure", None)
    path = quick / "table.json"
    path.mkdir() if text is None else path.write_text(text)
    ran = run("-o", str(path))
    assert ran.exit_code == 2 and said in ran.output
