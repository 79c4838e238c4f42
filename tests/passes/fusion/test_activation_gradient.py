"""FuseActivationGradient: masks and polynomials of every form, near misses."""

from __future__ import annotations

import pytest

from ortgraph.passes.fusion.activation_gradient import FuseActivationGradient

SHAPES = {"x": (3, 4), "dy": (3, 4)}


def mask(kind, slope=0.0):
    """dY through a ReLU mask written in several ways."""

    def body(b, x, dy):
        y = b.op("Relu", x)
        zero = b.scalar(0.0, x)
        if kind == "greater":
            m = b.op("Cast", b.op("Greater", y, zero), to=x.dtype)
            return y, b.op("Mul", dy, m)
        if kind == "where":
            return y, b.op("Where", b.op("Greater", y, zero), dy, b.scalar(slope, x))
        if kind == "where less or equal":
            return y, b.op("Where", b.op("LessOrEqual", y, zero), b.scalar(0.0, x), dy)
        if kind == "sign":
            return y, b.op("Mul", b.op("Sign", y), dy)
        if kind == "open at zero":
            m = b.op("Cast", b.op("GreaterOrEqual", y, zero), to=x.dtype)
            return y, b.op("Mul", dy, m)
        assert kind == "leaky"
        scaled = b.op("Mul", dy, b.scalar(slope, x))
        return y, b.op("Where", b.op("Greater", y, zero), dy, scaled)

    return body


@pytest.mark.parametrize("kind", ["greater", "where", "where less or equal", "sign"])
def test_relu(bench, kind):
    graph = bench.make(mask(kind), SHAPES)
    assert bench.apply(graph, FuseActivationGradient()) == {"relugrad": 1}
    assert bench.ops(graph) == ["Relu", "ortgraph.ReluGrad"]


@pytest.mark.parametrize(("kind", "slope"), [("open at zero", 0.0), ("leaky", 0.01), ("leaky", 1e-5), ("where", 0.1)])
def test_relu_near_misses(bench, kind, slope):
    bench.refusals(bench.make(mask(kind, slope), SHAPES), FuseActivationGradient())


def tanh_grad(kind, forward="Tanh"):
    def body(b, x, dy):
        y = b.op(forward, x)
        one = b.scalar(1.0, x)
        if kind == "tanh":
            return y, b.op("Mul", b.op("Sub", one, b.op("Mul", y, y)), dy)
        if kind == "tanh distributed":
            return y, b.op("Sub", dy, b.op("Mul", dy, b.op("Pow", y, b.scalar(2.0, y))))
        if kind == "sigmoid":
            return y, b.op("Mul", b.op("Mul", dy, y), b.op("Sub", one, y))
        return y, b.op("Mul", dy, b.op("Sub", y, b.op("Mul", y, y)))

    return body


@pytest.mark.parametrize(
    ("kind", "forward", "count"),
    [
        ("tanh", "Tanh", "tanhgrad"),
        ("tanh distributed", "Tanh", "tanhgrad"),
        ("sigmoid", "Sigmoid", "sigmoidgrad"),
        ("sigmoid distributed", "Sigmoid", "sigmoidgrad"),
    ],
)
def test_polynomials(bench, kind, forward, count):
    graph = bench.make(tanh_grad(kind, forward), SHAPES)
    assert bench.apply(graph, FuseActivationGradient()) == {count: 1}
    assert len(bench.ops(graph)) == 2


@pytest.mark.parametrize(
    ("kind", "forward"), [("tanh", "Sigmoid"), ("sigmoid", "Tanh"), ("tanh", "Relu"), ("tanh", "Sin")]
)
def test_formula_of_another_operator(bench, kind, forward):
    bench.refusals(bench.make(tanh_grad(kind, forward), SHAPES), FuseActivationGradient())


def silu(b, x, dy):
    s = b.op("Sigmoid", x)
    one = b.scalar(1.0, x)
    slope = b.op("Add", one, b.op("Mul", x, b.op("Sub", one, s)))
    return b.op("Mul", x, s), b.op("Mul", dy, b.op("Mul", s, slope))


def test_silu_with_its_gradient(bench):
    graph = bench.make(silu, SHAPES)
    assert bench.apply(graph, FuseActivationGradient()) == {"silu": 1, "silugrad": 1}
    assert bench.ops(graph) == ["ortgraph.Silu", "ortgraph.SiluGrad"]


def test_exposed_inner_values(bench):
    for body in (silu, mask("greater"), tanh_grad("tanh")):
        assert bench.expose_each(lambda f=body: bench.make(f, SHAPES), FuseActivationGradient())
