from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.errors import PassError
from ortgraph.graph import TrainingGraph
from ortgraph.passes.canonical.sort_nodes import SortNodes

X = {"x": np.ones(2, np.float32)}
TEXT = "g (float[2] x) => (float[2] y) { a = Neg(x) b = Exp(a) c = Abs(x) y = Add(b, c) }"


def test_keeps_a_valid_order(run):
    ran = run(TEXT, SortNodes(), X)
    assert ran.ops == ["Neg", "Exp", "Abs", "Add"] and ran.counts == {}


def test_mends_an_order(run, parse_model):
    model = parse_model(TEXT)
    a, b, c, y = model.graph
    model.graph.remove(a)
    model.graph.append(a)
    ran = run(model, SortNodes())
    assert ran.counts["moved"] > 0
    place = {n.op_type: i for i, n in enumerate(model.graph)}
    assert place["Neg"] < place["Exp"] < place["Add"]


def test_what_a_branch_reads_comes_first(run, parse_model):
    model = parse_model("""g (float[2] x, bool c) => (float[2] y) { a = Neg(x)
        y = If (c) <then_branch = t () => (float[2] p) { p = Abs(a) }, else_branch = e () => (float[2] q)
        { q = Exp(x) }> }""")
    a, _ = model.graph
    model.graph.remove(a)
    model.graph.append(a)
    assert run(model, SortNodes()).ops == ["Neg", "If"]


def test_names_nodes_that_have_none_or_share_one(run, parse_model):
    model = parse_model(TEXT)
    for node, name in zip(model.graph, ("", "same", "same", "same.1"), strict=True):
        node.name = name
    ran = run(model, SortNodes(), X)
    names = [n.name for n in ran.graph.graph]
    assert len(set(names)) == 4 and "" not in names and names[1] == "same" and names[3] == "same.1"
    assert ran.counts == {}


def test_a_circle_is_an_error(parse_model):
    model = parse_model(TEXT)
    a, b, _, _ = model.graph
    a.replace_input_with(0, b.outputs[0])
    with pytest.raises(PassError, match="circle"):
        SortNodes().run(TrainingGraph(model))
    assert isinstance(model, ir.Model)
