"""FuseLayerNorm: forward forms, the gradient with and without statistics, near misses, exposed inner values."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.passes.fusion.layer_norm import FuseLayerNorm

X, D = (2, 3, 8), (8,)
SHAPES = {"x": X, "s": D, "b": D}


def normalized(b, x, kind, axes=(-1,), epsilon=1e-5):
    """(x_hat, mean, inverse deviation or None)."""
    over = b.ints(axes)
    mean = b.op("ReduceMean", x, over, keepdims=1)
    d = b.op("Sub", x, mean)
    square = b.op("Mul", d, d) if kind == "mul" else b.op("Pow", d, b.scalar(2.0, x))
    if kind == "sum":
        var = b.op("Div", b.op("ReduceSum", square, over, keepdims=1), b.scalar(float(x.shape[-1]), x))
    else:
        var = b.op("ReduceMean", square, over, keepdims=1)
    e = b.op("Add", var, b.scalar(epsilon, x))
    if kind == "power":
        r = b.op("Pow", e, b.scalar(-0.5, x))
        return b.op("Mul", d, r), mean, r
    std = b.op("Sqrt", e)
    if kind == "reciprocal":
        r = b.op("Reciprocal", std)
        return b.op("Mul", r, d), mean, r
    return b.op("Div", d, std), mean, None


def forward(kind, affine="both", **options):
    def body(b, x, s, c):
        y = normalized(b, x, kind, **options)[0]
        if affine in ("both", "scale"):
            y = b.op("Mul", s, y)
        if affine in ("both", "bias"):
            y = b.op("Add", y, c)
        return y

    return body


@pytest.mark.parametrize("kind", ["pow", "mul", "sum", "power", "reciprocal"])
@pytest.mark.parametrize("affine", ["both", "scale", "bias", "none"])
def test_forward(bench, kind, affine):
    graph = bench.make(forward(kind, affine), SHAPES)
    assert bench.apply(graph, FuseLayerNorm()) == {"forward": 1}
    (node,) = graph.graph
    assert node.op_type == "LayerNormalization" and len(node.outputs) == 3
    assert node.attributes["axis"].value == -1 and node.attributes["epsilon"].value == pytest.approx(1e-5)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-5, 1e-12])
def test_epsilon_is_read_from_the_graph(bench, epsilon):
    graph = bench.make(forward("mul", epsilon=epsilon), SHAPES)
    assert bench.apply(graph, FuseLayerNorm()) == {"forward": 1}
    assert next(iter(graph.graph)).attributes["epsilon"].value == pytest.approx(epsilon)


def test_axes_as_attribute(bench):
    def body(b, x, s, c):
        mean = b.op("ReduceMean", x, axes=[-1], keepdims=1)
        d = b.op("Sub", x, mean)
        var = b.op("ReduceMean", b.op("Mul", d, d), axes=[-1], keepdims=1)
        y = b.op("Div", d, b.op("Sqrt", b.op("Add", var, b.scalar(1e-5, x))))
        return b.op("Add", b.op("Mul", y, s), c)

    graph = bench.make(body, SHAPES, opset=17)
    outcome = FuseLayerNorm()(graph.model)
    assert dict(outcome.counts) == {"forward": 1}


def test_two_axes_and_unknown_rows(bench):
    graph = bench.make(forward("mul", axes=(-2, -1)), {"x": X, "s": X[1:], "b": X[1:]})
    assert bench.apply(graph, FuseLayerNorm()) == {"forward": 1}
    assert next(iter(graph.graph)).attributes["axis"].value == -2
    graph = bench.make(forward("mul"), {"x": ("n", 3, 8), "s": D, "b": D})
    assert bench.apply(graph, FuseLayerNorm()) == {"forward": 1}


def test_residual_in_front_and_behind_stays(bench):
    def body(b, x, s, c, r):
        y = forward("mul")(b, b.op("Add", x, r), s, c)
        return b.op("Add", y, r)

    graph = bench.make(body, {**SHAPES, "r": X})
    assert bench.apply(graph, FuseLayerNorm()) == {"forward": 1}
    assert bench.ops(graph) == ["Add", "LayerNormalization", "Add"]


@pytest.mark.parametrize(
    ("options", "shapes", "word"),
    [
        ({"axes": (1,)}, {"x": X, "s": X, "b": X}, ""),
        ({"axes": (1,), "affine": "none"}, SHAPES, "not the last ones"),
        ({"affine": "none"}, {"x": (2, 3, "w"), "s": D, "b": D}, "width is not known"),
        ({}, {"x": X, "s": (1, 1, 8), "b": (1, 8)}, ""),
        ({}, {"x": X, "s": (1,), "b": D}, ""),
    ],
)
def test_near_misses(bench, options, shapes, word):
    affine = options.pop("affine", "both")
    graph = bench.make(forward("mul", affine, **options), shapes)
    reasons = [*FuseLayerNorm()(graph.model).refusals]
    assert not any("Layer" in o for o in bench.ops(graph)) or word == ""
    assert not word or any(word in r.reason for r in reasons)


def test_scale_of_the_wrong_shape_is_left_outside(bench):
    """Scale [1, 1, D] is not the operator's: the core fuses without it, and the result keeps its shape."""
    graph = bench.make(forward("mul"), {"x": X, "s": (1, 1, 8), "b": (1, 8)})
    assert bench.apply(graph, FuseLayerNorm()) == {"forward": 1}
    assert bench.ops(graph) == ["LayerNormalization", "Mul", "Add"]


def test_float64_is_refused(bench):
    graph = bench.make(forward("mul"), SHAPES, dict.fromkeys(SHAPES, ir.DataType.DOUBLE))
    assert any("float32" in r for r in bench.refusals(graph, FuseLayerNorm()))


@pytest.mark.parametrize("wrong", ["unbiased", "two epsilons", "no mean"])
def test_other_normalizations(bench, wrong):
    def body(b, x):
        over = b.ints([-1])
        mean = b.op("ReduceMean", x, over, keepdims=1)
        d = x if wrong == "no mean" else b.op("Sub", x, mean)
        if wrong == "unbiased":
            var = b.op("Div", b.op("ReduceSum", b.op("Mul", d, d), over, keepdims=1), b.scalar(7.0, x))
        else:
            var = b.op("ReduceMean", b.op("Mul", d, d), over, keepdims=1)
        e = b.op("Add", var, b.scalar(1e-5, x))
        if wrong == "two epsilons":
            e = b.op("Add", e, b.scalar(1e-4, x))
        return b.op("Div", d, b.op("Sqrt", e)), mean

    bench.refusals(bench.make(body, {"x": X}), FuseLayerNorm())


def gradient(statistics=True, affine=True, sums=True, kind="reciprocal", variant="torch"):
    """Forward, dX, dScale, dBias. Without ``statistics`` the forward half is decomposed as well."""

    def body(b, x, s, c, dy):
        if statistics:
            y, mean, r = b.multi("LayerNormalization", x, s, c, outputs=3, axis=-1, epsilon=1e-5)
            x_hat = b.op("Mul", b.op("Sub", x, mean), r)
        else:
            x_hat, mean, r = normalized(b, x, kind)
            y = b.op("Add", b.op("Mul", x_hat, s), c)
        n = b.scalar(8.0, x)
        over = b.ints([2])
        g = b.op("Mul", dy, s) if affine else dy
        if variant == "torch":
            inner = b.op("Sub", b.op("Mul", g, n), b.op("ReduceSum", g, over, keepdims=1))
            along = b.op("ReduceSum", b.op("Mul", g, x_hat), over, keepdims=1)
            inner = b.op("Sub", inner, b.op("Mul", x_hat, along))
            dx = b.op("Mul", b.op("Div", r, n), inner)
        else:
            along = b.op("Mul", x_hat, b.op("ReduceMean", b.op("Mul", g, x_hat), over, keepdims=1))
            dx = b.op("Mul", b.op("Sub", b.op("Sub", g, along), b.op("ReduceMean", g, over, keepdims=1)), r)
        if not sums:
            return y, dx
        ds = b.op("ReduceSum", b.op("Mul", dy, x_hat), b.ints([0, 1]), keepdims=0)
        return y, ds, b.op("ReduceSum", dy, b.ints([0, 1]), keepdims=0), dx

    return body


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("variant", ["torch", "means"])
def test_gradient(bench, statistics, affine, sums, variant):
    graph = bench.make(gradient(statistics, affine, sums, variant=variant), {**SHAPES, "dy": X})
    assert bench.apply(graph, FuseLayerNorm()) == {"gradient": 1, **({} if statistics else {"forward": 1})}
    assert bench.ops(graph) == ["LayerNormalization", "ortgraph.LayerNormGrad"]
    node = list(graph.graph)[1]
    assert len(node.outputs) == (3 if sums else 1)
    assert (len(node.inputs) > 4 and node.inputs[4] is not None) == affine


def test_gradient_of_another_norm(bench):
    """The statistics of one tensor with the x_hat of another."""

    def body(b, x, s, c, dy):
        y, mean, r = b.multi("LayerNormalization", x, s, c, outputs=3, axis=-1, epsilon=1e-5)
        x_hat = b.op("Mul", b.op("Sub", y, mean), r)
        over = b.ints([2])
        along = b.op("Mul", x_hat, b.op("ReduceMean", b.op("Mul", dy, x_hat), over, keepdims=1))
        return y, b.op("Mul", b.op("Sub", b.op("Sub", dy, along), b.op("ReduceMean", dy, over, keepdims=1)), r)

    bench.refusals(bench.make(body, {**SHAPES, "dy": X}), FuseLayerNorm())


@pytest.mark.parametrize("statistics", [True, False])
def test_exposed_inner_values(bench, statistics):
    seen = bench.expose_each(lambda: bench.make(gradient(statistics), {**SHAPES, "dy": X}), FuseLayerNorm())
    assert len(seen) > 10


def built(b, x, s, c, dy, residual=None):
    """The gradient as ONNX Runtime's builder derives it from the decomposed forward chain, residual summed in."""
    over = b.ints([-1])
    n, two = b.scalar(8.0, x), b.scalar(2.0, x)
    mean = b.op("ReduceMean", x, over, keepdims=1)
    d = b.op("Sub", x, mean)
    std = b.op("Sqrt", b.op("Add", b.op("ReduceMean", b.op("Pow", d, two), over, keepdims=1), b.scalar(1e-5, x)))
    x_hat = b.op("Div", d, std)
    y = b.op("Add", b.op("Mul", x_hat, s), c)
    full = b.ints([2, 3, 8])
    d_hat = b.op("Mul", dy, s)
    dd = b.op("Div", d_hat, std)
    d_std = b.op("ReduceSum", b.op("Neg", b.op("Mul", dd, b.op("Div", d, std))), over, keepdims=1)
    d_var = b.op("Mul", d_std, b.op("Div", b.scalar(0.5, x), std))
    spread = b.op("Mul", b.op("Expand", b.op("Div", d_var, n), full), d)
    dd = b.op("Sum", spread, spread, dd)
    d_mean = b.op("Neg", b.op("ReduceSum", dd, over, keepdims=1))
    parts = [b.op("Expand", b.op("Div", d_mean, n), full), dd, *([residual] if residual is not None else [])]
    ds = b.op("Reshape", b.op("ReduceSum", b.op("Mul", dy, x_hat), b.ints([0, 1]), keepdims=1), b.ints([8]))
    db = b.op("Reshape", b.op("ReduceSum", dy, b.ints([0, 1]), keepdims=1), b.ints([8]))
    return y, ds, db, b.op("Sum", *parts)


@pytest.mark.parametrize("residual", [False, True])
def test_gradient_builder_form(bench, residual):
    shapes = {**SHAPES, "dy": X, **({"residual": X} if residual else {})}
    graph = bench.make(built, shapes)
    assert bench.apply(graph, FuseLayerNorm()) == {"forward": 1, "gradient": 1}
    assert bench.ops(graph) == ["LayerNormalization", "ortgraph.LayerNormGrad", *(["Add"] if residual else [])]


def test_exposed_inner_values_of_the_gradient_builder_form(bench):
    assert bench.expose_each(lambda: bench.make(built, {**SHAPES, "dy": X, "residual": X}), FuseLayerNorm())
