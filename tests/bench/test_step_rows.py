"""Rows of the step benchmark: ratios, the fastest form, geometric means, targets, the page."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bench.step import with_peak
from bench.step_rows import (
    ALL,
    BEST,
    COMPILE,
    EAGER,
    RAW,
    STOCK,
    Row,
    fastest,
    geometric_mean,
    measured,
    read_json,
    results,
    write_json,
)
from bench.step_table import dearest_first, targets_table
from bench.tables import page
from bench.workloads import MEASURED, WORKLOADS, attentions

ASKED = (
    "workload", "precision", "peer", "setting", "ratio_median", "ratio_low", "ratio_high", "ms_ortgraph", "ms_peer",
    "peak_fraction",
)  # fmt: skip


def figure(workload: str, ratio: float | None, peer: str = EAGER, setting: str = BEST, precision: str = "fp32") -> Row:
    row = Row(workload, precision, peer, setting, threads=2, steps=3, rounds=7, machine="a machine")
    if ratio is None:
        return dataclasses.replace(row, error="it broke")
    return measured(row, [(0.01, 0.01 * ratio)] * 7)


def test_ratios_are_taken_per_round() -> None:
    row = measured(Row("w", "fp32", EAGER, BEST), [(1.0, 2.0), (2.0, 2.0), (4.0, 12.0), (1.0, 5.0), (1.0, 4.0)])
    assert row.ratio_median == 3.0  # of 1, 2, 3, 4, 5: the ratio of medians would be 4
    assert (row.ratio_low, row.ratio_high) == (2.0, 4.0)
    assert (row.ms_ortgraph, row.ms_peer, row.rounds) == (1000.0, 4000.0, 5)


def test_one_round_has_no_spread() -> None:
    row = measured(Row("w", "fp32", EAGER, BEST), [(1.0, 1.5)])
    assert row.ratio_low == row.ratio_median == row.ratio_high == 1.5


def test_the_fastest_form_counts_and_a_failed_one_does_not() -> None:
    slow, fast, failed = figure("w", 2.0), figure("w", 1.5), figure("w", None)
    assert fastest([slow, failed, fast]) is fast
    assert fastest([failed]).error == "it broke"


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([]) is None


def test_the_better_of_eager_and_compiled_counts_against_a_target() -> None:
    rows = [
        figure("a", 4.0), figure("a", 2.0, COMPILE), figure("b", 1.2), figure("b", 3.0, COMPILE),
        figure("a", 9.0, EAGER, STOCK), figure("a", 1.1, RAW, ALL), figure("a", 5.0, EAGER, BEST, "bf16"),
    ]  # fmt: skip
    found = {(r.target.precision, r.target.setting): r for r in results(rows)}
    assert set(found) == {("fp32", BEST), ("fp32", STOCK), ("fp32", ALL), ("bf16", BEST)}
    best = found["fp32", BEST]
    assert best.ratios == {"a": 2.0, "b": pytest.approx(1.2)}
    assert best.mean == pytest.approx(2.4**0.5)
    assert best.worst == ("b", pytest.approx(1.2))
    assert best.met
    assert not found["fp32", ALL].met


def test_a_target_with_a_missing_workload_is_not_met() -> None:
    rows = [figure("a", 4.0), figure("b", None)]
    (best,) = results(rows)
    assert best.mean == pytest.approx(4.0)
    assert best.missing == ("b",) and not best.met
    assert "missing: b" in targets_table(rows)


def test_the_worst_workload_must_reach_its_own_target() -> None:
    (best,) = results([figure("a", 4.0), figure("b", 1.04)])
    assert best.mean is not None and best.mean > best.target.mean
    assert not best.met


def test_masked_language_model_has_a_target_of_its_own() -> None:
    means = {r.target.mean: r for r in results([figure("bert-mlm-256x4", 1.9), figure("bert-256x4", 3.0)])}
    assert set(means[2.0].ratios) == {"bert-mlm-256x4"}
    assert not means[2.0].met and means[1.25].met


def test_the_file_is_a_list_with_the_names_that_were_promised(tmp_path) -> None:
    rows = [with_peak(figure("a", 2.0), flops=50_000_000, peak=1e10), figure("b", None)]
    write_json(rows, tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert set(ASKED) <= set(read[0])
    assert read[0]["peak_fraction"] == pytest.approx(0.5)  # 50 MFLOP in 10 ms of 10 GFLOP/s
    assert read[1]["error"] == "it broke" and read[1]["ratio_median"] is None
    assert read_json(tmp_path / "out.json") == rows


def test_tables_name_failures_and_targets() -> None:
    rows = [figure("bert-768x4", 2.0), figure("bert-768x4", None, COMPILE), figure("bert-768x4", 1.3, RAW, ALL)]
    rows[0] = dataclasses.replace(rows[0], peak_fraction=0.5)
    assert "it broke" in dearest_first(rows) and "50% of the matrix peak" in dearest_first(rows)
    assert "(target 75%)" in targets_table(rows)
    text = page(rows, note="A remark.")
    assert "| `bert-768x4` | 10.0 | 50% | 2.00 (2.00 to 2.00) | failed | 1.30 (1.30 to 1.30) |" in text
    assert "> A remark." in text and "`bert-768x4`, torch.compile, best: it broke" in text
    assert "| PyTorch (eager or compiled), best setting, float32 | 2.00 | 1.25 | 2.00 (`bert-768x4`) | 1.05 |" in text


def test_measured_workloads_exist() -> None:
    assert set(MEASURED) <= set(WORKLOADS) and len(MEASURED) == 8
    assert attentions("bert-256x4") == ("sdpa", "eager")
    assert attentions("resnet-18-b8") == attentions("file.py:build") == ("",)
