"""FuseStackGradient: gradients of all slices side by side, near misses with their reason."""

from __future__ import annotations

import numpy as np
import pytest

from ortgraph.passes.fusion.stack_gradient import FuseStackGradient


def stacked(bench, indices=(0, 1, 2), axis=0, axes=None, op="Sum", vector=False, extra=False, length=3):
    table = [4, 5]
    table.insert(axis, length)
    piece = [d for i, d in enumerate(table) if i != axis % 3]
    if vector:
        piece.insert(axis % 3, 1)

    def body(b, *values):
        parts = []
        for i, (index, value) in enumerate(zip(indices, values, strict=False)):
            at = b.const(np.array([index] if vector else index, np.int64))
            along = axis if axes is None else axes[i]
            made = b.op("GatherGrad", b.ints(table), at, value, domain="com.microsoft", axis=along)
            parts.append(made)
        return b.op(op, *parts, *values[len(indices) :]) if op == "Sum" else b.op(op, parts[0], parts[1])

    inputs = {f"d{i}": tuple(piece) for i in range(len(indices))}
    if extra:
        inputs["more"] = tuple(table)
    return bench.make(body, inputs)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"indices": (2, 0, 1)},
        {"indices": (0, -1, 1)},
        {"axis": 1},
        {"axis": 2},
        {"vector": True},
        {"vector": True, "axis": 1},
        {"indices": (1, 0), "length": 2, "op": "Add"},
    ],
)
def test_hits(bench, case):
    graph = stacked(bench, **case)
    assert bench.apply(graph, FuseStackGradient()) == {"rewritten": 1}
    assert [o for o in bench.ops(graph) if o != "Unsqueeze"] == ["Concat"]


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"indices": (0, 1)}, "not each of 0 to 3 once"),
        ({"indices": (0, 1, 1)}, "not each of 0 to 3 once"),
        ({"indices": (0, 1, 2), "length": 4}, "not each of 0 to 4 once"),
        ({"extra": True}, "no gradient of a Gather"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(stacked(bench, **case), FuseStackGradient())
    assert len(reasons) == 1 and word in reasons[0]


def test_indices_that_are_no_constants(bench):
    import onnx_ir as ir

    def body(b, d, index):
        parts = [b.op("GatherGrad", b.ints([2, 5]), i, d, domain="com.microsoft", axis=0) for i in (index, index)]
        return b.op("Add", *parts)

    graph = bench.make(body, {"d": (5,), "index": ()}, {"index": ir.DataType.INT64})
    assert "not one constant position" in bench.refusals(graph, FuseStackGradient())[0]


def test_a_part_that_is_read_elsewhere(bench):
    def body(b, d):
        parts = [b.op("GatherGrad", b.ints([2, 5]), b.const(i, np.int64), d, domain="com.microsoft") for i in (0, 1)]
        return b.op("Add", *parts), b.op("Neg", parts[0])

    assert "also read by Neg" in bench.refusals(bench.make(body, {"d": (5,)}), FuseStackGradient())[0]


def test_exposed_inner_values(bench):
    seen = bench.expose_each(lambda: stacked(bench), FuseStackGradient())
    assert seen == [("GatherGrad", {})] * 3
