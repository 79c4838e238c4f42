"""FuseMatmulScale: factors before and behind, shared by several products, near misses with their reason."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.passes.fusion.matmul_scale import FuseMatmulScale

MS = "com.microsoft.FusedMatMul"
SHAPES = {"x": (2, 4, 3), "y": (2, 3, 5)}


def behind(bench, op="Div", number=8.0, shape=(), swap=False, dtypes=None, shapes=None, product="MatMul"):
    def body(b, x, y):
        c = b.const(np.full(shape, number), x.dtype)
        m = b.op(product, x, y)
        return b.op(op, *((c, m) if swap else (m, c)))

    return bench.make(body, shapes or SHAPES, dtypes)


@pytest.mark.parametrize("case", [{}, {"op": "Mul", "number": 0.125}, {"op": "Mul", "swap": True}, {"shape": (1,)}])
def test_behind(bench, case):
    graph = behind(bench, **case)
    assert bench.apply(graph, FuseMatmulScale()) == {"rewritten": 1}
    assert bench.ops(graph) == [MS]


def test_matrix_becomes_gemm_and_bias_is_scaled_too(bench):
    graph = behind(bench, shapes={"x": (4, 3), "y": (3, 5)})
    assert bench.apply(graph, FuseMatmulScale()) == {"rewritten": 1}
    assert bench.ops(graph) == ["Gemm"]

    def body(b, x, y, c):
        return b.op("Mul", b.op("Gemm", x, y, c, alpha=0.5, beta=3.0, transB=1), b.scalar(2.0, x))

    graph = bench.make(body, {"x": (4, 3), "y": (5, 3), "c": (5,)})
    assert bench.apply(graph, FuseMatmulScale()) == {"rewritten": 1}
    gemm = next(iter(graph.graph))
    assert gemm.attributes["alpha"].value == 1.0 and gemm.attributes["beta"].value == 6.0


def test_both_operands_and_chains(bench):
    def body(b, x, y):
        left = b.op("Mul", b.op("Div", x, b.scalar(3.0, x)), b.scalar(0.5, x))
        m = b.op("MatMul", left, b.op("Mul", y, b.scalar(0.25, y)))
        return b.op("Div", b.op("Mul", m, b.scalar(5.0, m)), b.scalar(7.0, m))

    graph = bench.make(body, SHAPES)
    assert bench.apply(graph, FuseMatmulScale()) == {"rewritten": 3}
    assert bench.ops(graph) == [MS]


def test_squared_operand_is_scaled_twice(bench):
    def body(b, x):
        s = b.op("Mul", x, b.scalar(0.5, x))
        return b.op("MatMul", s, s)

    graph = bench.make(body, {"x": (3, 3)})
    assert bench.apply(graph, FuseMatmulScale()) == {"rewritten": 1}
    assert bench.ops(graph) == ["Gemm"]


def test_scores_gradient_read_by_two_products(bench):
    def body(b, d, q, k):
        ds = b.op("Div", d, b.scalar(8.0, d))
        return b.op("MatMul", ds, k), b.op("FusedMatMul", ds, q, domain="com.microsoft", transA=1)

    graph = bench.make(body, {"d": (2, 4, 6), "q": (2, 4, 3), "k": (2, 6, 3)})
    assert bench.apply(graph, FuseMatmulScale()) == {"rewritten": 2}
    assert bench.ops(graph) == [MS, MS]


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"op": "Div", "swap": True}, "divided by the value"),
        ({"op": "Mul", "number": 0.0}, "zero"),
        ({"op": "Div", "number": 0.0}, "zero"),
        ({"op": "Div", "number": 8.0, "dtypes": dict.fromkeys("xy", ir.DataType.DOUBLE)}, "float32 only"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(behind(bench, **case), FuseMatmulScale())
    assert len(reasons) == 1 and word in reasons[0]


@pytest.mark.parametrize("case", [{"shape": (5,)}, {"shape": (1, 1, 1, 1)}, {"number": np.inf}])
def test_other_operations_are_not_candidates(bench, case):
    assert bench.refusals(behind(bench, **case), FuseMatmulScale()) == []


def test_parameter_is_never_a_constant(bench):
    graph = bench.make(lambda b, x, y, s: b.op("Mul", b.op("MatMul", x, y), s), {**SHAPES, "s": ()})
    assert bench.refusals(graph, FuseMatmulScale()) == []


def test_other_readers(bench):
    def before(b, x, y):
        s = b.op("Mul", x, b.scalar(0.5, x))
        return b.op("MatMul", s, y), b.op("Tanh", s)

    assert "also read by Tanh" in bench.refusals(bench.make(before, SHAPES), FuseMatmulScale())[0]

    def after(b, x, y):
        m = b.op("MatMul", x, y)
        return b.op("Mul", m, b.scalar(0.5, m)), b.op("Tanh", m)

    assert "also read by Tanh" in bench.refusals(bench.make(after, SHAPES), FuseMatmulScale())[0]

    def addend(b, x, y):
        s = b.op("Mul", x, b.scalar(0.5, x))
        return b.op("Gemm", s, y, s)

    assert "also read by Gemm" in bench.refusals(bench.make(addend, {"x": (3, 3), "y": (3, 3)}), FuseMatmulScale())[0]


def test_exposed_inner_values(bench):
    def body(b, x, y):
        m = b.op("MatMul", b.op("Mul", x, b.scalar(0.5, x)), y)
        return b.op("Mul", m, b.scalar(2.0, m))

    seen = bench.expose_each(lambda: bench.make(body, SHAPES), FuseMatmulScale())
    assert [op for op, _ in seen] == ["Mul", "MatMul"]
    assert [sum(counts.values()) for _, counts in seen] == [1, 1]
