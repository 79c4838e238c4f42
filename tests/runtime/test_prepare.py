"""A symbolic graph is finished by its own pipeline once its sizes are bound."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.manager.optimize import optimize
from ortgraph.runtime.prepare import prepare, recorded_tail


def dynamic(graph):
    for value in (*graph.graph.inputs, *(o for n in graph.graph for o in n.outputs)):
        value.shape = ir.Shape([ir.SymbolicDim("batch") if d == 4 else d for d in value.shape])
    return graph


@pytest.mark.parametrize(("level", "word"), [("O2", "fuse-add-norm"), ("O0", "fold-shapes")])
def test_tail_is_what_the_pipeline_runs_after_lower(linear_graph, level, word):
    result = optimize(dynamic(linear_graph), level, target="onnxruntime").graph
    tail = recorded_tail(result)
    assert word in tail and "plan-memory" not in tail and not any(name.startswith("lower") for name in tail)


def test_graph_that_no_pipeline_lowered_has_no_tail(linear_graph):
    assert recorded_tail(linear_graph) == ()
    linear_graph.signature = linear_graph.signature.replace(metadata={"pipeline": "SomeForeignPass,lower"})
    assert recorded_tail(linear_graph) == ()


def test_bound_graph_is_static(linear_graph):
    result = optimize(dynamic(linear_graph), "O2", target="onnxruntime").graph
    ready = prepare(result, {"batch": 4}, "onnxruntime")
    assert all(v.shape.is_static() for n in ready.graph for v in n.outputs)
