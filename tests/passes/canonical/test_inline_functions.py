from __future__ import annotations

import numpy as np
import pytest

from ortgraph.errors import PassError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import MODULE_KEY, PASS_KEY
from ortgraph.passes.canonical.inline_functions import InlineFunctions

TEXT = """<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
g (float[2] x, float[2] weight) => (float[2] y) { a = local.Scale(x, weight) y = local.Twice(a) }
<domain: "local", opset_import: ["" : 18]> Scale (u, w) => (r) { m = Mul(u, w) r = Neg(m) }
<domain: "local", opset_import: ["" : 18, "local" : 1]> Twice (u) => (r) { m = Add(u, u) r = local.Scale(m, m) }"""


def test_inlines_nested_calls_and_keeps_names(run):
    ran = run(TEXT, InlineFunctions(), {"x": np.array([1, 2], np.float32), "weight": np.array([3, 4], np.float32)})
    assert ran.ops == ["Mul", "Neg", "Add", "Mul", "Neg"] and ran.counts == {"inlined": 2}
    assert not ran.graph.model.functions
    assert [v.name for v in ran.graph.graph.inputs] == ["x", "weight"]


def test_new_nodes_say_where_they_come_from(run, parse_model):
    model = parse_model(TEXT)
    for node in model.graph:
        node.metadata_props[MODULE_KEY] = "block.0"
    ran = run(model, InlineFunctions())
    assert {(n.metadata_props[PASS_KEY], n.metadata_props[MODULE_KEY]) for n in ran.graph.graph} == {
        ("inline-functions", "block.0")
    }


def test_a_circle_is_an_error(parse_model):
    text = TEXT.replace("r = Neg(m) }", "r = local.Twice(m) }")
    with pytest.raises(PassError, match="inline-functions"):
        InlineFunctions().run(TrainingGraph(parse_model(text, infer=False)))


def test_nothing_to_do(run):
    assert run("g (float[2] x) => (float[2] y) { y = Neg(x) }", InlineFunctions()).counts == {}
