"""FuseProduct: each step, steps together, views, second outputs, near misses with their reason."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.manager.pipeline_text import parse_pipeline
from ortgraph.passes.fusion.product import FuseProduct

P = "ortgraph.Product"
FLOAT, BF16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
SHAPES = {"x": (6, 8), "w": (8, 5), "b": (5,), "r": (6, 5)}
ROUGH = 2e-2  # what a value rounded to bfloat16 in one place more or less may differ by


def product(b, *inputs, outputs=1, **attributes):
    options = {"precision": "bf16", "to": int(FLOAT), **attributes}
    made = b.multi("Product", *inputs, outputs=outputs, domain="ortgraph", **options)
    return made[0] if outputs == 1 else made


def node_of(graph):
    return next(n for n in graph.graph if n.op_type == "Product")


def option(graph, name):
    found = node_of(graph).attributes.get(name)
    return None if found is None else found.value


def test_everything_at_once(bench):
    def body(b, x, w, bias, r):
        y = product(b, b.op("Cast", x, to=BF16), b.op("Transpose", w, perm=[1, 0]))
        y = b.op("Add", b.op("Mul", y, b.scalar(0.5, y)), bias)
        return b.op("Add", r, b.op("Gelu", y, domain="ortgraph", approximate="tanh"))

    graph = bench.make(body, {**SHAPES, "w": (5, 8)})
    counts = bench.apply(graph, FuseProduct(addends=True))
    assert counts == {"operand-cast": 1, "transpose": 1, "scale": 1, "bias": 1, "activation": 1, "addend": 1}
    assert bench.ops(graph) == [P]
    assert (option(graph, "alpha"), option(graph, "transB"), option(graph, "activation")) == (0.5, 1, "gelu_tanh")
    assert [v.name for v in node_of(graph).inputs] == ["x", "w", "b", "r"]


@pytest.mark.parametrize("swap", [False, True])
def test_addend_and_bias_on_either_side(bench, swap):
    def body(b, x, w, bias, r):
        y = product(b, x, w)
        y = b.op("Add", *((bias, y) if swap else (y, bias)))
        return b.op("Add", *((r, y) if swap else (y, r)))

    graph = bench.make(body, SHAPES)
    assert bench.apply(graph, FuseProduct(addends=True)) == {"bias": 1, "addend": 1}
    assert bench.ops(graph) == [P]


@pytest.mark.parametrize("op,domain,name", [
    ("Relu", "", "relu"), ("Tanh", "", "tanh"), ("Silu", "ortgraph", "silu"), ("Gelu", "ortgraph", "gelu"),
])  # fmt: skip
def test_activation_whose_gradient_reads_the_value_before(bench, op, domain, name):
    def body(b, x, w, bias, r):
        z = product(b, x, w, bias)
        return b.op(op, z, domain=domain), b.op("SiluGrad", r, z, domain="ortgraph")

    graph = bench.make(body, SHAPES)
    assert bench.apply(graph, FuseProduct(addends=True)) == {"activation": 1}
    assert sorted(bench.ops(graph)) == sorted([P, "ortgraph.SiluGrad"])
    node = node_of(graph)
    assert option(graph, "activation") == name and len(node.outputs) == 2
    gradient = next(n for n in graph.graph if n.op_type == "SiluGrad")
    assert gradient.inputs[1] is node.outputs[1]


def test_activation_alone_needs_no_second_output(bench):
    graph = bench.make(lambda b, x, w: b.op("Relu", product(b, x, w)), {"x": (6, 8), "w": (8, 5)})
    assert bench.apply(graph, FuseProduct(addends=True)) == {"activation": 1}
    assert len(node_of(graph).outputs) == 1


def test_activation_and_addend_behind_views(bench):
    shapes = {"x": (6, 8), "w": (8, 5), "r": (2, 3, 5), "g": (2, 3, 5)}

    def body(b, x, w, r, g):
        z = b.op("Reshape", product(b, x, w), b.ints([2, 3, 5]))
        y = b.op("Gelu", z, domain="ortgraph", approximate="none")
        return b.op("Reshape", y, b.ints([6, 5])), b.op("GeluGrad", g, z, domain="ortgraph", approximate="none")

    graph = bench.make(body, shapes)
    assert bench.apply(graph, FuseProduct(addends=True)) == {"activation": 1}
    assert option(graph, "activation") == "gelu" and len(node_of(graph).outputs) == 2

    def residual(b, x, w, r, g):
        return b.op("Add", b.op("Reshape", product(b, x, w), b.ints([2, 3, 5])), r)

    graph = bench.make(residual, shapes)
    assert bench.apply(graph, FuseProduct(addends=True)) == {"addend": 1}
    assert bench.ops(graph) == ["Reshape", P, "Reshape"]


def test_weight_gradients_are_added_by_the_second_product(bench):
    def body(b, x, w, r):
        first, second = product(b, x, w, transA=1), product(b, r, w, transA=1)
        return b.op("Add", first, second)

    graph = bench.make(body, {"x": (7, 8), "w": (7, 5), "r": (7, 8)})
    assert bench.apply(graph, FuseProduct(addends=True)) == {"addend": 1}
    assert bench.ops(graph) == [P, P]


def test_result_and_operand_casts(bench):
    def body(b, x, w):
        wide = b.op("Cast", b.op("Cast", w, to=BF16), to=FLOAT)
        y = b.op("Cast", product(b, x, wide), to=BF16)
        return b.op("Cast", y, to=FLOAT)

    graph = bench.make(body, {"x": (6, 8), "w": (8, 5)})
    assert bench.apply(graph, FuseProduct(addends=True), ROUGH) == {"operand-cast": 2, "result-cast": 1}
    assert bench.ops(graph) == [P, "Cast"] and option(graph, "to") == int(BF16)


def test_low_activation(bench):
    def body(b, x, w, r):
        z = product(b, x, w, to=int(BF16))
        y = b.op("Gelu", z, domain="ortgraph", approximate="none")
        dz = b.op("GeluGrad", b.op("Cast", r, to=BF16), z, domain="ortgraph", approximate="none")
        return b.op("Cast", y, to=FLOAT), b.op("Cast", dz, to=FLOAT)

    graph = bench.make(body, {"x": (6, 8), "w": (8, 5), "r": (6, 5)})
    outcome = FuseProduct(addends=True)(graph.model)
    assert dict(outcome.counts) == {"activation": 1}
    assert [o.dtype for o in node_of(graph).outputs] == [BF16, BF16]


@pytest.mark.parametrize("view", [False, True])
def test_activation_in_float32_between_casts(bench, view):
    def body(b, x, w, r):
        z = product(b, x, w, to=int(BF16))
        z = b.op("Reshape", z, b.ints([2, 3, 5])) if view else z
        y = b.op("Cast", b.op("Gelu", b.op("Cast", z, to=FLOAT), domain="ortgraph", approximate="tanh"), to=BF16)
        dz = b.op("GeluGrad", r, b.op("Cast", z, to=FLOAT), domain="ortgraph", approximate="tanh")
        return b.op("Cast", y, to=FLOAT), dz

    graph = bench.make(body, {"x": (6, 8), "w": (8, 5), "r": (2, 3, 5) if view else (6, 5)})
    assert bench.apply(graph, FuseProduct(addends=True), ROUGH) == {"activation": 1}
    assert "ortgraph.Gelu" not in bench.ops(graph) and option(graph, "activation") == "gelu_tanh"

    def read_in_float(b, x, w, r):
        y = b.op("Tanh", b.op("Cast", product(b, x, w, to=int(BF16)), to=FLOAT))
        return b.op("Cast", b.op("Cast", y, to=BF16), to=FLOAT), b.op("TanhGrad", r, y, domain="ortgraph")

    assert (
        bench.refusals(bench.make(read_in_float, {"x": (6, 8), "w": (8, 5), "r": (6, 5)}), FuseProduct(addends=True))
        == []
    )


def both(b, y, other):
    return other, b.op("Identity", y)


@pytest.mark.parametrize("body,reason", [
    (lambda b, x, w, bias, r: both(b, y := product(b, x, w), b.op("Add", y, r)), "read by 2 nodes"),
    (lambda b, x, w, bias, r: both(b, y := product(b, x, w), b.op("Mul", y, b.scalar(2.0, y))), "read by 2 nodes"),
    (lambda b, x, w, bias, r: b.op("Mul", b.op("Identity", product(b, x, w)), b.scalar(2.0, x)), None),
    (lambda b, x, w, bias, r: b.op("Mul", product(b, x, w, bias), b.scalar(2.0, x)), "behind a bias"),
    (lambda b, x, w, bias, r: b.op("Div", b.scalar(2.0, x), product(b, x, w)), None),
    (lambda b, x, w, bias, r: b.op("Add", product(b, x, w, activation="relu"), bias), "behind another bias"),
    (lambda b, x, w, bias, r: b.op("Add", product(b, x, w, None, r), r), "an addend already"),
    (lambda b, x, w, bias, r: b.op("Add", product(b, x, w), b.op("Unsqueeze", bias, b.ints([0]))), "another shape"),
    (lambda b, x, w, bias, r: b.op("Add", product(b, x, w), b.op("Unsqueeze", r, b.ints([0]))), "another shape"),
    (lambda b, x, w, bias, r: b.op("Add", y := product(b, x, w), y), None),
    (lambda b, x, w, bias, r: b.op("Relu", product(b, x, w, None, r)), None),
    (lambda b, x, w, bias, r: both(b, c := b.op("Cast", x, to=BF16), product(b, c, w)), "read elsewhere"),
    (lambda b, x, w, bias, r: both(b, t := b.op("Transpose", r, perm=[1, 0]), product(b, t, x)), "read elsewhere"),
    (lambda b, x, w, bias, r: product(b, b.op("Reshape", x, b.ints([6, 8])), w), None),
])  # fmt: skip
def test_near_misses(bench, body, reason):
    graph = bench.make(body, SHAPES)
    for value in graph.graph.outputs:  # a low output has no runtime form here
        assert value.dtype is not None
    found = bench.refusals(graph, FuseProduct(addends=True))
    assert (reason is None and not found) or any(reason in r for r in found)


def test_another_precision_keeps_its_casts(bench):
    def body(b, x, w):
        return product(b, b.op("Cast", x, to=BF16), w, precision="fp16")

    assert (
        bench.refusals(
            bench.make(body, {"x": (6, 8), "w": (8, 5)}),
            FuseProduct(addends=True),
        )
        == []
    )


def test_batched_swap_and_head_transposes(bench):
    def body(b, q, k):
        return product(b, q, b.op("Transpose", k, perm=[0, 1, 3, 2]))

    graph = bench.make(body, {"q": (2, 3, 4, 5), "k": (2, 3, 6, 5)})
    assert bench.apply(graph, FuseProduct(addends=True)) == {"transpose": 1}

    def heads(b, q, k):
        return product(b, q, b.op("Transpose", k, perm=[0, 2, 1, 3]))

    assert bench.refusals(bench.make(heads, {"q": (2, 3, 4, 5), "k": (2, 5, 3, 6)}), FuseProduct(addends=True)) == []


def test_inner_values_that_are_outputs(bench):
    def make():
        def body(b, x, w, bias, r):
            y = product(b, b.op("Cast", x, to=BF16), w)
            y = b.op("Gelu", b.op("Add", y, bias), domain="ortgraph", approximate="none")
            return b.op("Add", y, r)

        return bench.make(body, SHAPES)

    graph = make()
    names = [
        n.outputs[0].name for n in graph.graph if n.outputs[0].dtype == FLOAT and not n.outputs[0].is_graph_output()
    ]
    for name in names:
        exposed = make()
        inner = next(o for n in exposed.graph for o in n.outputs if o.name == name)
        exposed.graph.outputs.append(inner)
        exposed.signature = exposed.signature.replace(outputs=(*exposed.signature.outputs, name))
        bench.apply(exposed, FuseProduct(addends=True), 1e-4)


def test_accept_limits_the_steps(bench):
    graph = bench.make(lambda b, x, w, bias, r: b.op("Add", b.op("Add", product(b, x, w), bias), r), SHAPES)
    changes = FuseProduct(addends=True).run(graph, lambda index: index < 1)
    assert dict(changes.counts) == {"bias": 1} and bench.ops(graph) == [P, "Add"]


def test_numbers_agree_with_float64(bench):
    def body(b, x, w, bias, r):
        return b.op("Add", b.op("Tanh", b.op("Add", product(b, x, w, precision="fp32"), bias)), r)

    graph = bench.make(body, SHAPES)
    feeds = bench.feeds(graph)
    FuseProduct(addends=True)(graph.model)
    x, w, bias, r = (feeds[n].astype(np.float64) for n in ("x", "w", "b", "r"))
    assert np.allclose(bench.run(graph, feeds)[0], np.tanh(x @ w + bias) + r, atol=1e-6)


def test_sums_stay_outside_unless_asked_for(bench):
    graph = bench.make(lambda b, x, w, r: b.op("Add", product(b, x, w), r), {"x": (6, 8), "w": (8, 5), "r": (6, 5)})
    assert bench.refusals(graph, FuseProduct()) == []
    assert str(parse_pipeline("fuse-product{addends=true}")[0]) == "fuse-product{addends=true}"
