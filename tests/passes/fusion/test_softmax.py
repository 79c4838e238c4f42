"""FuseSoftmax: forward and gradient forms, axes, near misses, exposed inner values."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.passes.fusion.softmax import FuseSoftmax

X = (2, 3, 5)


def forward(kind, axis=-1):
    def body(b, x, *_):
        axes = b.ints([axis])
        z = b.op("Sub", x, b.op("ReduceMax", x, axes, keepdims=1))
        e = b.op("Exp", x if kind == "no maximum" else z)
        s = b.op("ReduceSum", e, axes, keepdims=1)
        if kind in ("divide", "no maximum"):
            return b.op("Div", e, s)
        if kind == "reciprocal":
            return b.op("Mul", b.op("Reciprocal", s), e)
        if kind == "log":
            return b.op("Sub", z, b.op("Log", s))
        if kind == "logsumexp":
            return b.op("Sub", x, b.op("ReduceLogSumExp", x, axes, keepdims=1))
        assert kind == "log of softmax"
        return b.op("Log", b.op("Div", e, s))

    return body


FORMS = {
    "divide": "softmax", "no maximum": "softmax", "reciprocal": "softmax",
    "log": "logsoftmax", "logsumexp": "logsoftmax", "log of softmax": "logsoftmax",
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("axis", [-1, 1])
def test_forward(bench, kind, axis):
    graph = bench.make(forward(kind, axis), {"x": X})
    assert bench.apply(graph, FuseSoftmax()) == {FORMS[kind]: 1}
    nodes = [n for n in graph.graph if n.op_type in ("Softmax", "LogSoftmax")]
    assert len(nodes) == 1 and nodes[0].attributes["axis"].value % 3 == axis % 3
    assert not any(o.startswith("Reduce") for o in bench.ops(graph) if kind != "no maximum" and kind != "logsumexp")


def gradient(kind, axis=-1, decomposed=False):
    def body(b, x, dy):
        axes = b.ints([axis])
        if kind.startswith("log"):
            y = forward("log", axis)(b, x) if decomposed else b.op("LogSoftmax", x, axis=axis)
            total = b.op("Mul", b.op("Exp", y), b.op("ReduceSum", dy, axes, keepdims=1))
            return y, b.op("Sub", dy, total)
        y = forward("divide", axis)(b, x) if decomposed else b.op("Softmax", x, axis=axis)
        m = b.op("Mul", dy, y)
        s = b.op("ReduceSum", m, axes, keepdims=1)
        if kind == "torch":
            return y, b.op("Sub", m, b.op("Mul", y, s))
        return y, b.op("Mul", b.op("Sub", dy, s), y)

    return body


@pytest.mark.parametrize("kind", ["torch", "factored", "log"])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("decomposed", [False, True])
def test_gradient(bench, kind, axis, decomposed):
    graph = bench.make(gradient(kind, axis, decomposed), {"x": X, "dy": X})
    name = "logsoftmax" if kind == "log" else "softmax"
    assert bench.apply(graph, FuseSoftmax()) == {f"{name}grad": 1, **({name: 1} if decomposed else {})}
    kept = [o for o in bench.ops(graph) if o not in ("Sub", "ReduceMax")]
    assert sorted(kept) == sorted(["LogSoftmax" if kind == "log" else "Softmax", f"ortgraph.{kept[-1].split('.')[-1]}"])


def test_gradient_of_attention_scores(bench):
    """dY and the scores come from element-wise operators, which are not part of the region."""

    def body(b, s, mask, d, keep):
        y = b.op("Softmax", b.op("Add", s, mask), axis=-1)
        dy = b.op("Mul", d, keep)
        m = b.op("Mul", dy, y)
        return b.op("Sub", m, b.op("Mul", y, b.op("ReduceSum", m, b.ints([-1]), keepdims=1)))

    graph = bench.make(body, {"s": X, "mask": (5,), "d": X, "keep": X})
    assert bench.apply(graph, FuseSoftmax()) == {"softmaxgrad": 1}
    assert bench.ops(graph) == ["Add", "Softmax", "Mul", "ortgraph.SoftmaxGrad"]


def test_symbolic_and_float64(bench):
    assert bench.apply(bench.make(forward("divide"), {"x": ("n", 3, "w")}), FuseSoftmax()) == {"softmax": 1}
    double = bench.make(forward("divide"), {"x": X}, {"x": ir.DataType.DOUBLE})
    assert bench.apply(double, FuseSoftmax()) == {"softmax": 1}


def test_near_misses(bench):
    def scaled(b, x):
        e = b.op("Exp", b.op("Mul", x, b.scalar(1.0001, x)))
        return b.op("Div", e, b.op("ReduceSum", e, b.ints([-1]), keepdims=1))

    # A factor in front is not part of the function: softmax of the product.
    graph = bench.make(scaled, {"x": X})
    assert bench.apply(graph, FuseSoftmax()) == {"softmax": 1}
    assert bench.ops(graph) == ["Mul", "Softmax"]

    def padded(b, x):
        e = b.op("Exp", x)
        return b.op("Div", e, b.op("Add", b.op("ReduceSum", e, b.ints([-1]), keepdims=1), b.scalar(1e-3, x)))

    assert any("differs from Softmax" in r for r in bench.refusals(bench.make(padded, {"x": X}), FuseSoftmax()))

    def other_axis(b, x):
        e = b.op("Exp", b.op("Sub", x, b.op("ReduceMax", x, b.ints([1]), keepdims=1)))
        return b.op("Div", e, b.op("ReduceSum", e, b.ints([-1]), keepdims=1))

    # The maximum of another axis differs within a row: not a softmax of x, but one of x - max.
    graph = bench.make(other_axis, {"x": X})
    assert bench.apply(graph, FuseSoftmax()) == {"softmax": 1}
    assert bench.ops(graph) == ["ReduceMax", "Sub", "Softmax"]

    def two_axes(b, x):
        e = b.op("Exp", x)
        return b.op("Div", e, b.op("ReduceSum", e, b.ints([1, 2]), keepdims=1))

    assert any("several axes" in r for r in bench.refusals(bench.make(two_axes, {"x": X}), FuseSoftmax()))

    def mean(b, x):
        e = b.op("Exp", x)
        return b.op("Div", e, b.op("ReduceMean", e, b.ints([-1]), keepdims=1))

    bench.refusals(bench.make(mean, {"x": X}), FuseSoftmax())


def test_gradient_with_wrong_sum(bench):
    def body(b, x, dy, dz):
        y = b.op("Softmax", x, axis=-1)
        s = b.op("ReduceSum", b.op("Mul", dz, y), b.ints([-1]), keepdims=1)
        return y, b.op("Mul", b.op("Sub", dy, s), y)

    bench.refusals(bench.make(body, {"x": X, "dy": X, "dz": X}), FuseSoftmax())


def test_exponential_that_is_read_elsewhere(bench):
    def body(b, x):
        e = b.op("Exp", x)
        return b.op("Div", e, b.op("ReduceSum", e, b.ints([-1]), keepdims=1)), b.op("Tanh", e)

    assert any("also read by Tanh" in r for r in bench.refusals(bench.make(body, {"x": X}), FuseSoftmax()))


def test_exposed_inner_values(bench):
    for kind in ("torch", "log"):
        assert bench.expose_each(lambda k=kind: bench.make(gradient(k, -1, True), {"x": X, "dy": X}), FuseSoftmax())
