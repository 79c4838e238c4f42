"""The classes of models that broke other tools: each differentiates rightly, or is refused by one clear error."""

# ruff: noqa: E501 - a model is one line of text

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import ortgraph
from ortgraph.capture.differentiate import differentiate
from ortgraph.capture.from_onnx import from_onnx
from ortgraph.capture.legalize_versions import convert_opset
from ortgraph.errors import CaptureError, InputError, UnsupportedError
from ortgraph.graph import load

W = np.linspace(-1.0, 1.0, 12).reshape(4, 3).astype(np.float32)
HEAD = "g (float[5,4] x, float[4,3] w"
TAIL = " f = Sin(y) loss = ReduceMean<keepdims=0>(f) }"
BATCH = {"x": np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)}


@pytest.mark.parametrize("scale", ["scale", "scale, bias"])
def test_1_one_output_layer_norm_and_mask_less_dropout(scale, onnx_tools):
    text = (
        HEAD
        + f", float[3] scale, float[3] bias) => (float loss) {{ h = MatMul(x, w) n = LayerNormalization({scale}) y = Dropout(n)".replace(
            "(scale", "(h, scale"
        )
        + TAIL
    )
    values = {"w": W, "scale": np.array([1.0, -2.0, 0.5], np.float32), "bias": np.zeros(3, np.float32)}
    names = ["w", *scale.split(", ")]
    graph = onnx_tools.check_model(
        onnx_tools.make_model(text, opset=17, **values), BATCH, trainable=names, tolerance=5e-5
    )
    assert graph.graph.opset_imports[""] == 18


def test_2_integers_among_the_initializers_are_frozen_by_themselves(onnx_tools):
    text = (
        HEAD
        + ", int64[2] shape, int64[1] axes) => (float loss) { h = MatMul(x, w) r = Reshape(h, shape) y = Unsqueeze(r, axes)"
        + TAIL
    )
    values = {"w": W, "shape": np.array([3, -1]), "axes": np.array([0])}
    for trainable in (None, ["*"], ["w", "shape", "axes"]):
        graph = onnx_tools.check_model(onnx_tools.make_model(text, **values), BATCH, trainable=trainable)
        assert [p.name for p in graph.signature.parameters] == ["w"]


def test_3_a_trainable_name_that_nothing_reads_warns(onnx_tools):
    text = (
        HEAD + ", float[7] spare, float[4,3] dead) => (float loss) { y = MatMul(x, w) unused = Mul(dead, dead)" + TAIL
    )
    model = onnx_tools.make_model(text, w=W, spare=np.ones(7, np.float32), dead=W)
    with pytest.warns(UserWarning, match="spare"):
        graph = from_onnx(model, "loss", ["w", "spare"])
    assert [p.name for p in graph.signature.trainable] == ["w"]
    with pytest.warns(UserWarning, match="dead"):
        graph = from_onnx(model, "loss", ["w", "dead"])
    assert [p.name for p in graph.signature.trainable] == ["w"]
    with pytest.raises(InputError, match="spair.*names no weight") as error:
        from_onnx(model, "loss", ["w", "spair"])
    assert "close" in error.value.hint


def test_4_running_statistics_are_buffers_even_when_listed(onnx_tools):
    values = {
        "s": np.ones(3, np.float32),
        "b": np.zeros(3, np.float32),
        "mean": np.ones(3, np.float32),
        "var": np.ones(3, np.float32),
    }
    text = (
        HEAD
        + "".join(f", float[3] {k}" for k in values)
        + ") => (float loss) { h = MatMul(x, w) y = BatchNormalization(h, s, b, mean, var)"
        + TAIL
    )
    model = onnx_tools.make_model(text, w=W, **values)
    for trainable in (None, ["w", "s", "b", "mean", "var"], ["*"]):
        signature = from_onnx(model, "loss", trainable).signature
        assert [p.name for p in signature.parameters] == ["w", "s", "b"]
        assert [(b.name, b.update is not None) for b in signature.buffers] == [("mean", True), ("var", True)]


def test_7_outputs_keep_their_names_and_values(onnx_tools):
    text = HEAD + ") => (float[5,3] output, float[5,4] hidden) { hidden = Sin(x) output = MatMul(hidden, w) }"
    graph = from_onnx(onnx_tools.make_model(text, w=W), "cross_entropy", output="output")
    assert graph.signature.outputs == ("output", "hidden")
    outputs = onnx_tools.run_graph(graph, {**BATCH, "labels": np.array([0, 1, 2, 1, 0])})
    np.testing.assert_allclose(outputs["output"], np.sin(BATCH["x"]) @ W, rtol=1e-5)
    with pytest.raises(CaptureError, match="output="):
        from_onnx(onnx_tools.make_model(text, w=W), "cross_entropy")
    with pytest.raises(InputError, match=r"(?s)PyTorch CrossEntropyLoss.*one of cross_entropy"):
        from_onnx(onnx_tools.make_model(text, w=W), torch.nn.CrossEntropyLoss())


def test_8_inference_operators_without_expansion_are_refused_by_name(onnx_tools):
    text = (
        "g (float[1,5,4] x, float[4,12] w, float[12] b) => (float loss) { [attend] y = com.microsoft.Attention<num_heads=2>(x, w, b)"
        + TAIL
    )
    model = onnx_tools.make_model(text, w=np.ones((4, 12), np.float32), b=np.zeros(12, np.float32))
    with pytest.raises(UnsupportedError, match="'attend'.*com.microsoft.Attention"):
        from_onnx(model, "loss")


@pytest.mark.parametrize("text", ["[bad] y = Det(q)", "[bad] y = com.example.Magic(h)"])
def test_9_an_operator_without_gradient_is_refused_before_the_builder_sees_it(text, onnx_tools, monkeypatch):
    joint = sys.modules["ortgraph.capture.onnx_joint"]
    monkeypatch.setattr(joint, "differentiate", lambda *a: pytest.fail("the builder was called"))
    model = onnx_tools.make_model(
        HEAD + ") => (float loss) { h = MatMul(x, w) t = Transpose(w) q = MatMul(t, w) " + text + TAIL, w=W
    )
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    with pytest.raises(UnsupportedError, match="'bad'.*has no gradient"):
        from_onnx(model, "loss")


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 12, 13, 15, 17, 19, 20, 21])
def test_10_any_opset_gives_the_same_gradients(opset, onnx_tools):
    axes = "ReduceMean(y)" if opset >= 18 else "ReduceMean<axes=[0,1]>(y)"
    text = (
        HEAD
        + f") => (float loss) {{ h = MatMul(x, w) s = Softmax<axis=1>(h) y = Mul(s, h) m = {axes} loss = Identity(m) }}"
    )
    model = onnx_tools.make_model(text, opset=opset, ir_version=3 if opset == 7 else 8, w=W)
    if opset == 7:  # IR 3 lists initializers among the inputs too
        model.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [4, 3]))
    outputs = onnx_tools.run_graph(from_onnx(model, "loss"), BATCH, 2)
    w, x = torch.tensor(W, dtype=torch.float64, requires_grad=True), torch.tensor(BATCH["x"], dtype=torch.float64)
    (torch.softmax(x @ w, 1) * (x @ w)).mean().backward()
    onnx_tools.assert_close(outputs["w.grad"], w.grad.numpy(), "w")


def test_11_functions_are_inlined_and_parameters_keep_their_names():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18, "local" : 1]>
        g (float[5,4] x) => (float loss) <float[4,3] block_weight = {1,2,3,4,5,6,7,8,9,10,11,12}>
        { y = local.outer(x, block_weight) loss = ReduceMean<keepdims=0>(y) }
        <domain: "local", opset_import: ["" : 18, "local" : 1]> inner (a) => (b) { t = Sin(a) b = Mul(t, t) }
        <domain: "local", opset_import: ["" : 18, "local" : 1]> outer (a, w) => (b) { t = MatMul(a, w) b = local.inner(t) }
    """)
    graph = from_onnx(model, "loss")
    assert [p.name for p in graph.signature.trainable] == ["block_weight"]
    assert not graph.model.functions


def _branches(condition: str, cond_text: str) -> str:
    return (
        HEAD
        + f""") => (float loss) {{ {cond_text} h = MatMul(x, w)
        [choose] y = If ({condition}) <then_branch = a () => (float[5,3] p) {{ p = Sin(h) }},
                                       else_branch = b () => (float[5,3] q) {{ q = Cos(h) }}>"""
        + TAIL
    )


CONSTANT = {
    "constant": "c = Constant<value=bool {0}>()",
    "not": "d = Constant<value=bool {1}>() c = Not(d)",
    "shape": "s = Shape(x) four = Constant<value_ints=[5,4]>() e = Equal(s, four) i = Cast<to=6>(e) z = ReduceMin<keepdims=0>(i) t = Cast<to=9>(z) c = Not(t)",
}


@pytest.mark.parametrize("name", CONSTANT)
def test_12_a_constant_if_is_inlined(name, onnx_tools):
    graph = from_onnx(onnx_tools.make_model(_branches("c", CONSTANT[name]), w=W), "loss")
    assert not [n for n in graph.graph if n.op_type == "If"]
    w, x = torch.tensor(W, dtype=torch.float64, requires_grad=True), torch.tensor(BATCH["x"], dtype=torch.float64)
    torch.sin(torch.cos(x @ w)).mean().backward()
    onnx_tools.assert_close(onnx_tools.run_graph(graph, BATCH)["w.grad"], w.grad.numpy(), "w")


def test_12_dynamic_control_flow_is_refused_and_the_process_lives(onnx_tools):
    text = "m = ReduceSum<keepdims=0>(x) zero = Constant<value=float {0.0}>() c = Greater(m, zero)"
    with pytest.raises(UnsupportedError, match="'choose'.*If"):
        from_onnx(onnx_tools.make_model(_branches("c", text), w=W), "loss")
    text = (
        HEAD
        + """) => (float loss) { h = MatMul(x, w) n = Constant<value=int64 {3}>() go = Constant<value=bool {1}>()
        [again] y = Loop (n, go, h) <body = b (int64 i, bool c, float[5,3] v) => (bool c2, float[5,3] v2) { c2 = Identity(c) v2 = Sin(v) }>"""
        + TAIL
    )
    with pytest.raises(UnsupportedError, match="'again'.*Loop"):
        from_onnx(onnx_tools.make_model(text, w=W), "loss")


def test_12_control_flow_off_the_data_path_stays(onnx_tools):
    text = (
        HEAD
        + """) => (float loss) { m = ReduceSum<keepdims=0>(x) zero = Constant<value=float {0.0}>() c = Greater(m, zero)
        k = If (c) <then_branch = a () => (float[5,4] p) { p = Sin(x) }, else_branch = b () => (float[5,4] q) { q = Cos(x) }>
        y = MatMul(k, w)"""
        + TAIL
    )
    graph = from_onnx(onnx_tools.make_model(text, w=W), "loss")
    w, x = torch.tensor(W, dtype=torch.float64, requires_grad=True), torch.tensor(BATCH["x"], dtype=torch.float64)
    torch.sin((torch.sin(x) if x.sum() > 0 else torch.cos(x)) @ w).mean().backward()
    onnx_tools.assert_close(onnx_tools.run_graph(graph, BATCH)["w.grad"], w.grad.numpy(), "w")


def test_12_a_builder_that_dies_gives_one_error_naming_the_node(onnx_tools):
    model = onnx_tools.make_model(
        _branches("c", "m = ReduceSum<keepdims=0>(x) zero = Constant<value=float {0.0}>() c = Greater(m, zero)"), w=W
    )
    with pytest.raises(UnsupportedError, match="gradient builder cannot differentiate"):
        differentiate(onnx.shape_inference.infer_shapes(model), "loss", ["w"])


def test_14_saved_graphs_run_the_same_in_a_fresh_process(tmp_path, onnx_tools):
    text = HEAD + ") => (float loss) { h = MatMul(x, w) y = Elu(h)" + TAIL
    want = {}
    for opset in (13, 20, 21):
        graph = from_onnx(onnx_tools.make_model(text, opset=opset, w=W), "loss")
        want[opset] = onnx_tools.run_graph(graph, BATCH)
        path = graph.save(tmp_path / f"train{opset}.onnx")
        np.savez(tmp_path / f"train{opset}.npz", **BATCH, **load(path).values, loss_gradient=np.float32(1))
    code = (
        "import sys, numpy as np, onnxruntime as o\n"
        "for path in sys.argv[1:]:\n"
        "    f = dict(np.load(path + '.npz')); s = o.InferenceSession(path + '.onnx')\n"
        "    names = [v.name for v in s.get_outputs()]\n"
        "    np.savez(path + '.out.npz', **dict(zip(names, s.run(None, f))))"
    )
    stems = [str(tmp_path / f"train{opset}") for opset in want]
    subprocess.run([sys.executable, "-c", code, *stems], check=True, capture_output=True)
    for opset, outputs in want.items():
        got = dict(np.load(tmp_path / f"train{opset}.out.npz"))
        assert got.keys() == outputs.keys()
        for name, value in outputs.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("opset", [22, 23, 25])
def test_15_newer_graphs_are_converted_down(opset, onnx_tools):
    middle = "y = Swish(h)" if opset >= 24 else "y = RMSNormalization(h, s)" if opset == 23 else "y = Mul(h, s)"
    text = HEAD + f", float[3] s) => (float loss) {{ h = MatMul(x, w) {middle}" + TAIL
    model = onnx_tools.make_model(text, opset=opset, ir_version=12, w=W, s=np.array([1.0, 2.0, 3.0], np.float32))
    graph = from_onnx(model, "loss", ["w"])
    assert graph.graph.opset_imports[""] == 21 and graph.model.ir_version <= 10
    w, x = torch.tensor(W, dtype=torch.float64, requires_grad=True), torch.tensor(BATCH["x"], dtype=torch.float64)
    h, s = x @ w, torch.tensor([1.0, 2.0, 3.0])
    y = torch.nn.functional.silu(h) if opset >= 24 else h * s
    y = h / torch.sqrt((h * h).mean(-1, True) + 1e-5) * s if opset == 23 else y
    torch.sin(y).mean().backward()
    onnx_tools.assert_close(onnx_tools.run_graph(graph, BATCH)["w.grad"], w.grad.numpy(), "w", 5e-5)


def test_15_what_cannot_be_converted_is_named(onnx_tools):
    text = (
        HEAD
        + ") => (float loss) { h = MatMul(x, w) ax = Constant<value=int64 {1}>() [newest] y = CumProd(h, ax)"
        + TAIL
    )
    with pytest.raises(UnsupportedError, match="'newest'.*CumProd.*newest supported opset is 21"):
        from_onnx(onnx_tools.make_model(text, opset=26, ir_version=12, w=W), "loss")
    model = onnx_tools.make_model(HEAD + ") => (float loss) { y = MatMul(x, w)" + TAIL, w=W)
    model.opset_import[0].version = 99
    with pytest.raises((UnsupportedError, InputError)):
        from_onnx(model, "loss")


def test_a_type_that_older_opsets_do_not_know_names_the_operator(tmp_path):
    """bfloat16 Sin exists from opset 22 on, which no runtime here takes."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 22]> g (bfloat16[4] x) => (float loss)'
        " { s = Sin(x) c = Cast<to=1>(s) loss = ReduceSum<keepdims=0>(c) }"
    )
    onnx.save(model, tmp_path / "low.onnx")
    with pytest.raises(UnsupportedError, match="operator Sin of opset 22 cannot be converted to opset 21"):
        from_onnx(tmp_path / "low.onnx", loss="loss", trainable=[])


def test_an_operator_that_is_older_than_its_definition_is_to_be_exported_anew():
    """ONNX Runtime fuses LayerNormalization into models of opsets that have none, and writes them into artifacts."""
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 15]>
        g (float[2,3] x, float[3] s) => (float[2,3] y) { y = LayerNormalization(x, s) }"""
    )
    with pytest.raises(UnsupportedError, match="LayerNormalization of opset 15(.|\n)*opset_version=18 to 21"):
        convert_opset(model, None)


@pytest.mark.parametrize("opset", [9, 13])
def test_old_batch_norms_name_outputs_that_only_mark_training(opset, onnx_tools):
    body = "y{0} = BatchNormalization(t, a, b, mean, var) loss = ReduceMean<keepdims=0>(y) }}"
    text = "g (float[3,2] x, float[2] p, float[2] a, float[2] b, float[2] mean, float[2] var) => (float loss) { t = Mul(x, p) "
    weights = {n: np.array([0.5, 1.5], np.float32) for n in ("p", "a", "b", "mean", "var")}
    batch = {"x": np.arange(6, dtype=np.float32).reshape(3, 2)}
    graphs = []
    for version, outputs in ((opset, ", m, v, saved, spread"), (17, "")):
        model = onnx_tools.make_model(text + body.format(outputs), opset=version, **weights)
        graphs.append(from_onnx(model, loss="loss"))
    assert graphs[0].signature == graphs[1].signature
    got, want = (onnx_tools.run_graph(g, batch) for g in graphs)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
    read = text.replace("float loss", "float loss, float[2] m") + body.format(", m, v, saved, spread")
    with pytest.raises(UnsupportedError, match="statistics of BatchNormalization"):
        from_onnx(onnx_tools.make_model(read, opset=opset, **weights), loss="loss")


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("left", [True, False])
def test_33_a_reciprocal_times_what_went_through_an_inference_dropout(level, threads, left, onnx_tools):
    pair = "r, d" if left else "d, r"
    text = (
        HEAD
        + ", float[3] s) => (float loss) { h = MatMul(x, w) d, mask = Dropout(h) e = Exp(s) r = Reciprocal(e)"
        + f" y = Mul({pair})"
        + TAIL
    )
    model = onnx_tools.make_model(text, w=W, s=np.array([0.1, -0.2, 0.3], np.float32))
    graph = ortgraph.optimize(from_onnx(model, "loss"), level, verify="types").graph
    got = ortgraph.TrainingSession(graph, threads=threads).gradients(BATCH)
    w, x = torch.tensor(W, dtype=torch.float64, requires_grad=True), torch.tensor(BATCH["x"], dtype=torch.float64)
    s = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64, requires_grad=True)
    torch.sin((1 / s.exp()) * (x @ w)).mean().backward()
    for name, want in (("w", w.grad), ("s", s.grad)):
        onnx_tools.assert_close(got[name], want.numpy(), name)
