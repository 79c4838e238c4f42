"""Tables, charts and the one-file page."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from ortgraph.manager.base import Refusal
from ortgraph.manager.optimize import optimize
from ortgraph.manager.pass_manager import PassRecord
from ortgraph.report import svg, tables
from ortgraph.report.html import Page
from ortgraph.report.optimization import optimization_page


def record(name: str, counts=None, refusals=(), **changes) -> PassRecord:
    fields = dict(text=name, modified=bool(counts), seconds=0.001, verify_seconds=0.002, nodes_before=5, nodes_after=4)
    return PassRecord(name=name, counts=counts or {}, refusals=tuple(refusals), **{**fields, **changes})


def test_operator_changes_are_signed_and_sorted():
    rows = tables.operator_change_rows({"Add": 3, "Mul": 1, "Sub": 2}, {"Add": 1, "Mul": 1, "Exp": 1})
    assert rows == [("Add", 3, 1, "-2"), ("Sub", 2, 0, "-2"), ("Exp", 0, 1, "+1"), ("Mul", 1, 1, "")]


def test_refusals_that_differ_in_names_only_are_one_row():
    same = [Refusal("n1", "inner value %a is a graph output"), Refusal("n2", "inner value %b is a graph output")]
    other = [Refusal("n3", "axis 2 is not the last")]
    rows = tables.refusal_rows([record("fuse-x", refusals=same + other), record("fuse-x", refusals=same[:1])])
    assert rows == [
        ("fuse-x", 2, "inner value %a is a graph output", "n1"),
        ("fuse-x", 1, "axis 2 is not the last", "n3"),
    ]


def test_pass_rows_with_and_without_times():
    r = record("fuse-x", {"b": 1, "a": 2}, [Refusal("n", "no")])
    assert tables.pass_rows([r]) == [("fuse-x", "yes", "5 → 4", "a=2 b=1", 1)]
    assert tables.pass_rows([r], seconds=True)[0][-2:] == ("1.0", "2.0")
    assert tables.summed_counts([r, r]) == {"a": 4, "b": 2}


def test_gradient_rows_put_the_worst_first():
    rows = tables.gradient_rows({"one": {"a": 1e-7, "b": 2e-6}, "two": {"a": 3e-7}})
    assert rows == [("b", "2.0e-06", ""), ("a", "1.0e-07", "3.0e-07")]


def test_memory_of_a_planned_graph(linear_graph):
    assert tables.memory_of(linear_graph) == {"parameters": 32, "states": 0}
    planned = optimize(linear_graph, "O1").graph
    memory = tables.memory_of(planned)
    assert memory["parameters"] == 32 and memory["arena"] >= memory["arena_bound"] > 0
    rows = tables.memory_rows({"parameters": 1234567, "arena": None})
    assert rows[0][:2] == ("parameters", "1,234,567") and rows[1][1] == "?"


def test_symbolic_sizes_are_unknown(linear_graph):
    import onnx_ir as ir

    value = linear_graph.graph.inputs[0]
    value.shape = ir.Shape(["batch", 3])
    assert tables.bytes_of(value) is None and tables.elements_of(value, {"batch": 4}) == 12
    assert ("input", 1, "?", "?") in tables.role_rows(linear_graph)


@pytest.mark.parametrize(
    "chart",
    [
        svg.line_chart("a & b", {"x<y": [1.0, 2.0, math.nan, 3.0], "z": [2.0]}, "step", "loss"),
        svg.line_chart("flat", {"x": [1.0, 1.0]}, "step", "loss"),
        svg.line_chart("empty", {}, "step", "loss"),
        svg.line_chart("nan", {"x": [math.nan, math.inf]}, "step", "loss"),
        svg.line_chart("long", {"x": [float(i) for i in range(5000)]}, "step", "loss"),
        svg.histogram("h", {"x": [1.0, 2.0, 2.0, 500.0], "y": [1.0]}, "ms"),
        svg.histogram("one", {"x": [1.0]}, "ms"),
        svg.histogram("empty", {"x": []}, "ms"),
        svg.bar_chart("bars", [("<op>", 3.0, "3"), ("b", 0.0, "0")]),
        svg.bar_chart("none", []),
    ],
)
def test_charts_are_well_formed_and_finite(chart):
    root = ElementTree.fromstring(chart)
    assert root.tag == "svg" and root.get("aria-label")
    assert "nan" not in chart.replace(">nan<", "").replace('"nan"', "") and "inf" not in chart


def test_a_line_has_a_gap_where_a_value_is_missing():
    chart = svg.line_chart("t", {"x": [1.0, 2.0, math.nan, 3.0, 4.0]}, "step", "loss")
    path = next(p.get("d") for p in ElementTree.fromstring(chart).iter("path") if p.get("stroke-width"))
    assert path.count("M") == 2 and path.count("L") == 2


def test_long_lines_are_thinned_but_keep_their_end():
    values = [0.0] * 4999 + [1.0]
    path = svg.line_chart("t", {"x": values}, "step", "loss").split('<path d="')[2].split('"')[0]
    assert path.count("L") < 500 and path.rsplit("L", 1)[1].startswith("624.0 ")


def test_everything_on_a_page_is_escaped():
    page = Page("<title>")
    page.section("<s>")
    page.text("<t>")
    page.figures([("<n>", "<v>")])
    page.table(("<c>",), [("<script>alert(1)</script>",)])
    page.table(("c",), [])
    text = page.render()
    assert "<script" not in text and "&lt;script&gt;" in text and "<t>" not in text and "none" in text


def test_the_page_of_a_pipeline(linear_graph):
    result = optimize(linear_graph, "O2")
    page = optimization_page("model <1>", result.graph, result.report, "signature")
    assert "model &lt;1&gt;" in page and "mark-optimized" in page and "MatMul" in page and "arena bound" in page
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page and "<link" not in page, "one file"
