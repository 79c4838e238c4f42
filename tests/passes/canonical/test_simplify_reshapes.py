from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.passes.canonical.simplify_reshapes import SimplifyReshapes

X = {"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}


def simplify(run, body, before="float[2,3,4] x", after="float[2,3,4] y", feeds=X, opset=18):
    return run(f"g ({before}) => ({after}) {{ n = Neg(x) {body} y = Exp(b) }}", SimplifyReshapes(), feeds, opset)


@pytest.mark.parametrize(
    "body",
    [
        "s = Constant <value_ints=[6,4]> () t = Constant <value_ints=[2,3,4]> () a = Reshape(n, s) b = Reshape(a, t)",
        "s = Constant <value_ints=[0]> () a = Unsqueeze(n, s) b = Squeeze(a, s)",
        "s = Constant <value_ints=[0,-1]> () t = Constant <value_ints=[0,3,4]> () a = Reshape(n, s) b = Reshape(a, t)",
        "t = Constant <value_ints=[2,3,4]> () a = Flatten <axis=2> (n) b = Reshape(a, t)",
    ],
)
def test_round_trips_cancel(run, body):
    ran = simplify(run, body)
    assert [op for op in ran.ops if op != "Constant"] == ["Neg", "Exp"] and ran.counts == {"cancelled": 1}


@pytest.mark.parametrize(
    "body, shape",
    [
        (
            "s = Constant <value_ints=[6,4]> () t = Constant <value_ints=[8,3]> () a = Reshape(n, s) b = Reshape(a, t)",
            "8,3",
        ),
        (
            "s = Constant <value_ints=[24]> () t = Constant <value_ints=[0]> () a = Reshape(n, s) b = Unsqueeze(a, t)",
            "1,24",
        ),
        ("s = Constant <value_ints=[3]> () a = Unsqueeze(n, s) b = Flatten <axis=1> (a)", "2,12"),
    ],
)
def test_chains_merge(run, body, shape):
    ran = simplify(run, body, after=f"float[{shape}] y")
    assert [op for op in ran.ops if op != "Constant"] == ["Neg", "Reshape", "Exp"] and ran.counts == {"merged": 1}


def test_three_in_a_row(run):
    body = """s = Constant <value_ints=[6,4]> () z = Constant <value_ints=[0]> ()
        t = Constant <value_ints=[4,6]> () a = Reshape(n, s) c = Unsqueeze(a, z) b = Reshape(c, t)"""
    assert [o for o in simplify(run, body, after="float[4,6] y").ops if o != "Constant"] == ["Neg", "Reshape", "Exp"]


def test_to_a_scalar(run):
    text = """g (float[1,1] x) => (float y) { n = Neg(x) s = Constant <value_ints=[1]> () a = Reshape(n, s)
        b = Squeeze(a) y = Exp(b) }"""
    ran = run(text, SimplifyReshapes(), {"x": np.ones((1, 1), np.float32)})
    assert ran.counts == {"merged": 1}


def symbolic(parse_model, middle, last, body):
    """n: [B,S,4]; a: middle; b: last, with the shapes recorded as given."""
    model = parse_model(
        f"g (float[B,S,4] x, int64[?] s, int64[?] t) => (float[?] y) {{ n = Neg(x) {body} y = Exp(b) }}", infer=False
    )
    n, a, b, y = model.graph
    shapes = (["B", "S", 4], middle, last, last)
    for node, shape in zip((n, a, b, y), shapes, strict=True):
        node.outputs[0].shape, node.outputs[0].dtype = ir.Shape(shape), ir.DataType.FLOAT
    return model


RESHAPES = "a = Reshape(n, s) b = Reshape(a, t)"


def test_named_dimensions_cancel(run, parse_model):
    model = symbolic(parse_model, ["B*S", 4], ["B", "S", 4], RESHAPES)
    ran = run(model, SimplifyReshapes(), X | {"s": np.array([-1, 4]), "t": np.array([2, 3, 4])})
    assert ran.ops == ["Neg", "Exp"]


@pytest.mark.parametrize(
    "last, numbers, target",
    [
        (["B*S", 2, 2], [6, 2, 2], [-1, 2, 2]),
        (["B", "S", 2, 2], [2, 3, 2, 2], [0, 0, 2, 2]),
        (["B", "S*2", 2], [2, 6, 2], [0, -1, 2]),
    ],
)
def test_named_dimensions_stay_right(run, parse_model, last, numbers, target):
    model = symbolic(parse_model, ["B*S", 4], last, RESHAPES)
    ran = run(model, SimplifyReshapes(), X | {"s": np.array([-1, 4]), "t": np.array(numbers)})
    assert ran.node("Reshape").inputs[1].const_value.numpy().tolist() == target


@pytest.mark.parametrize("last", [["S", "B", 4], ["S", 2, "B", 2], [None, None, 4], [0, "B"]])
def test_refuses_what_no_constant_shape_says(run, parse_model, last):
    model = symbolic(parse_model, ["B*S", 4], last, RESHAPES)
    before = [n.op_type for n in model.graph]
    outcome = SimplifyReshapes()(model)
    assert not outcome.modified and [n.op_type for n in model.graph] == before
    assert "no constant shape" in outcome.refusals[0].reason


def test_zero_sized_dimensions(run):
    text = """g (float[2,0,4] x) => (float[0,8] y) { n = Neg(x) s = Constant <value_ints=[0,4]> ()
        t = Constant <value_ints=[0,8]> ()
        a = Reshape <allowzero=1> (n, s) b = Reshape <allowzero=1> (a, t) y = Exp(b) }"""
    ran = run(text, SimplifyReshapes(), {"x": np.zeros((2, 0, 4), np.float32)})
    assert ran.counts == {}
    there = text.replace("float[0,8] y", "float[2,0,4] y").replace("[0,8]> ()", "[2,0,4]> ()")
    assert run(there, SimplifyReshapes(), {"x": np.zeros((2, 0, 4), np.float32)}).counts == {"cancelled": 1}


def test_attributes_of_the_merged_node_go(run):
    body = "s = Constant <value_ints=[6,4]> () a = Reshape(n, s) b = Flatten <axis=0> (a)"
    ran = simplify(run, body, after="float[1,24] y")
    assert dict(ran.node("Reshape").attributes) == {}


def test_axes_as_attributes_in_old_opsets(run):
    text = """<ir_version: 7, opset_import: ["" : 11]>
    g (float[2,3] x) => (float[2,3] y) { n = Neg(x) a = Unsqueeze <axes=[0]> (n) b = Squeeze <axes=[0]> (a)
        y = Exp(b) }"""
    assert run(text, SimplifyReshapes()).ops == ["Neg", "Exp"]


def test_other_readers_and_outputs_of_the_middle_stay(run):
    body = "s = Constant <value_ints=[6,4]> () t = Constant <value_ints=[2,3,4]> () a = Reshape(n, s) b = Reshape(a, t)"
    text = f"g (float[2,3,4] x) => (float[2,3,4] y, float[6,4] a) {{ n = Neg(x) {body} y = Exp(b) }}"
    ran = run(text, SimplifyReshapes(), X)
    assert [o for o in ran.ops if o != "Constant"] == ["Neg", "Reshape", "Exp"]


def test_output_that_equals_an_input_keeps_its_name(run):
    text = """g (float[2,3,4] x) => (float[2,3,4] y) { s = Constant <value_ints=[6,4]> ()
        t = Constant <value_ints=[2,3,4]> ()
        a = Reshape(x, s) y = Reshape(a, t) }"""
    ran = run(text, SimplifyReshapes(), X)
    assert ran.counts == {} and "keeps its own name" in ran.reasons
