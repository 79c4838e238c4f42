"""Rows of the memory benchmark: what counts as met, and the file that others read."""

from __future__ import annotations

import json

import pytest

from bench.memory import main, run_suites
from bench.memory_rows import COLUMNS, row, summary, write_json


@pytest.mark.parametrize(
    ("value", "limits", "also", "met"),
    [
        (2.0, {"at_most": 2.0}, True, True),
        (2.01, {"at_most": 2.0}, True, False),
        (2.0, {"at_least": 2.0}, True, True),
        (1.99, {"at_least": 2.0}, True, False),
        (1.0, {"at_most": 2.0}, False, False),
        (None, {"at_most": 2.0}, True, False),
        (0.0, {"at_most": 0.0}, True, True),
        (5.0, {}, True, None),
    ],
)
def test_met(value, limits, also, met) -> None:
    assert row("s", "i", "t", value, also=also, **limits).met is met


def test_the_file_is_a_list_of_rows(tmp_path) -> None:
    rows = [row("s", "a", "t", 3.0, bound=2.5, at_most=4), row("s", "b", "t", None, at_least=1)]
    write_json(rows, tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert [tuple(r) for r in read] == [COLUMNS, COLUMNS]
    assert read[0] == {
        "suite": "s", "instance": "a", "setting": "t", "value": 3, "bound": 2.5, "target": 4, "met": True, "seconds": 0.0,
    }  # fmt: skip
    assert read[1]["value"] is None and read[1]["met"] is False
    assert summary(rows).startswith("1 of 2 targets met") and "s b, t" in summary(rows)


def test_a_suite_that_cannot_run_counts_as_short(monkeypatch) -> None:
    from bench import memory

    monkeypatch.setitem(memory.SUITES, "absent", "bench.no_such_module")
    rows = list(run_suites(["absent"], memory.Setup(None)))
    assert [r.met for r in rows] == [False]
    assert "no_such_module" in rows[0].setting


@pytest.mark.slow
def test_instances_dropped_into_the_folder_are_run(tmp_path, capsys) -> None:
    graph = {
        "graph": {"order": "[0, 1, 2]"},
        "nodes": [{"name": str(k), "duration": 1, "out_cost": 8} for k in range(3)],
        "edges": [{"0": "0", "1": "1"}, {"0": "1", "1": "2"}],
    }
    (tmp_path / "mine.json").write_text(json.dumps(graph))
    out = tmp_path / "out" / "rows.json"
    out.parent.mkdir()
    arguments = ["--suite", "order", "--instances", "mine", "--data", str(tmp_path), "--json", str(out)]
    assert main(arguments) == 0
    rows = json.loads(out.read_text())
    found = {r["setting"]: r for r in rows}
    assert {r["instance"] for r in rows} == {"mine"}
    assert found["peak bytes, at most 10 s"]["value"] == 16 == found["peak bytes, at most 10 s"]["bound"]
    assert found["peak bytes, at most 10 s"]["target"] is None
    assert "targets met" in capsys.readouterr().out
