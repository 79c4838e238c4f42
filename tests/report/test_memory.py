"""Pictures and rows of memory plans."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

import ortgraph
from ortgraph.cli.optimize_run import LEVELS
from ortgraph.manager.optimize import optimize
from ortgraph.optim import AdamW
from ortgraph.plan.budget import size_text
from ortgraph.plan.program_plan import plan_program, replan
from ortgraph.plan.sweep import sweep_plan
from ortgraph.report import memory, svg
from ortgraph.report.memory_page import memory_page, sweep_chart
from ortgraph.report.optimization import optimization_page


def texts(chart: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(chart).iter("text")]


def areas(chart: str) -> list[str]:
    return [
        p.attrib["d"]
        for p in ElementTree.fromstring(chart).iter("path")
        if "fill" in p.attrib and p.attrib["d"].endswith("Z")
    ]


def heights(path: str, high: float) -> list[float]:
    """Values of the upper edge of a step area."""
    bottom, top = svg._HEIGHT - svg._BOTTOM, svg._TOP
    y = [float(v) for v in re.findall(r"[ML]\S+ (\S+?)(?=[HLZ])", path)]
    return [(bottom - v) / (bottom - top) * high for v in y]


def test_stacked_areas_end_where_their_sums_do():
    chart = svg.stacked_chart("t", {"a": [1.0, 1.0, 3.0], "b": [1.0, 2.0, 0.0]}, "x", "y", top=3.6)
    assert svg._round_top(3.6) == 4.0
    lower, upper = areas(chart)
    assert heights(lower, 4.0)[:2] == pytest.approx([1, 3], abs=0.03)
    assert heights(upper, 4.0)[:2] == pytest.approx([2, 3], abs=0.03)
    assert "a" in texts(chart) and "b" in texts(chart)


def test_a_peak_of_one_step_is_not_thinned_away():
    values = [1.0] * 5000
    values[3333] = 9.0
    chart = svg.stacked_chart("t", {"a": values}, "x", "y", peak=(3333, "here"))
    (area,) = areas(chart)
    assert max(heights(area, svg._round_top(9.0))) == pytest.approx(9, abs=0.05)
    assert len(chart) < 20_000 and "here" in texts(chart)


def test_empty_bands_have_no_area_and_no_legend():
    chart = svg.stacked_chart("t", {"none": [0.0, 0.0], "some": [1.0, 2.0]}, "x", "y")
    assert len(areas(chart)) == 1 and "none" not in texts(chart)
    assert "no values" in texts(svg.stacked_chart("t", {}, "x", "y"))
    assert "no values" in texts(svg.stacked_chart("t", {"a": []}, "x", "y"))


def test_labels_are_escaped_and_marks_are_there():
    chart = svg.stacked_chart(
        "a & b",
        {"<x>": [1.0]},
        "x",
        "y",
        border=(0, "left", "right"),
        limit=(2.0, "budget"),
        base="p < q",
        peak=(0, "m & m"),
    )
    found = texts(chart)
    assert {"a & b", "<x>", "left", "right", "budget", "p < q", "m & m"} <= set(found)
    bare = svg.stacked_chart("t", {"x": [1.0]}, "x", "y")
    drawn = [int(ElementTree.fromstring(c).attrib["height"]) for c in (chart, bare)]
    assert drawn[0] > drawn[1]


def test_curve_chart_marks_and_misses():
    chart = svg.curve_chart("c", [(1.0, 5.0, ""), (2.0, 0.0, "")], "x", "y", [(1.5, "bound")], [0.5])
    circles = list(ElementTree.fromstring(chart).iter("circle"))
    assert len(circles) == 2 and float(circles[0].attrib["cy"]) < float(circles[1].attrib["cy"])
    assert "bound" in texts(chart) and "×" in texts(chart)
    assert "no values" in texts(svg.curve_chart("c", [], "x", "y"))
    ElementTree.fromstring(svg.curve_chart("c", [], "x", "y", missing=[1.0]))


@pytest.mark.parametrize("value", [1e-9, 0.3, 1.0, 3.6, 9.99, 44.37, 1063.0, 7.3e11])
def test_round_tops_have_room_and_round_quarters(value):
    top = svg._round_top(value)
    assert 1.1 * value <= top * (1 + 1e-9) and top <= 1.6 * value
    assert len(f"{top / 4:.6g}".replace(".", "").split("e")[0].strip("0")) <= 2
    assert svg._round_top(0.0) == 1.0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (62_700_000, "62.70 MB"), (4e9, "4.00 GB"), (-2000, "-2.00 kB")],
)
def test_sizes_as_text(size, text):
    assert size_text(size) == text


def test_rows_of_a_plan(classifier_graph):
    graph = optimize(classifier_graph(32, 16), "O2", optimizer=AdamW(lr=1e-2)).graph
    plan = plan_program(graph)
    facts = memory.memory_facts(graph, plan, order_bound=plan.before.peak)
    assert not facts.changed and memory.figure_columns(facts) == ("what", "given order", "")
    rows = {r[0]: r[1:] for r in memory.figure_rows(facts)}
    assert rows["arena"][0] == size_text(plan.arena.arena_bytes)
    assert rows["gradients"][0] == size_text(int(facts.given.bands["gradients"].max()))
    assert size_text(facts.gradients) in rows["gradients"][1]
    total = facts.fixed.total + plan.arena.arena_bytes + plan.scratch_bytes
    assert rows["step in total"][0] == size_text(total)
    assert [r[0] for r in memory.bound_rows(facts)] == ["max-load", "order bound", "floor"]
    assert "0.00% above" in memory.bound_rows(facts)[1][2]
    listed = memory.occupant_rows(facts.given, shown=1)
    first = facts.given.occupants[0]
    shown = dict(zip(memory.OCCUPANT_COLUMNS, listed[0], strict=True))
    assert shown["steps"] == f"{first.lower}–{first.upper}" and shown["role"] == first.role
    assert shown["bytes"] == size_text(first.bytes) and shown["shape"] == "×".join(map(str, first.shape))
    assert len(listed) == 2 and listed[1][1] == f"{len(facts.given.occupants) - 1} smaller values"


def test_page_with_everything(classifier_graph):
    graph = optimize(classifier_graph(32, 16), "O2", optimizer=AdamW(lr=1e-2)).graph
    given = plan_program(graph)
    swept = sweep_plan(given, 3, 1.0)
    plan = replan(given, swept.lowest.budget)
    facts = memory.memory_facts(graph, plan, order_bound=given.floor.bytes)
    page = memory_page("<file>", facts, swept, note="a & b")
    assert "&lt;file&gt;" in page and "a &amp; b" in page and page.count("<svg") == 2 + facts.changed
    marks = texts(sweep_chart(swept, 10, plan.budget))
    assert {"floor", "given order", "order bound", "budget"} <= set(marks)
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(chart)
    failed = [(p, r) for p, r in zip(swept.points, memory.sweep_rows(swept), strict=True) if p.plan is None]
    assert all(p.reason and p.reason in row[-1] for p, row in failed)
    data = memory.facts_json(facts)
    assert data["peak"]["planned"] == plan.after.peak and len(data["top"]["given"]) <= memory.SHOWN
    assert [p["budget"] for p in memory.sweep_json(swept)] == [p.budget for p in swept.points]


def test_optimize_report_shows_the_planned_memory(classifier_graph):
    result = optimize(classifier_graph(32, 16), "O2", optimizer=AdamW(lr=1e-2))
    page = optimization_page("x", result.graph, result.report, LEVELS[0])
    assert "Live memory, step by step" in page and "Largest values at the peak" in page
    free = optimize(classifier_graph("batch", 16), "O2", optimizer=AdamW(lr=1e-2))
    assert "Live memory" not in optimization_page("x", free.graph, free.report, LEVELS[0])
    lowered = ortgraph.optimize(classifier_graph(4, 4), "lower{target=onnxruntime-training}")
    assert "Live memory" not in optimization_page("x", lowered.graph, lowered.report, LEVELS[0])
