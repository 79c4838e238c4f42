from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.graph import Names, replace_value
from ortgraph.graph.verify import check
from ortgraph.ops.builder import Builder


def node_of(graph, op_type):
    return next(n for n in graph.graph if n.op_type == op_type)


def test_fresh_names_avoid_every_kind_of_name():
    x = ir.val("1", dtype=ir.DataType.FLOAT, shape=[2])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="g")
    node = ir.node("Neg", [x], name="2")
    node.outputs[0].name = "3"
    graph.append(node)
    names = Names(graph)
    assert [names.fresh(n) for n in ("1", "2", "3", "3", "4", "")] == ["1.1", "2", "3.1", "3.2", "4", ".1"]
    assert [names.fresh_node(n) for n in ("1", "2", "2", "")] == ["1", "2.1", "2.2", ".1"]


def test_replaced_output_keeps_its_name(linear_graph):
    old = next(v for v in linear_graph.graph.outputs if v.name == "loss")
    build = Builder(linear_graph.graph, "test")
    new = build.op("Neg", build.op("Neg", old.producer().inputs[0]))
    replace_value(old, new)
    assert new.name == "loss" and new.is_graph_output()


@pytest.mark.parametrize("kind", ["input", "constant", "output"])
def test_output_replaced_by_a_value_that_cannot_take_the_name(linear_graph, kind):
    g = linear_graph.graph
    old = next(v for v in g.outputs if v.name == "b.grad")
    build = Builder(g, "test", before=old.producer())
    new = {"input": g.inputs[2], "constant": build.const([0.0, 0.0], ir.DataType.FLOAT), "output": g.outputs[0]}[kind]
    replace_value(old, new)
    g.remove(node_of_output(old), safe=True)
    assert [v.name for v in g.outputs] == ["loss", "w.grad", "b.grad"]
    assert g.outputs[2].producer().op_type == "Identity"
    assert check(linear_graph, "structure") == []


def node_of_output(value):
    return value.producer()


def test_output_that_stands_in_no_list_is_no_endless_search(linear_graph):
    """`del graph.outputs[:]` leaves values marked as outputs; replacing one must still end."""
    g = linear_graph.graph
    old = g.outputs[2]
    kept = list(g.outputs)[:2]
    del g.outputs[:]
    g.outputs.extend(kept)
    build = Builder(g, "test", before=old.producer())
    replace_value(old, build.op("Neg", old.producer().inputs[0]))
    assert list(g.outputs) == kept
