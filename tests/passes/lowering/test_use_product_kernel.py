"""UseProductKernel: which products go to the kernel; results against float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.ops import kernels
from ortgraph.ops.spec import CONTRIB
from ortgraph.passes.lowering.use_product_kernel import UseProductKernel

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")

M, N, K = 250, 96, 200


def product(bench, *, trans_a=1, trans_b=0, c=None, m=M, n=N, k=K, dtype=ir.DataType.FLOAT, op="Gemm", **attributes):
    shapes = {"a": (k, m) if trans_a else (m, k), "b": (n, k) if trans_b else (k, n)}
    if c is not None:
        shapes["c"] = c
    domain = {} if op == "Gemm" else {"domain": CONTRIB}

    def body(b, *values):
        return b.op(op, *values, transA=trans_a, transB=trans_b, **domain, **attributes)

    return bench.make(body, shapes, dict.fromkeys(shapes, dtype))


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"trans_b": 1},
        {"alpha": 0.5},
        {"op": "FusedMatMul", "alpha": 2.0},
        {"c": (N,)},
        {"c": (M, N), "beta": 1.0},
        {"c": (N,), "trans_a": 0},
        {"c": (N,), "trans_a": 0, "trans_b": 1, "alpha": 3.0},
        {"m": 301, "n": 70, "k": 211, "c": (70,)},
        {"m": 1024, "n": 1024, "k": 5},
        {"m": 20, "n": 2048, "k": 130},
    ],
)
def test_hits(bench, case):
    graph = product(bench, **case)
    feeds = bench.feeds(graph)
    assert bench.apply(graph, UseProductKernel()) == {"products": 1}
    assert bench.ops(graph) == ["ortgraph.kernels.Product"]
    one, two = (bench.run(graph, feeds, threads)[0] for threads in (1, 2))
    np.testing.assert_array_equal(one, two)
    a, b = (feeds[x].astype(np.float64) for x in "ab")
    a, b = (a.T if case.get("trans_a", 1) else a), (b.T if case.get("trans_b") else b)
    wanted = case.get("alpha", 1.0) * (a @ b) + feeds.get("c", np.zeros(())).astype(np.float64)
    np.testing.assert_allclose(one, wanted, rtol=0, atol=2e-6 * np.abs(a).max() * np.abs(b).max() * a.shape[1])


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"trans_a": 0}, "no bias"),
        ({"trans_a": 0, "c": (M, N)}, "no bias"),
        ({"c": (N,), "beta": 0.5}, "scaled"),
        ({"c": (1, N)}, "shape of the addend"),
        ({"c": (1,)}, "shape of the addend"),
        ({"n": 8, "m": 4096, "k": 256}, "too small"),
        ({"m": 64, "k": 64}, "too small"),
        ({"m": "rows"}, "no matrix of a known shape"),
        ({"dtype": ir.DataType.DOUBLE}, "element type"),
        ({"trans_a": 0}, "runtime's product"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(product(bench, **case), UseProductKernel())
    assert len(reasons) == 1 and word in reasons[0]


def test_batches_stay(bench):
    graph = bench.make(
        lambda b, x, y: b.op("FusedMatMul", x, y, domain=CONTRIB, transA=1), {"x": (3, 200, 150), "y": (3, 200, 150)}
    )
    assert bench.refusals(graph, UseProductKernel()) == ["an operand is no matrix of a known shape"]


def test_without_kernels(bench):
    assert bench.refusals(product(bench), UseProductKernel(kernels=False)) == [
        "compiled kernels are switched off (kernels=false)"
    ]
