"""FuseMatmulTranspose: every permutation class, near misses with their reason, inner values exposed."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.ops.builder import Builder
from ortgraph.passes.fusion.matmul_transpose import FuseMatmulTranspose

HEADS = (0, 2, 1, 3)
MS = "com.microsoft.FusedMatMul"


def product(bench, a, b_shape, perm_a=None, perm_b=None, op="MatMul", domain="", dtypes=None, **attributes):
    def body(b, x, y):
        left = x if perm_a is None else b.op("Transpose", x, perm=list(perm_a))
        right = y if perm_b is None else b.op("Transpose", y, perm=list(perm_b))
        return b.op(op, left, right, domain=domain, **attributes)

    return bench.make(body, {"x": a, "y": b_shape}, dtypes)


@pytest.mark.parametrize(
    ("case", "ops"),
    [
        ({"a": (4, 3), "b_shape": (5, 3), "perm_b": (1, 0)}, ["Gemm"]),
        ({"a": (3, 4), "b_shape": (3, 5), "perm_a": (1, 0)}, ["Gemm"]),
        ({"a": (3, 4), "b_shape": (5, 3), "perm_a": (1, 0), "perm_b": (1, 0)}, ["Gemm"]),
        ({"a": (3, 4), "b_shape": (3, 5), "perm_a": (1, 0), "op": "Gemm", "alpha": 0.5}, ["Gemm"]),
        ({"a": (4, 3), "b_shape": (3, 5), "perm_a": (1, 0), "op": "Gemm", "transA": 1}, ["Gemm"]),
        ({"a": (2, 4, 3), "b_shape": (5, 3), "perm_b": (1, 0)}, [MS]),
        ({"a": (2, 3, 4), "b_shape": (3, 5), "perm_a": (0, 2, 1)}, [MS]),
        ({"a": (3, 4), "b_shape": (2, 6, 3, 5), "perm_a": (1, 0)}, [MS]),
        ({"a": (2, 3, 4), "b_shape": (6, 2, 3, 5), "perm_a": (0, 2, 1)}, [MS]),
        ({"a": (2, 4, 3), "b_shape": (2, 5, 3), "perm_b": (0, 2, 1)}, [MS]),
        ({"a": (2, 6, 3, 4), "b_shape": (2, 6, 3, 5), "perm_a": (0, 1, 3, 2)}, [MS]),
        ({"a": (4, 2, 3), "b_shape": (2, 3, 5), "perm_a": (1, 0, 2)}, [MS]),
        ({"a": (3, 2, 4), "b_shape": (2, 3, 5), "perm_a": (1, 2, 0)}, [MS]),
        ({"a": (4, 2, 6, 3), "b_shape": (3, 2, 6, 5), "perm_a": (1, 2, 0, 3), "perm_b": (1, 2, 0, 3)}, [MS]),
        ({"a": (2, 3, 4), "b_shape": (2, 3, 5), "perm_a": (0, 2, 1), "op": "FusedMatMul", "domain": "com.microsoft",
          "alpha": 0.5}, [MS]),
        ({"a": (2, 6, 4, 3), "b_shape": (2, 5, 6, 3), "perm_b": (0, 2, 3, 1)}, ["Transpose", MS]),
        ({"a": (2, 4, 6, 3), "b_shape": (2, 6, 5, 3), "perm_a": HEADS, "perm_b": (0, 1, 3, 2)}, ["Transpose", MS]),
        ({"a": ("n", 4, 3), "b_shape": ("n", 5, 3), "perm_b": (0, 2, 1)}, [MS]),
    ],
)  # fmt: skip
def test_hits(bench, case, ops):
    graph = product(bench, **case)
    assert bench.apply(graph, FuseMatmulTranspose()) == {"rewritten": 1}
    assert bench.ops(graph) == ops


def test_transpose_without_perm_and_twice(bench):
    def body(b, x, y):
        return b.op("MatMul", b.op("Transpose", b.op("Transpose", b.op("Transpose", x))), y)

    graph = bench.make(body, {"x": (3, 4), "y": (3, 5)})
    assert bench.apply(graph, FuseMatmulTranspose()) == {"rewritten": 1}
    assert bench.ops(graph)[-1] == "Gemm"


def test_same_value_on_both_sides(bench):
    graph = bench.make(lambda b, x: b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), x), {"x": (3, 4)})
    assert bench.apply(graph, FuseMatmulTranspose()) == {"rewritten": 1}
    assert bench.ops(graph) == ["Gemm"]


def test_gemm_keeps_its_bias(bench):
    def body(b, x, y, c):
        return b.op("Gemm", b.op("Transpose", x, perm=[1, 0]), y, c, beta=0.5)

    graph = bench.make(body, {"x": (3, 4), "y": (3, 5), "c": (5,)})
    assert bench.apply(graph, FuseMatmulTranspose()) == {"rewritten": 1}


def test_shared_transpose_stays(bench):
    def body(b, x, y):
        t = b.op("Transpose", x, perm=[1, 0])
        return b.op("MatMul", t, y), b.op("Tanh", t)

    graph = bench.make(body, {"x": (3, 4), "y": (3, 5)})
    assert bench.apply(graph, FuseMatmulTranspose()) == {"rewritten": 1}
    assert sorted(bench.ops(graph)) == ["Gemm", "Tanh", "Transpose"]


DOUBLE = dict.fromkeys("xy", ir.DataType.DOUBLE)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"a": (2, 4, 6, 3), "b_shape": (2, 6, 3, 5), "perm_a": (0, 2, 1, 3)}, "also moves batch dimensions"),
        ({"a": (6, 2, 4, 3), "b_shape": (2, 6, 3, 5), "perm_a": (1, 0, 2, 3)}, "also moves batch dimensions"),
        ({"a": (3, 4), "b_shape": (3,), "perm_a": (1, 0)}, "vector"),
        ({"a": (2, 3, 4), "b_shape": (3,), "perm_a": (0, 2, 1)}, "vector"),
        ({"a": (3,), "b_shape": (5, 3), "perm_b": (1, 0)}, "vector"),
        ({"a": (4, 2, 3), "b_shape": (3, 5), "perm_a": (1, 0, 2)}, "ranks differ"),
        ({"a": (3, 2, 4), "b_shape": (3, 5), "perm_a": (1, 2, 0)}, "ranks differ"),
        ({"a": (4, 3), "b_shape": (3, 2, 5), "perm_b": (1, 0, 2)}, "ranks differ"),
        ({"a": (4, 3), "b_shape": (5, 2, 3), "perm_b": (1, 2, 0)}, "ranks differ"),
        ({"a": (2, 4, 3), "b_shape": (3, 2, 6, 5), "perm_b": (1, 2, 0, 3)}, "ranks differ"),
        ({"a": (2, 3, 4), "b_shape": (2, 3, 5), "perm_a": (0, 2, 1), "dtypes": DOUBLE}, "float32 only"),
        ({"a": (3, 4), "b_shape": (3, 5), "perm_a": (1, 0), "dtypes": dict.fromkeys("xy", ir.DataType.INT32)}, "INT32"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(product(bench, **case), FuseMatmulTranspose())
    assert len(reasons) == 1 and word in reasons[0]


def test_rotated_transpose_with_another_reader(bench):
    def body(b, x, y):
        t = b.op("Transpose", y, perm=[0, 2, 3, 1])
        return b.op("MatMul", x, t), b.op("Tanh", t)

    graph = bench.make(body, {"x": (2, 6, 4, 3), "y": (2, 5, 6, 3)})
    assert "also read elsewhere" in bench.refusals(graph, FuseMatmulTranspose())[0]


def test_rotated_transpose_that_two_products_read(bench):
    """Forward scores and the query's gradient both read the transposed key."""

    def body(b, q, k, ds):
        t = b.op("Transpose", k, perm=[0, 2, 3, 1])
        return b.op("MatMul", q, t), b.op("FusedMatMul", ds, t, domain="com.microsoft", transB=1)

    graph = bench.make(body, {"q": (2, 6, 4, 3), "k": (2, 5, 6, 3), "ds": (2, 6, 4, 5)})
    assert bench.apply(graph, FuseMatmulTranspose()) == {"rewritten": 2}
    assert [n.attributes["perm"].value for n in graph.graph if n.op_type == "Transpose"] == [HEADS, HEADS]


@pytest.mark.parametrize(
    ("case", "perm", "ops"),
    [
        ({"a": (4, 3), "b_shape": (3, 5)}, (1, 0), ["Gemm"]),
        ({"a": (3, 4), "b_shape": (3, 5), "op": "Gemm", "transA": 1, "alpha": 0.5}, (1, 0), ["Gemm"]),
        ({"a": (2, 4, 3), "b_shape": (2, 3, 5)}, (0, 2, 1), [MS]),
        ({"a": (2, 6, 4, 3), "b_shape": (2, 6, 3, 5)}, (0, 3, 1, 2), [MS, "Transpose"]),
        ({"a": (4, 2, 3), "b_shape": (2, 5, 3), "op": "FusedMatMul", "domain": "com.microsoft", "transBatchA": 1,
          "transB": 1}, (0, 2, 1), [MS]),
    ],
)  # fmt: skip
def test_transposed_result(bench, case, perm, ops):
    def make():
        graph = product(bench, **case)
        node = list(graph.graph)[-1]
        b = Builder(graph.graph, "capture")
        made = b.op("Transpose", node.outputs[0], perm=list(perm))
        node.outputs[0].name, made.name = "inner", "out0"
        graph.graph.outputs[0] = made
        return graph

    graph = make()
    assert bench.apply(graph, FuseMatmulTranspose()) == {"rewritten": 1}
    assert bench.ops(graph) == ops
    assert bench.expose_each(make, FuseMatmulTranspose()) == [(case.get("op", "MatMul"), {})]


def test_transposed_result_near_misses(bench):
    def addend(b, x, y, c):
        return b.op("Transpose", b.op("Gemm", x, y, c), perm=[1, 0])

    graph = bench.make(addend, {"x": (4, 3), "y": (3, 5), "c": (5,)})
    assert "addend" in bench.refusals(graph, FuseMatmulTranspose())[0]

    def rows_stay_whole(b, x, y):
        return b.op("Transpose", b.op("MatMul", x, y), perm=[0, 2, 1, 3])

    graph = bench.make(rows_stay_whole, {"x": (2, 6, 4, 3), "y": (2, 6, 3, 5)})
    assert bench.refusals(graph, FuseMatmulTranspose()) == []


def test_float64_matrix_is_a_gemm(bench):
    graph = product(bench, (3, 4), (3, 5), (1, 0), dtypes=DOUBLE)
    assert bench.apply(graph, FuseMatmulTranspose()) == {"rewritten": 1}


def test_exposed_inner_values(bench):
    for perm in ((0, 1, 3, 2), (0, 2, 3, 1)):
        seen = bench.expose_each(
            lambda p=perm: product(bench, (2, 4, 4, 3), (2, 4, 4, 3), perm_b=p), FuseMatmulTranspose()
        )
        assert seen == [("Transpose", {"rewritten": 1} if perm == (0, 1, 3, 2) else {})]
