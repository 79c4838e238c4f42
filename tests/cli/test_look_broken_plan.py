"""``inspect`` and ``plan`` on files whose stored plan does not parse: a session plans anew, so they only lack figures."""

from __future__ import annotations

import pytest

from ortgraph.graph import load


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"arena_bytes": null, "max_load_bytes": 3}'])
def test_a_plan_that_does_not_parse_has_no_arena(cli, graph_file, tmp_path, text: str) -> None:
    out = tmp_path / "planned.onnx"
    assert cli("optimize", graph_file, "-o", out).code == 0
    graph = load(out)
    graph.model.metadata_props["ortgraph.plan"] = text
    graph.save(tmp_path / "broken.onnx")
    memory = cli("inspect", tmp_path / "broken.onnx", "--json").json["memory"]
    assert memory["arena"] is None and memory["arena_bound"] is None and memory["parameters"] > 0
    assert cli("inspect", tmp_path / "broken.onnx").code == 0
    assert cli("plan", tmp_path / "broken.onnx", "--json").json["arena"]["given"] >= 0
