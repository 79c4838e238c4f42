from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.passes.canonical.fold_constants import FoldConstants

X = {"x": np.ones(3, np.float32)}


def fold(run, text, feeds=None, **options):
    return run(text, FoldConstants(**options), feeds)


def test_folds_a_chain_and_lifts_constants(run):
    text = """g (float[3] x) => (float[3] y) {
        one = Constant <value_float=1.0> () two = Add(one, one) four = Mul(two, two) y = Mul(x, four) }"""
    ran = fold(run, text, X)
    assert ran.ops == ["Mul"] and ran.counts == {"lifted": 1, "folded": 2}
    assert list(ran.graph.graph.initializers) == ["four"]


FOLDED = {
    "cast": "c = Cast <to=7> (f)",
    "reshape": "c = Reshape(m, sh)",
    "transpose": "c = Transpose(m)",
    "concat": "c = Concat <axis=0> (f, f)",
    "gather": "c = Gather <axis=1> (m, i)",
    "slice": "c = Slice(m, b, e, a, st)",
    "squeeze": "c = Squeeze(one)",
    "unsqueeze": "c = Unsqueeze(f, i)",
    "expand": "c = Expand(f, ex)",
    "where": "q = Greater(f, f) c = Where(q, f, f)",
    "neg": "c = Neg(f)",
    "div": "c = Div(f, f)",
    "erf": "c = Erf(f)",
    "constant-of-shape": "c = ConstantOfShape <value = int64[1] {7}> (sh)",
    "range": "c = Range(r0, r1, r2)",
    "reduce": "c = ReduceSum(m)",
    "softmax": "c = Softmax(m)",
    "shape": "c = Shape <start=1> (m)",
    "size": "c = Size(m)",
    "pow": "c = Pow(f, f)",
    "equal": "c = Equal(f, f)",
    "cumsum": "z = Sub(r0, r0) c = CumSum(f, z)",
}
CONSTANTS = """float[3] f = {1.5, -2, 3}, float[2,3] m = {1,2,3,4,5,6}, int64[2] sh = {3,2}, int64[2]
        ex = {2,3}, int64[1] i = {0},
    int64[1] b = {2}, int64[1] e = {-99}, int64[1] a = {1}, int64[1] st = {-1}, float[1] one = {5},
    int64 r0 = {2}, int64 r1 = {11}, int64 r2 = {3}"""


@pytest.mark.parametrize("body", FOLDED.values(), ids=FOLDED)
def test_folded_values_equal_the_operators(run, body):
    text = f"""g (float[3] x) => (float[3] y) <{CONSTANTS}> {{
        {body} k = Cast <to=1> (c) s = ReduceSum <keepdims=0> (k) y = Mul(x, s) }}"""
    ran = fold(run, text, X)
    assert ran.ops == ["Mul"]


def test_integer_division_truncates_as_runtimes_do(run):
    text = """g (int64[4] x) => (int64[4] y) <int64[4] a = {7,-7,7,-7}, int64[4] b = {2,2,-2,-2}> { q = Div(a,
        b) y = Add(x, q) }"""
    ran = run(text, FoldConstants())
    (q,) = ran.graph.graph.initializers.values()
    assert q.const_value.numpy().tolist() == [3, -3, -3, 3]


@pytest.mark.parametrize(
    "body, reason",
    [
        ("c = Add(big, big)", "integer overflow"),
        ("c = Mul(big, big)", "integer overflow"),
        ("c = Neg(low)", "integer overflow"),
        ("c = Div(low, minus)", "integer overflow"),
        ("c = Div(big, zero)", "division by zero"),
        ("c = Pow(big, two)", "integer overflow"),
        ("b2 = Concat <axis=0> (big, big) c = ReduceSum(b2)", "integer overflow"),
        ("c = Cast <to=6> (huge)", "out of the range"),
        ("c = Cast <to=6> (nan)", "out of the range"),
        ("w = Cast <to=7> (big) v = Mul(w, w) c = Cast <to=6> (v)", "out of the range"),
    ],
)
def test_refuses_what_overflows(run, body, reason):
    text = f"""g (int32[1] x) => (int32[1] y) <int32[1] big = {{2147483647}}, int32[1] low = {{-2147483648}},
        int32[1] two = {{2}},
        int32[1] minus = {{-1}}, int32[1] zero = {{0}}, float[1] huge = {{1e20}}, float[1] n0 = {{0}}> {{
        nan = Div(n0, n0) {body} y = Add(x, c) }}"""
    assert reason in fold(run, text).reasons


def test_unsigned_arithmetic_wraps(run):
    text = "g (uint8[1] x) => (uint8[1] y) <uint8[1] a = {200}> { b = Add(a, a) y = Max(x, b) }"
    ran = run(text, FoldConstants(), {"x": np.zeros(1, np.uint8)})
    assert ran.counts == {"folded": 1}
    assert next(iter(ran.graph.graph.initializers.values())).const_value.numpy().tolist() == [144]


@pytest.mark.parametrize("op", ["RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"])
def test_never_folds_drawing_nodes(run, op):
    text = f"""g (float[1,3] x) => (float[1,3] y) <float[1,3] p = {{0.5,0.5,0.5}}> {{ r = {op}(p)
        k = Cast <to=1> (r) y = Add(x, k) }}"""
    assert op in fold(run, text).ops


def test_never_folds_a_training_dropout(run):
    text = """g (float[3] x) => (float[3] y) <float[3] p = {1,1,1}, float r = {0.5}, bool t = {1}>
        { d = Dropout(p, r, t) y = Add(x, d) }"""
    assert fold(run, text).counts == {}


def test_never_folds_parameters(run, parse_model):
    text = "g (float[3] x, float[3] w) => (float[3] y) { a = Neg(w) y = Add(x, a) }"
    model = parse_model(text)
    w = model.graph.inputs[1]
    w.const_value = ir.tensor(np.zeros(3, np.float32), name="w")
    assert run(model, FoldConstants()).counts == {}
    model.graph.register_initializer(w)
    assert run(model, FoldConstants()).counts == {}


def test_never_folds_unknown_or_foreign_operators(run):
    text = """<ir_version: 9, opset_import: ["" : 18, "acme" : 1, "ortgraph" : 1]>
    g (float[3] x) => (float[3] y) <float[3] p = {1,1,1}> { a = acme.F(p) b = ortgraph.Gelu(p) c = Add(a, b)
        y = Add(x, c) }"""
    assert fold(run, text).counts == {}


@pytest.mark.parametrize(
    "body", ["big = ConstantOfShape(n)", "big = Expand(k, n)", "big = Tile(k1, n)", "big = Range(z, m, o)"]
)
def test_bounds_the_size_of_what_it_makes(run, body):
    text = f"""g (float x) => (float y) <int64[1] n = {{300000}}, float k = {{1}}, float[1] k1 = {{1}},
        float z = {{0}}, float m = {{300000}},
        float o = {{1}}> {{ {body} s = ReduceMax <keepdims=0> (big) y = Add(x, s) }}"""
    ran = fold(run, text)
    assert ran.counts == {} and "the limit is 1048576" in ran.reasons
    assert fold(run, text, max_bytes=4 << 20).counts


def test_refuses_results_of_unknown_size(run):
    text = """g (float x) => (float y) <float[3] c = {1,0,1}> { i = NonZero(c) k = Cast <to=1> (i)
        s = ReduceSum <keepdims=0> (k) y = Add(x, s) }"""
    assert "not known beforehand" in fold(run, text).reasons


def test_result_that_contradicts_the_record_is_refused(run, parse_model):
    model = parse_model("g (float[3] x) => (float[3] y) <float[3] c = {1,2,3}> { a = Neg(c) y = Add(x, a) }")
    model.graph[0].outputs[0].shape = ir.Shape([4])
    assert "recorded with shape (4,)" in run_without_checker(model)


def run_without_checker(model: ir.Model) -> str:
    return "\n".join(r.reason for r in FoldConstants()(model).refusals)


def test_a_folded_graph_output_is_identity_of_a_constant(run):
    ran = fold(run, "g (float[3] x) => (float[3] y, float[3] z) <float[3] c = {1,2,3}> { y = Neg(c) z = Neg(x) }", X)
    assert ran.ops == ["Identity", "Neg"] and ran.counts == {"folded": 1}


def test_a_constant_that_is_a_graph_output_stays(run):
    ran = fold(
        run, "g (float[3] x) => (float[1] k, float[3] y) { k = Constant <value_floats=[1.0]> () y = Add(x, k) }", X
    )
    assert ran.ops == ["Constant", "Add"] and ran.counts == {}


def test_constants_read_inside_a_branch(run):
    text = """g (float[2] x, bool c) => (float[2] y) <float[2] k = {1, 2}> {
        a = Neg(k)
        y = If (c) <then_branch = t () => (float[2] p) { p = Add(x, a) }, else_branch = e () => (float[2] q)
        { q = Sub(x, a) }>
    }"""
    ran = fold(run, text, {"x": np.ones(2, np.float32), "c": np.array(True)})
    assert ran.ops == ["If"] and ran.counts == {"folded": 1}


def test_one_used_output_of_several(run):
    text = "g (float[2] x) => (float[2] y) <float[4] c = {1,2,3,4}> { a, b = Split <num_outputs=2> (c) y = Add(x, b) }"
    ran = fold(run, text, {"x": np.ones(2, np.float32)})
    assert ran.ops == ["Add"] and list(ran.graph.graph.initializers) == ["b"]


@pytest.mark.parametrize("dtype", [10, 16])
def test_half_precision_constants(run, dtype):
    text = f"""g (float[3] x) => (float[3] y) <float[3] c = {{1.0009765625, 2, 1e30}}> {{
        h = Cast <to={dtype}> (c) k = Cast <to=1> (h) y = Add(x, k) }}"""
    assert fold(run, text).counts == {"folded": 2}


def test_axes_as_attribute_in_old_opsets(run):
    text = """<ir_version: 7, opset_import: ["" : 11]>
    g (float[1,3] x) => (float[1,3] y) <float[3] c = {1,2,3}> { u = Unsqueeze <axes=[0]> (c) y = Add(x, u) }"""
    assert fold(run, text).ops == ["Add"]


@pytest.mark.parametrize("allowzero, shape", [(0, "0,-1"), (1, "0,3")])
def test_reshape_with_zero(run, allowzero, shape):
    data, size = ("1,2,3,4,5,6", "2,3") if not allowzero else ("", "0,3")
    text = f"""g (float x) => (float y) <float[{size}] c = {{{data}}}, int64[2] s = {{{shape}}}> {{
        r = Reshape <allowzero={allowzero}> (c, s) t = ReduceSum <keepdims=0> (r) y = Add(x, t) }}"""
    assert "Reshape" not in fold(run, text, {"x": np.float32(1)}).ops


def test_sequences_and_strings_stay(run):
    text = """g (float[3] x) => (float[3] y) <float[3] c = {1,2,3}> { s = SequenceConstruct(c, c)
        i = Constant <value_int=0> ()
        e = SequenceAt(s, i) y = Add(x, e) }"""
    ran = fold(run, text)
    assert "SequenceConstruct" in ran.ops
