from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.errors import InputError
from ortgraph.manager import PassManager, parse_pipeline


def dynamic(graph):
    """The linear graph with a named batch dimension."""
    for value in (*graph.graph.inputs, *(o for n in graph.graph for o in n.outputs)):
        value.shape = ir.Shape([ir.SymbolicDim("batch") if d == 4 else d for d in value.shape])
    return graph


def test_binds_every_value(linear_graph):
    before = linear_graph.text()
    graph = dynamic(linear_graph)
    assert "batch" in graph.text()
    PassManager(parse_pipeline("bind-shapes{sizes=batch:4}"), verify="types").run(graph)
    assert graph.text() == before


@pytest.mark.parametrize("sizes", ["rows:4", "batch:0", "batch:x", "batch", "batch:-1"])
def test_refuses(linear_graph, sizes):
    with pytest.raises(InputError):
        PassManager(parse_pipeline(f"bind-shapes{{sizes={sizes}}}")).run(dynamic(linear_graph))
