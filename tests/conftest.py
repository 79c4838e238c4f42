"""Shared fixtures: a small training graph made by hand."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.graph import Parameter, Signature, TrainingGraph
from ortgraph.ops.builder import Builder


def make_linear_graph() -> TrainingGraph:
    """loss = sum(gelu-free (x @ w + b) * c); gradients of w and b by hand; b is zero-valued. Opset 18."""
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[4, 3])
    w = ir.val("w", dtype=ir.DataType.FLOAT, shape=[3, 2])
    b = ir.val("b", dtype=ir.DataType.FLOAT, shape=[2])
    seed = ir.val("loss_gradient", dtype=ir.DataType.FLOAT, shape=[])
    graph = ir.Graph([x, w, b, seed], [], nodes=[], opset_imports={"": 18}, name="joint")
    build = Builder(graph, "capture")
    y = build.op("Add", build.op("MatMul", x, w), b)
    loss = build.op("ReduceSum", build.op("Mul", y, y), keepdims=0)
    dy = build.op("Mul", build.op("Mul", y, build.scalar(2.0, y)), seed)
    dw = build.op("MatMul", build.op("Transpose", x, perm=[1, 0]), dy)
    db = build.op("ReduceSum", dy, build.ints([0]), keepdims=0)
    for value, name in ((loss, "loss"), (dw, "w.grad"), (db, "b.grad")):
        value.name = name
        graph.outputs.append(value)
    signature = Signature(
        loss="loss",
        inputs=("x",),
        parameters=(Parameter("w", gradient="w.grad"), Parameter("b", gradient="b.grad")),
        loss_gradient="loss_gradient",
    )
    rng = np.random.default_rng(0)
    values = {"w": rng.standard_normal((3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
    return TrainingGraph(ir.Model(graph, ir_version=10), signature, values)


@pytest.fixture
def linear_graph() -> TrainingGraph:
    """A fresh linear regression graph with loss, two gradients and a zero-valued bias."""
    return make_linear_graph()
