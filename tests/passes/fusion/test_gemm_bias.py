"""FuseGemmBias: hits, near misses with their reason, inner values exposed."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.passes.fusion.gemm_bias import FuseGemmBias


def linear(bench, a=(4, 3), w=(3, 5), bias=(5,), swap=False, product="MatMul", domain="", dtypes=None, **attributes):
    def body(b, x, weight, c):
        y = b.op(product, x, weight, domain=domain, **attributes)
        return b.op("Add", *((c, y) if swap else (y, c)))

    return bench.make(body, {"x": a, "w": w, "c": bias}, dtypes)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("bias", [(5,), (1, 5)])
def test_matrix(bench, swap, bias):
    graph = linear(bench, swap=swap, bias=bias)
    assert bench.apply(graph, FuseGemmBias()) == {"rewritten": 1}
    assert bench.ops(graph) == ["Gemm"]


@pytest.mark.parametrize("a", [(2, 4, 3), (2, 1, 4, 3), ("batch", 4, 3)])
def test_batch_dimensions_are_viewed_as_rows(bench, a):
    graph = linear(bench, a=a)
    assert bench.apply(graph, FuseGemmBias()) == {"rewritten": 1}
    assert bench.ops(graph) == ["Reshape", "Gemm", "Reshape"]


@pytest.mark.parametrize(
    ("case", "ops"),
    [
        ({"product": "Gemm", "w": (5, 3), "transB": 1, "alpha": 0.5}, ["Gemm"]),
        ({"product": "Gemm", "a": (3, 4), "transA": 1}, ["Gemm"]),
        (
            {
                "product": "FusedMatMul",
                "domain": "com.microsoft",
                "a": (2, 4, 3),
                "w": (5, 3),
                "transB": 1,
                "alpha": 2.0,
            },
            ["Reshape", "Gemm", "Reshape"],
        ),
    ],
)
def test_products_with_options(bench, case, ops):
    graph = linear(bench, **case)
    assert bench.apply(graph, FuseGemmBias()) == {"rewritten": 1}
    assert bench.ops(graph) == ops


def test_float64(bench):
    graph = linear(bench, dtypes=dict.fromkeys("xwc", ir.DataType.DOUBLE))
    assert bench.apply(graph, FuseGemmBias()) == {"rewritten": 1}


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"bias": (4, 5)}, "is a matrix, not a bias"),
        ({"bias": (4, 1)}, "not one row of 5"),
        ({"bias": (1,)}, "not one row of 5"),
        ({"a": (2, 4, 3), "bias": (1, 1, 5)}, "not one row of 5"),
        ({"a": (2, 4, 3), "w": (2, 3, 5)}, "not a matrix"),
        ({"a": ("batch", "length", 3)}, "two or more leading dimensions"),
        ({"w": (3, "n"), "bias": ("n",)}, "width of the product is not known"),
        (
            {"product": "FusedMatMul", "domain": "com.microsoft", "a": (2, 3, 4), "transA": 1},
            "left operand is transposed",
        ),
        ({"dtypes": dict.fromkeys("xwc", ir.DataType.INT32)}, "element type INT32"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(linear(bench, **case), FuseGemmBias())
    assert len(reasons) == 1 and word in reasons[0]


def test_gemm_with_bias_is_left(bench):
    graph = bench.make(
        lambda b, x, w, c: b.op("Add", b.op("Gemm", x, w, c), c), {"x": (4, 3), "w": (3, 5), "c": (5,)}
    )  # fmt: skip
    assert bench.refusals(graph, FuseGemmBias()) == []


def test_product_that_the_backward_half_reads(bench):
    def body(b, x, w, c):
        y = b.op("MatMul", x, w)
        return b.op("Add", y, c), b.op("Tanh", y)

    graph = bench.make(body, {"x": (4, 3), "w": (3, 5), "c": (5,)})
    assert "also read by Tanh" in bench.refusals(graph, FuseGemmBias())[0]


def test_exposed_inner_values(bench):
    seen = bench.expose_each(lambda: linear(bench, a=(2, 4, 3)), FuseGemmBias())
    assert seen == [("MatMul", {})]
