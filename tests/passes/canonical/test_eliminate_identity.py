from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortgraph.passes.canonical.eliminate_identity import EliminateIdentity

X = np.arange(1, 7, dtype=np.float32).reshape(2, 3)

NO_OPS = {
    "identity": "b = Identity(a)",
    "cast": "b = Cast <to=1> (a)",
    "reshape": "s = Constant <value_ints=[2,3]> () b = Reshape(a, s)",
    "reshape-0": "s = Constant <value_ints=[0,-1]> () b = Reshape(a, s)",
    "flatten": "b = Flatten <axis=1> (a)",
    "squeeze": "s = Constant <value = int64[0] {}> () b = Squeeze(a, s)",
    "expand": "s = Constant <value_ints=[1,3]> () b = Expand(a, s)",
    "tile": "s = Constant <value_ints=[1,1]> () b = Tile(a, s)",
    "transpose": "b = Transpose <perm=[0,1]> (a)",
    "slice": "s = Constant <value_ints=[0]> () e = Constant <value_ints=[99]> () b = Slice(a, s, e)",
    "pad": "p = Constant <value_ints=[0,0,0,0]> () b = Pad(a, p)",
    "concat": "b = Concat <axis=0> (a)",
    "sum": "b = Sum(a)",
    "max": "b = Max(a)",
    "mul": "k = Constant <value_float=1.0> () b = Mul(a, k)",
    "mul-left": "k = Constant <value_float=1.0> () b = Mul(k, a)",
    "div": "k = Constant <value_float=1.0> () b = Div(a, k)",
    "pow": "k = Constant <value_float=1.0> () b = Pow(a, k)",
    "add": "k = Constant <value_floats=[0.0, 0.0, 0.0]> () b = Add(a, k)",
    "sub": "k = Constant <value_float=0.0> () b = Sub(a, k)",
    "reduce": "b = ReduceSum <noop_with_empty_axes=1> (a)",
    "dropout": "b = Dropout(a)",
    "dropout-mask-unread": "b, m = Dropout(a)",
    "dropout-ratio-0": "r = Constant <value_float=0.0> () t = Constant <value = bool {1}> () b = Dropout(a, r, t)",
}  # fmt: skip

CHANGES = {
    "cast": "c = Cast <to=11> (a) b = Cast <to=1> (c)",
    "reshape": "s = Constant <value_ints=[3,2]> () r = Reshape(a, s) b = Transpose(r)",
    "transpose": "q = Transpose <perm=[1,0]> (a) b = Transpose(q)",
    "slice-reversed": "s = Constant <value_ints=[-1]> () e = Constant <value_ints=[-99]> () "
    "d = Constant <value_ints=[1]> () n = Constant <value_ints=[-1]> () b = Slice(a, s, e, d, n)",
    "mul-by-2": "k = Constant <value_float=2.0> () b = Mul(a, k)",
    "div-left": "k = Constant <value_float=1.0> () b = Div(k, a)",
    "sub-left": "k = Constant <value_float=0.0> () b = Sub(k, a)",
    "pow-left": "k = Constant <value_float=1.0> () b = Pow(k, a)",
    "one-of-several": "k = Constant <value_floats=[1.0, 1.0, 2.0]> () b = Mul(a, k)",
    "two-inputs": "b = Sum(a, a)",
    "reduce": "k = ReduceSum <keepdims=0> (a) b = Expand(k, shape)",
}  # fmt: skip


@pytest.mark.parametrize("body", NO_OPS.values(), ids=NO_OPS)
def test_removes(run, body):
    text = f"g (float[2,3] x) => (float[2,3] y) {{ a = Neg(x) {body} y = Exp(b) }}"
    ran = run(text, EliminateIdentity(), {"x": X})
    assert [op for op in ran.ops if op != "Constant"] == ["Neg", "Exp"]
    assert sum(ran.counts.values()) == 1


@pytest.mark.parametrize("body", CHANGES.values(), ids=CHANGES)
def test_keeps_what_changes_its_input(run, body):
    text = f"g (float[2,3] x) => (float[2,3] y) <int64[2] shape = {{2, 3}}> {{ a = Neg(x) {body} y = Exp(b) }}"
    assert run(text, EliminateIdentity(), {"x": X}).counts == {}


@pytest.mark.parametrize("op, element", [("Add", 0.0), ("Mul", 1.0), ("Sub", 0.0), ("Div", 1.0)])
def test_keeps_constants_that_broadcast_the_other_operand(run, op, element):
    text = (
        f"g (float[3] x) => (float[2,3] y) {{ a = Neg(x) k = Constant <value = float[2,1] {{{element}, {element}}}> () "
    )
    assert run(text + f"y = {op}(a, k) }}", EliminateIdentity(), {"x": X[0]}).counts == {}


def test_a_scalar_of_higher_rank_adds_dimensions(run):
    text = "g (float[3] x) => (float[1,3] y) { a = Neg(x) k = Constant <value = float[1,1] {1}> () y = Mul(a, k) }"
    assert run(text, EliminateIdentity(), {"x": X[0]}).counts == {}


def test_keeps_zero_valued_parameters_whatever_their_value(run):
    text = (
        "g (float[2,3] x, float[3] zero_a, float[3] zero_b) => (float[2,3] y) { a = Add(x, zero_a) y = Add(a, zero_b) }"
    )
    zeros = {"zero_a": np.zeros(3, np.float32), "zero_b": np.zeros(3, np.float32)}
    assert run(text, EliminateIdentity(), {"x": X} | zeros).counts == {}


def test_an_initializer_that_is_also_an_input_is_no_constant(run, parse_model):
    model = parse_model("g (float[2] x, float[2] w) => (float[2] y) { a = Neg(x) y = Add(a, w) }")
    model.graph.inputs[1].const_value = ir.tensor(np.zeros(2, np.float32), name="w")
    model.graph.register_initializer(model.graph.inputs[1])
    assert run(model, EliminateIdentity()).counts == {}


def test_dropout_stays_when_training_or_when_its_mask_is_read(run):
    live = """g (float[2,3] x, bool t) => (float[2,3] y) { r = Constant <value_float=0.5> () b = Dropout(x, r,
        t) y = Neg(b) }"""
    assert run(live, EliminateIdentity()).counts == {}
    training = """g (float[2,3] x) => (float[2,3] y) {
        r = Constant <value_float=0.5> () t = Constant <value = bool {1}> () b = Dropout(x, r, t) y = Neg(b) }"""
    assert run(training, EliminateIdentity()).counts == {}
    masked = """g (float[2,3] x) => (float[2,3] y, bool[2,3] m) {
        r = Constant <value_float=0.0> () t = Constant <value = bool {1}> () b, m = Dropout(x, r, t) y = Neg(b) }"""
    ran = run(masked, EliminateIdentity())
    assert ran.counts == {} and "%m of Dropout is read" in ran.reasons


def test_a_ratio_that_is_fed_is_no_constant(run):
    text = """g (float[2,3] x, float r) => (float[2,3] y) {
        t = Constant <value = bool {1}> () b = Dropout(x, r, t) y = Neg(b) }"""
    assert run(text, EliminateIdentity()).counts == {}


@pytest.mark.parametrize("ratio, gone", [(0.0, True), (0.25, False)])
def test_composite_dropout(run, ratio, gone):
    text = f"""<ir_version: 9, opset_import: ["" : 18, "ortgraph" : 1]>
    g (float[2] x, int64 k, int64 s) => (float[2] y) {{
        b, m = ortgraph.Dropout <ratio = {ratio}, node = 1> (x, k, s) y = Neg(b) }}"""
    assert (run(text, EliminateIdentity()).counts == {"Dropout": 1}) == gone


def test_chain_and_output_name(run):
    ran = run("g (float[2,3] x) => (float[2,3] y) { a = Neg(x) b = Identity(a) c = Identity(b) y = Identity(c) }",
              EliminateIdentity(), {"x": X})  # fmt: skip
    assert ran.ops == ["Neg"] and ran.counts == {"Identity": 3}


def test_input_to_output_identity_stays(run):
    ran = run("g (float[2,3] x) => (float[2,3] y) { a = Identity(x) y = Identity(a) }", EliminateIdentity(), {"x": X})
    assert ran.ops == ["Identity"] and "keeps its own name" in ran.reasons


def test_two_outputs_of_one_value_stay_two(run):
    ran = run("g (float[2,3] x) => (float[2,3] y, float[2,3] z) { a = Neg(x) y = Identity(a) z = Identity(a) }",
              EliminateIdentity(), {"x": X})  # fmt: skip
    assert ran.ops == ["Neg", "Identity"]


def test_inner_value_that_is_an_output_keeps_its_name(run):
    ran = run("g (float[2,3] x) => (float[2,3] a, float[2,3] y) { a = Neg(x) b = Identity(a) y = Exp(b) }",
              EliminateIdentity(), {"x": X})  # fmt: skip
    assert ran.ops == ["Neg", "Exp"]


def test_value_read_only_inside_a_branch(run):
    text = """g (float[2] x, bool c) => (float[2] y) {
        a = Neg(x)
        b = Identity(a)
        y = If (c) <then_branch = t () => (float[2] p) { p = Abs(b) },
                    else_branch = e () => (float[2] q) { q = Neg(b) }>
    }"""
    ran = run(text, EliminateIdentity(), {"x": X[0, :2], "c": np.array(True)})
    assert ran.ops == ["Neg", "If"]


def test_value_that_a_branch_returns_by_name_stays(parse_model):
    text = """g (float[2] x, bool c) => (float[2] y) {
        a = Neg(x)
        kept = Identity(a)
        y = If (c) <then_branch = t () => (float[2] kept) {},
                    else_branch = e () => (float[2] q) { q = Identity(a) }>
    }"""
    assert not EliminateIdentity()(parse_model(text, infer=False)).modified


def test_pads_that_shift_stay(run):
    text = """g (float[2,3] x) => (float[2,3] y) { a = Neg(x) p = Constant <value_ints=[0,-1,0,1]> ()
        b = Pad(a, p) y = Exp(b) }"""
    assert run(text, EliminateIdentity()).counts == {}  # ONNX's reference has no negative pads: no numbers here


def test_named_dimensions_are_equal_and_unnamed_ones_are_not(run, parse_model):
    named = parse_model("g (float[N,3] x, int64[2] s) => (float[N,3] y) { a = Neg(x) b = Expand(a, s) y = Exp(b) }")
    a, b = named.graph[0].outputs[0], named.graph[1].outputs[0]
    b.shape = ir.Shape(["N", 3])
    assert run(named, EliminateIdentity()).counts == {"Expand": 1}
    unnamed = parse_model("g (float[A,3] x, int64[2] s) => (float[B,3] y) { a = Neg(x) b = Expand(a, s) y = Exp(b) }")
    a, b = unnamed.graph[0].outputs[0], unnamed.graph[1].outputs[0]
    a.shape = b.shape = ir.Shape([None, 3])
    assert run(unnamed, EliminateIdentity(), {"x": X[:1], "s": np.array([4, 3])}).counts == {}


def test_numbered_tensors(run):
    nodes = [
        onnx.helper.make_node(*n) for n in (("Neg", ["1"], ["2"]), ("Identity", ["2"], ["3"]), ("Exp", ["3"], ["4"]))
    ]
    io = [onnx.helper.make_tensor_value_info(n, 1, [2]) for n in ("1", "4")]
    graph = onnx.helper.make_graph(nodes, "g", io[:1], io[1:])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    assert run(ir.from_proto(proto), EliminateIdentity(), {"1": X[0, :2]}).ops == ["Neg", "Exp"]


def test_operators_of_older_opsets(run):
    text = """<ir_version: 7, opset_import: ["" : 11]>
    g (float[2,3] x) => (float[2,3] y) {
        a = Neg(x) b = Dropout <ratio=0.5> (a)
        u = Unsqueeze <axes=[0]> (b) c = Squeeze <axes=[0]> (u) y = Exp(c) }"""
    assert run(text, EliminateIdentity()).counts == {"Dropout": 1}  # neither Squeeze nor Unsqueeze keeps its shape
