"""add-embedding-gradient: the same bits in one table, near misses, and the memory of a tied head."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.ops import kernels
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.memory.add_embedding_gradient import AddEmbeddingGradient

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")
ROWS, WIDTH = 40, 5


def summed(bench, *, padding=-1, first=False, op="Add", other=(ROWS, WIDTH), body=None, ids=(2, 4)):
    def make(b, dy, indices, g):
        table = b.op("EmbeddingGrad", dy, indices, domain=KERNELS, rows=ROWS, padding_idx=padding)
        total = b.op(op, *((table, g) if first else (g, table)))
        return [total, *(body(b, table) if body is not None else ())]

    shapes = {"dy": (*ids, WIDTH), "indices": ids, "g": other}
    return bench.make(make, shapes, {"indices": ir.DataType.INT64})


@pytest.mark.parametrize("case", [{}, {"padding": 2}, {"first": True}, {"op": "Sum"}, {"ids": (7,)}])
@pytest.mark.parametrize("threads", [1, 2])
def test_same_bits(bench, case, threads):
    graph = summed(bench, **case)
    feeds = bench.feeds(graph)
    before = bench.run(graph, feeds, threads)
    assert bench.apply(graph, AddEmbeddingGradient(), tolerance=0) == {"sums": 1}
    assert bench.ops(graph) == ["ortgraph.kernels.EmbeddingGradAdd"]
    np.testing.assert_array_equal(bench.run(graph, feeds, threads)[0], before[0])


def test_two_lookups_of_one_table(bench):
    def make(b, dy, one, two, g):
        tables = [b.op("EmbeddingGrad", dy, i, domain=KERNELS, rows=ROWS, padding_idx=-1) for i in (one, two)]
        return b.op("Add", b.op("Add", g, tables[0]), tables[1])

    shapes = {"dy": (6, WIDTH), "one": (6,), "two": (6,), "g": (ROWS, WIDTH)}
    graph = bench.make(make, shapes, dict.fromkeys(("one", "two"), ir.DataType.INT64))
    assert bench.apply(graph, AddEmbeddingGradient(), tolerance=0) == {"sums": 2}


@pytest.mark.parametrize(
    "case,reason",
    [
        ({"other": (WIDTH,)}, "the other summand is not known to be a table of 40 rows"),
        ({"body": lambda b, t: [b.op("Neg", t)]}, "is also read by Neg"),
        ({"body": lambda b, t: [t]}, "is a graph output"),
    ],
)
def test_near_misses(bench, case, reason):
    (found,) = bench.refusals(summed(bench, **case), AddEmbeddingGradient())
    assert reason in found


def test_a_tied_head_has_one_table_of_gradients(classifier_graph, classifier_batch):
    graph = ortgraph.optimize(classifier_graph(), "O2", optimizer=ortgraph.optim.AdamW(lr=1e-2)).graph
    made = [n.op_type for n in graph.graph if any(o.shape is not None and list(o.shape) == [11, 6] for o in n.outputs)]
    assert "EmbeddingGradAdd" in made and "EmbeddingGrad" not in made and "Add" not in made
    assert np.isfinite(ortgraph.TrainingSession(graph).step(classifier_batch()))
