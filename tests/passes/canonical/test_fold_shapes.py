from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortgraph.passes.canonical.fold_shapes import FoldShapes, _broadcast_axes

X = {"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}
ONE = "i = Constant <value_ints=[2]> () "


def fold(run, text, feeds=X):
    return run(text, FoldShapes(), feeds)


def ops(ran):
    return [op for op in ran.ops if op != "Constant"]


def test_no_shape_is_left_of_static_dimensions(run):
    text = """g (float[2,3,4] x) => (float[6,4] y, float z) {
        i = Constant <value_ints=[0]> () j = Constant <value_ints=[1]> () k = Constant <value_ints=[2]> ()
        s = Shape(x) a = Gather(s, i) b = Gather(s, j) c = Gather(s, k) ab = Mul(a, b) t = Concat <axis=0> (ab, c)
        y = Reshape(x, t)
        n = Size(x) f = Cast <to=1> (n) z = ReduceSum <keepdims=0> (f) }"""
    ran = fold(run, text)
    assert not {"Shape", "Size", "Gather", "Concat"} & set(ran.ops)


def test_recorded_dimensions_count_even_behind_a_dynamic_producer(run, parse_model):
    model = parse_model("g (float[A] x, int64[1] k) => (int64[1] y) { a = Expand(x, k) s = Shape(a) y = Neg(s) }")
    model.graph[0].outputs[0].shape = ir.Shape([5])
    ran = run(model, FoldShapes())
    assert "Shape" not in ran.ops and ran.counts["folded"] == 1


def test_one_static_dimension_of_a_symbolic_shape(run):
    text = f"""g (float[B,S,4] x) => (int64[1] y, int64[3] z) {{ {ONE} s = Shape(x) a = Gather(s, i) y = Neg(a)
        z = Neg(s) }}"""
    ran = fold(run, text)
    assert ops(ran) == ["Shape", "Neg", "Neg"] and ran.counts == {"folded": 1, "removed": 1}


def test_symbolic_dimensions_stay_and_equal_ones_are_shared(run):
    text = """g (float[B,S,4] x, float[B,7] u) => (int64[1] y, int64[1] z) {
        a = Shape <start=0, end=1> (x) b = Shape <start=0, end=1> (u) y = Neg(a) z = Abs(b) }"""
    ran = fold(run, text, X | {"u": np.zeros((2, 7), np.float32)})
    assert ops(ran) == ["Shape", "Neg", "Abs"] and ran.counts == {"shared": 1, "removed": 1}


def test_unnamed_dimensions_are_not_shared(run, parse_model):
    model = parse_model("""g (float[A] x, float[C] u) => (int64[1] y, int64[1] z) {
        a = Shape(x) b = Shape(u) y = Neg(a) z = Abs(b) }""")
    for value in model.graph.inputs:
        value.shape = ir.Shape([None])
    assert run(model, FoldShapes(), {"x": np.zeros(2, np.float32), "u": np.zeros(3, np.float32)}).counts == {}


def test_other_dtypes_and_ranks_are_not_shared(run):
    text = """g (float[B] x) => (int64[1] y, int32[1] z, int64 w) {
        a = Shape(x) y = Neg(a) b = Cast <to=6> (a) z = Neg(b) c = Size(x) w = Neg(c) }"""
    assert "shared" not in fold(run, text, {"x": np.zeros(2, np.float32)}).counts


def reshape_model(parse_model, recorded):
    model = parse_model("g (float[B,S,4] x, int64[N] t) => (float[?] y) { y = Reshape(x, t) }", infer=False)
    model.graph[0].outputs[0].shape = ir.Shape(recorded)
    return model


@pytest.mark.parametrize(
    "recorded, given, target",
    [
        (["B*S", 4], [6, 4], [-1, 4]), (["B", "S", 2, 2], [2, 3, 2, 2], [0, 0, 2, 2]), (["B", "S*4"], [2, 12], [0, -1]),
        ([6, 4], [6, 4], [6, 4]), (["B", 3, 4], [2, 3, 4], [-1, 3, 4]),
    ],
)  # fmt: skip
def test_reshape_takes_its_recorded_shape(run, parse_model, recorded, given, target):
    ran = run(reshape_model(parse_model, recorded), FoldShapes(), X | {"t": np.array(given)})
    assert ran.counts["targets"] == 1
    assert ran.node("Reshape").inputs[1].const_value.numpy().tolist() == target


@pytest.mark.parametrize("recorded", [["S", "B", 4], [None, None], ["B", "S", 0]])
def test_reshape_that_no_constant_says_keeps_its_shape(parse_model, recorded):
    assert not FoldShapes()(reshape_model(parse_model, recorded)).modified


def test_reshape_from_computed_elements_when_its_result_is_not_recorded(run, parse_model):
    model = parse_model(f"""g (float[B,S,4] x) => (float[?,?,?,?] y) {{
        {ONE} o = Constant <value_ints=[0,1]> () two = Constant <value_ints=[2]> ()
        s = Shape(x) bs = Gather(s, o) c = Gather(s, i) h = Div(c, two) t = Concat <axis=0> (bs, two, h)
        y = Reshape(x, t) }}""")
    model.graph.outputs[0].shape = None
    FoldShapes()(model)
    reshape = next(n for n in model.graph if n.op_type == "Reshape")
    assert reshape.inputs[1].const_value.numpy().tolist() == [0, 0, 2, 2]
    assert not any(n.op_type == "Shape" for n in model.graph)


def test_allowzero_is_respected(run):
    text = "g (float[B,4] x) => (float[B,4] y) { s = Shape(x) y = Reshape <allowzero=1> (x, s) }"
    ran = fold(run, text, {"x": np.zeros((0, 4), np.float32)})
    assert "targets" not in ran.counts


def test_expand(run, parse_model):
    model = parse_model("g (float[B,1,4] x, int64[4] t) => (float[2,B,3,4] y) { y = Expand(x, t) }")
    model.graph[0].outputs[0].shape = ir.Shape([2, "B", 3, 4])
    ran = run(model, FoldShapes(), {"x": np.ones((5, 1, 4), np.float32), "t": np.array([2, 5, 3, 4])})
    assert ran.node("Expand").inputs[1].const_value.numpy().tolist() == [2, 1, 3, 4]


def test_expand_along_a_new_name_keeps_its_shape(parse_model):
    model = parse_model("g (float[1,4] x, int64[2] t) => (float[B,4] y) { y = Expand(x, t) }")
    assert not FoldShapes()(model).modified


def test_exporters_expand_idiom(run):
    text = """g (float[B,1,4] x) => (float[B,3,4] y) <int64[3] ones = {1,1,1}, int64[3] want = {-1,3,4},
        int64[3] minus = {-1,-1,-1}> {
        e = Equal(want, minus) t = Where(e, ones, want) y = Expand(x, t) }"""
    ran = fold(run, text, {"x": np.ones((2, 1, 4), np.float32)})
    assert ran.ops == ["Expand"]
    assert ran.node("Expand").inputs[1].const_value.numpy().tolist() == [1, 3, 4]


def test_slice_squeeze_and_arithmetic(run):
    text = """g (float[B,6,4] x) => (int64[2] y, int64 z) <int64[1] b = {1}, int64[1]
        e = {9223372036854775807}, int64[1] zero = {0},
        int64 two = {2}> { s = Shape(x) t = Slice(s, b, e) y = Neg(t) u = Shape <start=1, end=2> (x)
        v = Squeeze(u, zero)
        w = Div(v, two) p = ReduceProd <keepdims=0> (t) q = Add(w, p) z = Neg(q) }"""
    ran = fold(run, text, {"x": np.ones((2, 6, 4), np.float32)})
    assert ran.ops == ["Neg", "Neg"]


def test_shape_that_is_a_graph_output(run):
    ran = fold(run, "g (float[2,3,4] x) => (int64[3] y) { y = Shape(x) }")
    assert ran.ops == ["Identity"] and ran.counts == {"folded": 1}


def test_shape_read_only_inside_a_branch(run):
    text = """g (float[2,3,4] x, bool c) => (int64[3] y) { s = Shape(x)
        y = If (c) <then_branch = t () => (int64[3] p) { p = Neg(s) }, else_branch = e () => (int64[3] q)
        { q = Abs(s) }> }"""
    assert fold(run, text, X | {"c": np.array(False)}).ops == ["If"]


def test_overflow_of_shape_arithmetic_is_left_alone(run):
    text = (
        """g (float[2] x) => (int64[1] y) <int64[1] big = {3000000000}> { s = Shape(x) m = Mul(s, big) y = Neg(m) }"""
    )
    assert "Mul" in fold(run, text, None).ops


def test_data_is_not_shape_arithmetic(run):
    text = "g (int64[3] x) => (int64[3] y) { a = Add(x, x) y = Neg(a) }"
    assert fold(run, text, {"x": np.arange(3)}).counts == {}


BROADCAST = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
g (float[{a}] a, float[{b}] b) => (float[?] y, float[?] z) {{
    s = Shape(a) t = Shape(b) p, q = com.microsoft.BroadcastGradientArgs(s, t)
    y = com.microsoft.ReduceSumTraining <keepdims={keep}> (a, p)
        z = com.microsoft.ReduceSumTraining <keepdims={keep}> (b, q) }}"""


@pytest.mark.parametrize(
    "a, b, keep, axes",
    [
        ("2,3,4", "4", 1, ([], [1, 0])), ("2,3,4", "2,1,4", 1, ([], [1])), ("3,1", "2,1,5", 1, ([2, 0], [1])),
        ("2", "2", 0, ([], [])),
        ("B,3", "B,1", 0, ([], [1])), ("B,3", "1,3", 1, ([], [0])), ("B,3", "1,3", 0, None), ("B", "C", 1, None),
    ],
)  # fmt: skip
def test_broadcast_gradient_axes(run, a, b, keep, axes):
    ran = run(BROADCAST.format(a=a, b=b, keep=keep), FoldShapes())
    if axes is None:
        assert "broadcasts" not in ran.counts
        return
    assert ran.ops == ["ReduceSumTraining"] * 2
    assert tuple(n.inputs[1].const_value.numpy().tolist() for n in ran.graph.graph) == axes


@pytest.mark.parametrize(
    "a, b", [((2, 3, 4), (4,)), ((2, 3, 4), (2, 1, 4)), ((3, 1), (2, 1, 5)), ((1, 1), (1, 1)), ((), (2, 2))]
)
def test_broadcast_gradient_axes_equal_onnx_runtimes(a, b):
    onnxruntime = pytest.importorskip("onnxruntime")
    node = onnx.helper.make_node("BroadcastGradientArgs", ["s", "t"], ["p", "q"], domain="com.microsoft")
    io = [onnx.helper.make_tensor_value_info(n, 7, ["N" + n]) for n in "stpq"]
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", io[:2], io[2:]), opset_imports=opsets, ir_version=9
    )
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString())
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail:
        pytest.skip("this onnxruntime has no training operators")
    p, q = session.run(None, {"s": np.array(a, np.int64), "t": np.array(b, np.int64)})
    (mine, other), exact = _broadcast_axes(a, b)
    assert (sorted(mine), sorted(other)) == (sorted(p.tolist()), sorted(q.tolist())) and exact
