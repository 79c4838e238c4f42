"""The table of two ranks, on a model of toy size."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
MODEL = """
def build():
    from bench.workloads import bert
    return bert(hidden=64, layers=1, batch=2, sequence=16)
"""


@pytest.mark.slow
def test_every_side_is_measured(tmp_path: pathlib.Path) -> None:
    """``pytest -m slow tests/bench/test_distributed.py``: nine processes, each compiles."""
    (tmp_path / "tiny.py").write_text(MODEL)
    out = tmp_path / "out.json"
    command = ["-m", "bench.distributed", "--workload", f"{tmp_path}/tiny.py:build", "--rounds", "1", "--steps", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, *command, "--json", str(out)], capture_output=True, text=True, timeout=280, env=environment
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(out.read_text())
    assert [row["side"] for row in found["rows"]] == ["torch", "ortgraph", "zero", "graph"]
    for row in found["rows"]:
        assert row["samples_per_second"] == pytest.approx(4 / row["step_seconds"])
        assert len(row["peak_bytes"]) == 2 and min(row["peak_bytes"]) > 100e6
    assert found["one"] > 0 and found["sum"] > 0 and found["ratio"] > 0
