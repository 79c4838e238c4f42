"""FuseBiasGradient: sums over rows through any view; near misses."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.errors import InputError
from ortgraph.passes.fusion.bias_gradient import FuseBiasGradient

PRODUCT, REDUCE = FuseBiasGradient(form="product"), FuseBiasGradient()


def sums(bench, shape=(2, 4, 3), axes=(0, 1), keepdims=0, view=None, dtype=ir.DataType.FLOAT):
    def body(b, dy):
        value = dy if view is None else b.op("Reshape", dy, b.ints(view))
        return b.op("ReduceSum", value, b.ints(axes), keepdims=keepdims)

    return bench.make(body, {"dy": shape}, {"dy": dtype})


CASES = [
    {}, {"keepdims": 1}, {"shape": (8, 3), "axes": (0,)}, {"shape": (8, 3), "axes": (0,), "keepdims": 1},
    {"axes": (-2, 0)}, {"view": (8, 3), "axes": (0,)}, {"view": (2, 2, 2, 3), "axes": (0, 1, 2), "keepdims": 1},
    {"dtype": ir.DataType.DOUBLE}, {"shape": (1, 3), "axes": (0,)},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_product(bench, case):
    graph = sums(bench, **case)
    assert bench.apply(graph, PRODUCT) == {"product": 1}
    assert "MatMul" in bench.ops(graph) and "ReduceSum" not in bench.ops(graph)


def test_reduce_form(bench):
    graph = sums(bench, view=(2, 2, 2, 3), axes=(0, 1, 2), keepdims=1)
    assert bench.apply(graph, REDUCE) == {"reduce": 1}
    assert [o for o in bench.ops(graph) if o != "Reshape"] == ["ReduceSum"]
    symbolic = sums(bench, shape=("n", 4, 3))
    assert bench.apply(symbolic, REDUCE) == {"reduce": 1}
    with pytest.raises(InputError, match="form"):
        FuseBiasGradient(form="magic")(graph.model)


def test_equal_lengths_share_the_ones(bench):
    def body(b, p, q):
        return [b.op("ReduceSum", v, b.ints([0]), keepdims=0) for v in (p, q)]

    graph = bench.make(body, {"p": (6, 3), "q": (6, 5)})
    assert bench.apply(graph, PRODUCT) == {"product": 2}
    first, second = graph.graph
    assert first.inputs[0] is second.inputs[0]


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"axes": (1,)}, "not over all rows"),
        ({"shape": (2, 4, 3), "axes": (0,)}, "not over all rows"),
        ({"shape": ("n", 3), "axes": (0,)}, "number of rows"),
        ({"shape": (4, "n"), "axes": (0,)}, "width"),
        ({"dtype": ir.DataType.INT32}, "element type"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(sums(bench, **case), PRODUCT)
    assert len(reasons) == 1 and word in reasons[0]


@pytest.mark.parametrize("case", [{"axes": (0, 1, 2)}, {"axes": (2,)}, {"shape": (5,), "axes": (0,)}, {"axes": (1, 2)}])
def test_other_sums_are_no_candidates(bench, case):
    assert bench.refusals(sums(bench, **case), PRODUCT) == []


def test_view_that_moves_elements_between_columns(bench):
    graph = sums(bench, shape=(4, 6), view=(8, 3), axes=(0,))
    assert bench.apply(graph, PRODUCT) == {"product": 1}
    assert bench.ops(graph) == ["Reshape", "MatMul"]


def test_axes_given_at_run_time(bench):
    graph = bench.make(
        lambda b, dy, a: b.op("ReduceSum", dy, a, keepdims=1), {"dy": (4, 3), "a": (1,)}, {"a": ir.DataType.INT64}
    )  # fmt: skip
    assert bench.refusals(graph, PRODUCT) == []


def test_exposed_inner_values(bench):
    assert bench.expose_each(lambda: sums(bench, view=(8, 3), axes=(0,)), PRODUCT)
