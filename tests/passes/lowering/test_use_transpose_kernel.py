"""UseTransposeKernel: which permutations go to the kernel; the same bits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.ops import kernels
from ortgraph.passes.lowering.use_transpose_kernel import UseTransposeKernel

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")


def turned(bench, shape=(2, 5, 3, 4), perm=(0, 2, 1, 3), dtype=ir.DataType.FLOAT):
    attributes = {} if perm is None else {"perm": list(perm)}
    return bench.make(lambda b, x: b.op("Transpose", x, **attributes), {"x": shape}, {"x": dtype})


@pytest.mark.parametrize(
    ("shape", "perm"),
    [
        ((2, 5, 3, 4), (0, 2, 1, 3)),
        ((1, 5, 3, 1), (0, 2, 1, 3)),
        ((2, 3, 4, 5, 2), (0, 1, 3, 2, 4)),
        ((2, 3, 4, 5, 2), (0, 2, 1, 3, 4)),
        (("n", 5, 3, 4), (0, 2, 1, 3)),
        ((0, 5, 3, 4), (0, 2, 1, 3)),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_hits(bench, shape, perm, threads):
    graph = turned(bench, shape, perm)
    feeds = bench.feeds(graph)
    before, recorded = bench.run(graph, feeds, threads), list(graph.graph.outputs[0].shape)
    assert bench.apply(graph, UseTransposeKernel(), tolerance=0.0) == {"transposes": 1}
    assert bench.ops(graph) == ["ortgraph.kernels.Transpose"]
    np.testing.assert_array_equal(bench.run(graph, feeds, threads)[0], before[0])
    assert list(graph.graph.outputs[0].shape) == recorded


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"shape": (3, 4), "perm": (1, 0)}, "not faster"),
        ({"shape": (3, 4, 5), "perm": (1, 0, 2)}, "not faster"),
        ({"shape": (3, 4, 5), "perm": (0, 2, 1)}, "not faster"),
        ({"perm": (0, 3, 1, 2)}, "not faster"),
        ({"perm": (2, 0, 1, 3)}, "not faster"),
        ({"shape": (2, 3, 4, 5, 2), "perm": (0, 3, 2, 1, 4)}, "not faster"),
        ({"perm": None}, "not faster"),
        ({"shape": (2, 1, 3, 4)}, "nothing moves"),
        ({"shape": (2, 5, 1, 4)}, "nothing moves"),
        ({"dtype": ir.DataType.DOUBLE}, "element type"),
        ({"dtype": ir.DataType.INT64}, "element type"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(turned(bench, **case), UseTransposeKernel())
    assert len(reasons) == 1 and word in reasons[0]


def test_without_kernels(bench):
    assert bench.refusals(turned(bench), UseTransposeKernel(kernels=False)) == [
        "compiled kernels are switched off (kernels=false)"
    ]
