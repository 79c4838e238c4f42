"""FuseGelu: many algebraic forms, forward and gradient, near misses, exposed inner values."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.passes.fusion.gelu import FuseGelu

S, A = math.sqrt(2.0 / math.pi), 0.044715


class E:
    """Expressions over a builder: ``x * 0.5 + y`` makes nodes, in the written order."""

    def __init__(self, b, value):
        self.b, self.value = b, value

    def _other(self, other):
        return other.value if isinstance(other, E) else self.b.scalar(other, self.value)

    def op(self, name, *others, swap=False):
        values = [self.value, *(self._other(o) for o in others)]
        return E(self.b, self.b.op(name, *(values[::-1] if swap else values)))

    def __add__(self, o):
        return self.op("Add", o)

    def __radd__(self, o):
        return self.op("Add", o, swap=True)

    def __mul__(self, o):
        return self.op("Mul", o)

    def __rmul__(self, o):
        return self.op("Mul", o, swap=True)

    def __sub__(self, o):
        return self.op("Sub", o)

    def __rsub__(self, o):
        return self.op("Sub", o, swap=True)

    def __truediv__(self, o):
        return self.op("Div", o)

    def __pow__(self, o):
        return self.op("Pow", o)

    def __neg__(self):
        return self.op("Neg")


def erf(x):
    return x.op("Erf")


def tanh(x):
    return x.op("Tanh")


FORWARD = {
    "torch": ("none", lambda x: x * 0.5 * (erf(x / math.sqrt(2)) + 1.0)),
    "inverse root": ("none", lambda x: 0.5 * (x * (1.0 + erf(x * math.sqrt(0.5))))),
    "half outside": ("none", lambda x: (1.0 + erf(x / math.sqrt(2))) * x * 0.5),
    "half distributed": ("none", lambda x: x * (0.5 * erf(x / math.sqrt(2)) + 0.5)),
    "sum": ("none", lambda x: x * 0.5 + x * 0.5 * erf(x / math.sqrt(2))),
    "pow": ("tanh", lambda x: 0.5 * x * (1.0 + tanh(S * (x + A * x**3.0)))),
    "cube by mul": ("tanh", lambda x: x * 0.5 * (tanh((x + x * x * x * A) * S) + 1.0)),
    "factored": ("tanh", lambda x: x * (0.5 + 0.5 * tanh(x * (S + S * A * (x * x))))),
    "sigmoid": ("tanh", lambda x: x * (x * (2 * S) * (1.0 + A * (x * x))).op("Sigmoid")),
    "exp": ("tanh", lambda x: x / (1.0 + (-(2 * S) * (x + A * x**3.0)).op("Exp"))),
}


def gelu(bench, form, shape=(3, 4), dtype=ir.DataType.FLOAT):
    return bench.make(lambda b, x: form(E(b, x)).value, {"x": shape}, {"x": dtype})


def gradient_none(dy, x, cdf):
    return dy * (cdf + x * ((x * x * -0.5).op("Exp") * (1 / math.sqrt(2 * math.pi))))


def with_gradient_none(b, x, dy):
    """Forward as torch writes it; the gradient reads the forward's 1 + erf."""
    x, dy = E(b, x), E(b, dy)
    inner = erf(x / math.sqrt(2)) + 1.0
    return (x * 0.5 * inner).value, gradient_none(dy, x, inner * 0.5).value


def with_gradient_builder(b, x, dy):
    """As ONNX Runtime's gradient builder derives it, operator by operator, from the sum of three paths."""
    x, dy = E(b, x), E(b, dy)
    u = x / math.sqrt(2)
    e = erf(u)
    inner = 1.0 + e
    half = x * inner
    y = half * 0.5
    d_half = dy * 0.5
    d_inner = d_half * x
    d_u = d_inner * ((-(u * u)).op("Exp") * (2.0 / math.sqrt(math.pi)))
    dx = (d_half * inner).op("Sum", d_u / math.sqrt(2))
    return y.value, dx.value


def with_gradient_tanh(b, x, dy):
    """Torch's decomposition of the tanh form; shares tanh with the forward half."""
    x, dy = E(b, x), E(b, dy)
    t = tanh(S * (x + A * (x * x * x)))
    y = 0.5 * x * (1.0 + t)
    left_derivative = 0.5 * (1.0 + t)
    right = 0.5 * x * ((1.0 - t * t) * (S * (1.0 + 3.0 * A * (x * x))))
    return y.value, (dy * (left_derivative + right)).value


BOTH = {"none": with_gradient_none, "none, built": with_gradient_builder, "tanh": with_gradient_tanh}
SHAPES = {"x": (3, 4), "dy": (3, 4)}


@pytest.mark.parametrize("form", FORWARD)
def test_forward_forms(bench, form):
    kind, body = FORWARD[form]
    graph = gelu(bench, body)
    assert bench.apply(graph, FuseGelu()) == {f"gelu-{kind}": 1}
    assert bench.ops(graph) == ["ortgraph.Gelu"]
    assert next(iter(graph.graph)).attributes["approximate"].value == kind


@pytest.mark.parametrize("form", BOTH)
def test_gradient_and_forward_share_nodes(bench, form):
    kind = form.split(",")[0]
    graph = bench.make(BOTH[form], SHAPES)
    assert bench.apply(graph, FuseGelu()) == {f"gelu-{kind}": 1, f"gelugrad-{kind}": 1}
    assert sorted(bench.ops(graph)) == ["ortgraph.Gelu", "ortgraph.GeluGrad"]


def test_gradient_whose_dy_is_a_sum(bench):
    """The gradient arrives through an Add, an element-wise operator that is not part of the region."""

    def body(b, x, p, q):
        return with_gradient_none(b, b.op("Add", x, q), b.op("Add", b.op("Mul", p, q), q))

    graph = bench.make(body, {"x": (3, 4), "p": (3, 4), "q": (3, 4)})
    assert bench.apply(graph, FuseGelu()) == {"gelu-none": 1, "gelugrad-none": 1}


def test_float64_and_symbolic_shapes(bench):
    assert bench.apply(gelu(bench, FORWARD["torch"][1], ("n", 4)), FuseGelu()) == {"gelu-none": 1}
    double = gelu(bench, FORWARD["factored"][1], dtype=ir.DataType.DOUBLE)
    assert bench.apply(double, FuseGelu()) == {"gelu-tanh": 1}


@pytest.mark.parametrize(
    "form",
    [
        lambda x: 0.5 * x * (1.0 + tanh(S * (x + 0.044 * x**3.0))),
        lambda x: 0.5 * x * (1.0 + tanh(0.79 * (x + A * x**3.0))),
        lambda x: x * 0.5 * (erf(x / 1.414) + 1.0),
        lambda x: x * 0.5 * (erf(x / 1.4142) + 1.0),
        lambda x: x * 0.5 * (erf(x / math.sqrt(2)) + 1.00001),
    ],
)
def test_wrong_constants(bench, form):
    reasons = bench.refusals(gelu(bench, form), FuseGelu())
    assert any("differ from Gelu" in r for r in reasons)


@pytest.mark.parametrize("form", FORWARD)
@pytest.mark.parametrize("factor", [1.0 + 3e-5, 0.999, 2.0])
def test_every_constant_counts(bench, form, factor):
    """Each constant of each form is changed in turn: nothing may be fused that is another function."""
    count = len(gelu(bench, FORWARD[form][1]).graph.initializers)
    for i in range(count):
        graph = gelu(bench, FORWARD[form][1])
        changed = list(graph.graph.initializers.values())[i]
        number = changed.const_value.numpy() * np.float32(factor)
        changed.const_value = ir.tensor(number.astype(np.float32), name=changed.name)
        assert not FuseGelu()(graph.model).modified, f"constant {i} times {factor}"


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x * 0.5 * (erf(x) + 1.0),
        lambda x: x * (erf(x / math.sqrt(2)) + 1.0),
        lambda x: x * 0.5 * (tanh(x) + 1.0),
        lambda x: x * x.op("Sigmoid"),
    ],
)
def test_other_functions(bench, form):
    bench.refusals(gelu(bench, form), FuseGelu())


def test_value_that_an_unfused_reader_needs(bench):
    def body(b, x):
        x = E(b, x)
        e = erf(x / math.sqrt(2))
        return (x * 0.5 * (e + 1.0)).value, (e * e).value

    reasons = bench.refusals(bench.make(body, {"x": (3, 4)}), FuseGelu())
    assert any("also read by Mul" in r for r in reasons)


def test_broadcast_and_parameter_constants(bench):
    def row(b, x, r):
        return (E(b, x) * 0.5 * (erf(E(b, r) / math.sqrt(2)) + 1.0)).value

    bench.refusals(bench.make(row, {"x": (3, 4), "r": (4,)}), FuseGelu())

    def parameter(b, x, half):
        return (E(b, x) * E(b, half) * (erf(E(b, x) / math.sqrt(2)) + 1.0)).value

    bench.refusals(bench.make(parameter, {"x": (3, 4), "half": ()}), FuseGelu())


def test_cast_inside_is_not_swallowed(bench):
    def body(b, x):
        low = E(b, b.op("Cast", (E(b, x) / math.sqrt(2)).value, to=ir.DataType.DOUBLE))
        e = E(b, b.op("Cast", erf(low).value, to=ir.DataType.FLOAT))
        return (E(b, x) * 0.5 * (e + 1.0)).value

    graph = bench.make(body, {"x": (3, 4)})
    text = graph.text()
    assert not FuseGelu()(graph.model).modified and graph.text() == text


@pytest.mark.parametrize("form", BOTH)
def test_exposed_inner_values(bench, form):
    seen = bench.expose_each(lambda: bench.make(BOTH[form], SHAPES), FuseGelu())
    assert len(seen) > 8
    # An exposed forward value keeps the forward chain; everything else may still fuse.
    assert any(not any(k.startswith("gelu-") for k in counts) for _, counts in seen)


def test_provenance(bench):
    graph = gelu(bench, FORWARD["torch"][1])
    FuseGelu()(graph.model)
    assert next(iter(graph.graph)).metadata_props["ortgraph.pass"] == "fuse-gelu"
