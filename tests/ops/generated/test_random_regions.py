"""Random element-wise and row-wise graphs with random broadcasts, fused and compared with float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BOOL = ir.DataType.BOOL
N, H, S, W = 2, 3, 5, 24
FULL = (N, H, S, W)
# What an operand of the full shape may be broadcast from.
SHAPES = (FULL, (W,), (1, 1, 1, W), (N, H, S, 1), (N, 1, 1, W), (1, H, S, W), (N, 1, S, W), (1, H, 1, 1), (), (S, 1))
UNARY = ("Tanh", "Sigmoid", "Neg", "Abs", "Relu", "Erf", "Softplus", "view", "half", "softmax", "centre", "norm", "pad")
BINARY = ("Add", "Sub", "Mul", "Max", "where", "silu_grad", "softmax_grad", "divide")

steps = st.lists(
    st.tuples(st.sampled_from((*UNARY, *BINARY, *BINARY)), st.integers(0, 99), st.integers(0, 99)),
    min_size=2,
    max_size=9,
)
graphs = st.tuples(
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    steps,
    st.sets(st.integers(0, 8), max_size=2),
    st.sampled_from(("none", "rows", "numbers", "columns")),
)


def apply(b, name, x, y):
    """A value of the full shape from two values that broadcast to it, x full."""
    axes = b.ints([-1])
    if name == "view":
        flat = b.op("Tanh", b.op("Reshape", x, b.ints([-1, W])))
        return b.op("Reshape", flat, b.ints(FULL))
    if name == "half":
        low = b.op("Slice", x, b.ints([0]), b.ints([W // 3]), axes)
        high = b.op("Slice", x, b.ints([W // 3]), b.ints([W]), axes)
        return b.op("Concat", b.op("Neg", high), low, axis=-1)
    if name == "pad":
        part = b.op("Slice", x, b.ints([2]), b.ints([W - 3]), axes)
        return b.op("Pad", part, b.ints([0, 0, 0, 4, 0, 0, 0, 1]))
    if name == "softmax":
        return b.op("Softmax", x, axis=-1)
    if name == "centre":
        return b.op("Sub", x, b.op("ReduceMean", x, axes, keepdims=1))
    if name == "norm":
        square = b.op("ReduceSumSquare", x, axes, keepdims=1)
        return b.op("Mul", x, b.op("Reciprocal", b.op("Sqrt", b.op("Add", square, b.scalar(0.5, x)))))
    if name == "where":
        return b.op("Where", b.op("Less", x, y), x, b.op("Mul", y, b.scalar(0.5, y)))
    if name == "silu_grad":
        return b.op("SiluGrad", x, x, domain="ortgraph")
    if name == "softmax_grad":
        return b.op("SoftmaxGrad", x, b.op("Softmax", x, axis=-1), domain="ortgraph", axis=-1)
    if name == "divide":
        return b.op("Div", x, b.op("Add", b.op("Abs", y), b.scalar(1.0, y)))
    return b.op(name, x) if name in UNARY else b.op(name, x, y)


def body_of(picked, wanted, ending):
    def body(b, *values):
        full = [b.op("Mul", values[0], b.scalar(0.7, values[0]))]
        for name, i, j in picked:
            pool = [*full, *values]
            full.append(apply(b, name, full[i % len(full)], pool[j % len(pool)]))
        outputs = [full[-1], *(full[k] for k in sorted(wanted) if k < len(full) - 1)]
        if ending == "rows":
            outputs.append(b.op("ReduceMax", full[-1], b.ints([3]), keepdims=1))
        elif ending == "numbers":
            return [b.op("ReduceMax", full[-1], b.ints([3]), keepdims=0)]
        elif ending == "columns":
            outputs.append(b.op("ReduceSum", full[-1], b.ints([0, 1, 2]), keepdims=0))
        return outputs

    return body


def check(fused, graph):
    shapes, picked, wanted, ending = graph
    inputs = {"x": FULL, **{f"y{i}": s for i, s in enumerate(shapes)}}
    case = fused(body_of(picked, wanted, ending), inputs, regions=None)
    assert case.nodes
    case.check(tolerance=1e-4)


common = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=10, **common)
@given(graph=graphs)
def test_random_regions(fused, graph):
    check(fused, graph)


@pytest.mark.slow
@settings(max_examples=300, **common)
@given(graph=graphs)
def test_many_random_regions(fused, graph):
    check(fused, graph)


def test_two_regions_make_no_circle(fused):
    """Each of two groups reads the other: fused as they stand they would wait for each other."""

    def body(b, x, w):
        first = b.op("Tanh", b.op("Neg", x))
        through = b.op("MatMul", first, w)
        second = b.op("Exp", b.op("Neg", through))
        joined = b.op("Add", b.op("MatMul", second, w), first)
        return [b.op("Mul", joined, b.op("Abs", first)), second]

    case = fused(body, {"x": (4, 8), "w": (8, 8)}, regions=None)
    x = np.float32(0.1) * np.arange(32, dtype=np.float32).reshape(4, 8)
    case.check(feeds={"x": x, "w": np.eye(8, dtype=np.float32)})
