"""FuseWeightGradient: batched product and sum become one Gemm."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.passes.fusion.weight_gradient import FuseWeightGradient


def gradient(bench, x=(2, 4, 3), dy=(2, 4, 5), axes=(0,), keepdims=0, flip=True, fused=False, dtypes=None):
    def body(b, x, dy):
        if fused:
            m = b.op("FusedMatMul", x, dy, domain="com.microsoft", transA=1, alpha=0.5)
        else:
            n = len(x.shape)
            m = b.op("MatMul", b.op("Transpose", x, perm=[*range(n - 2), n - 1, n - 2]) if flip else x, dy)
        return b.op("ReduceSum", m, b.ints(axes), keepdims=keepdims)

    return bench.make(body, {"x": x, "dy": dy}, dtypes)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"fused": True},
        {"axes": (-3,)},
        {"x": (2, 6, 4, 3), "dy": (2, 6, 4, 5), "axes": (1, 0)},
        {"x": ("n", 4, 3), "dy": ("n", 4, 5)},
        {"dtypes": dict.fromkeys(("x", "dy"), ir.DataType.DOUBLE)},
    ],
)
def test_hits(bench, case):
    graph = gradient(bench, **case)
    assert bench.apply(graph, FuseWeightGradient()) == {"rewritten": 1}
    assert [o for o in bench.ops(graph) if o != "Transpose"] == ["Reshape", "Reshape", "Gemm"]


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"axes": (1,)}, "not over all batch"),
        ({"axes": (0, 1)}, "not over all batch"),
        ({"x": (2, 6, 4, 3), "dy": (2, 6, 4, 5), "axes": (1,)}, "not over all batch"),
        ({"keepdims": 1}, "keeps the summed"),
        ({"x": (1, 4, 3)}, "broadcast over the batch"),
        ({"dy": (4, 5)}, "broadcast over the batch"),
        ({"x": (2, 3, 4), "flip": False}, "left operand is not transposed"),
        ({"dtypes": dict.fromkeys(("x", "dy"), ir.DataType.INT32)}, "INT32"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(gradient(bench, **case), FuseWeightGradient())
    assert len(reasons) == 1 and word in reasons[0]


def test_product_with_another_reader(bench):
    def body(b, x, dy):
        m = b.op("FusedMatMul", x, dy, domain="com.microsoft", transA=1)
        return b.op("ReduceSum", m, b.ints([0]), keepdims=0), b.op("Tanh", m)

    graph = bench.make(body, {"x": (2, 4, 3), "dy": (2, 4, 5)})
    assert "also read by Tanh" in bench.refusals(graph, FuseWeightGradient())[0]


def test_exposed_inner_values(bench):
    seen = bench.expose_each(lambda: gradient(bench), FuseWeightGradient())
    assert seen == [("Transpose", {"rewritten": 1}), ("MatMul", {})]
