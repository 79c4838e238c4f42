"""FuseEmbeddingGradient: ScatterND and ScatterElements forms with repeated indices, near misses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.passes.fusion.embedding_gradient import FuseEmbeddingGradient

I64 = ir.DataType.INT64


def scatter_nd(bench, indices=(2, 5), rows=4, width=3, zero="const", reduction="add", unsqueeze=True, dtypes=None):
    def body(b, i, dy, table):
        if zero == "table":
            base = table
        elif zero == "shape":
            base = b.op("ConstantOfShape", b.ints([rows, width]))
        elif zero == "expand":
            base = b.op("Expand", b.scalar(0.0, dy), b.ints([rows, width]))
        else:
            base = b.const(np.zeros((rows, width)), dy.dtype)
        index = b.op("Unsqueeze", i, b.ints([-1])) if unsqueeze else i
        return b.op("ScatterND", base, index, dy, reduction=reduction)

    inner = indices if unsqueeze else indices[:-1]
    shapes = {"i": indices, "dy": (*inner, width), "table": (rows, width)}
    return bench.make(body, shapes, {"i": I64, **(dtypes or {})})


@pytest.mark.parametrize("case", [{"zero": z} for z in ("const", "shape", "expand")] + [{"indices": (7,)}])
def test_scatter_nd(bench, case):
    graph = scatter_nd(bench, **case)
    assert bench.apply(graph, FuseEmbeddingGradient()) == {"ScatterND": 1}
    assert "ortgraph.EmbeddingGrad" in bench.ops(graph) and "ScatterND" not in bench.ops(graph)


def test_indices_without_unsqueeze(bench):
    graph = scatter_nd(bench, indices=(2, 5, 1), unsqueeze=False)
    assert bench.apply(graph, FuseEmbeddingGradient()) == {"ScatterND": 1}
    assert bench.ops(graph) == ["Squeeze", "ortgraph.EmbeddingGrad"]


def test_table_that_is_not_zero(bench):
    graph = scatter_nd(bench, zero="table")
    assert bench.apply(graph, FuseEmbeddingGradient()) == {"ScatterND": 1}
    assert bench.ops(graph)[-1] == "Add"


def scatter_elements(bench, axis=0, column=(6, 1), reduction="add", expand=True, updates=(6, 3)):
    def body(b, i, dy):
        index = b.op("Expand", i, b.ints(updates)) if expand else i
        return b.op(
            "ScatterElements", b.op("ConstantOfShape", b.ints([4, 3])), index, dy, axis=axis, reduction=reduction
        )

    return bench.make(body, {"i": column, "dy": updates}, {"i": I64})


def test_scatter_elements(bench):
    graph = scatter_elements(bench)
    assert bench.apply(graph, FuseEmbeddingGradient()) == {"ScatterElements": 1}


def test_same_sums_at_two_threads(bench):
    graph = scatter_nd(bench, indices=(400,), rows=3, width=64)
    FuseEmbeddingGradient()(graph.model)
    feeds = bench.feeds(graph)
    want = np.zeros((3, 64))
    np.add.at(want, feeds["i"], feeds["dy"].astype(float))
    for _ in range(10):
        np.testing.assert_allclose(bench.run(graph, feeds, threads=2)[0], want, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "case", "word"),
    [
        (scatter_nd, {"reduction": "mul"}, "reduction is mul"),
        (scatter_nd, {"reduction": "max"}, "reduction is max"),
        (scatter_nd, {"indices": (5, 2), "unsqueeze": False, "width": 3}, "elements"),
        (scatter_elements, {"axis": 1, "column": (4, 1), "updates": (4, 3)}, "axis 1"),
        (scatter_elements, {"expand": False, "column": (6, 3)}, "elements"),
        (scatter_elements, {"column": (1, 1)}, "broadcast over rows"),
        (scatter_elements, {"column": (6, 1), "updates": (6, 2)}, "whole rows"),
        (scatter_nd, {"dtypes": {"dy": ir.DataType.INT32, "table": ir.DataType.INT32}}, "element type"),
    ],
)
def test_near_misses(bench, make, case, word):
    if case.get("unsqueeze") is False:

        def body(b, i, dy, table):
            return b.op("ScatterND", table, i, dy, reduction="add")

        graph = bench.make(body, {"i": (5, 2), "dy": (5,), "table": (4, 3)}, {"i": I64})
    else:
        graph = make(bench, **case)
    reasons = bench.refusals(graph, FuseEmbeddingGradient())
    assert len(reasons) == 1 and word in reasons[0]


def test_overwriting_scatter_is_no_candidate(bench):
    assert bench.refusals(scatter_nd(bench, reduction="none"), FuseEmbeddingGradient()) == []


def test_exposed_inner_values(bench):
    assert bench.expose_each(lambda: scatter_nd(bench, zero="shape"), FuseEmbeddingGradient())
    assert bench.expose_each(lambda: scatter_elements(bench), FuseEmbeddingGradient())
