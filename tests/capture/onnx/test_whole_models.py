"""Names, weights and sums of captured models: what has to hold for any of them."""

# ruff: noqa: E501 - a model is one line of text

from __future__ import annotations

import sys
import warnings

import numpy as np
import onnx
import pytest
import torch

from ortgraph.capture.from_onnx import from_onnx
from ortgraph.errors import CaptureError, InputError, UnsupportedError
from ortgraph.graph import load

W = np.linspace(-1.0, 1.0, 12).reshape(4, 3).astype(np.float32)
HEAD = "g (float[5,4] x, float[4,3] w"
TAIL = " f = Sin(y) loss = ReduceMean<keepdims=0>(f) }"
BATCH = {"x": np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)}


def test_names_that_collide_with_the_builders_own(onnx_tools):
    """Values called v3, x_grad, loss_grad or 1 in the model, and a parameter whose gradient name is taken."""
    text = 'g (float[5,4] x, float[4,3] v3, float[4,3] "1") => (float loss, float[4,3] "v3.grad") { "v3.grad" = Mul(v3, "1") loss_grad = MatMul(x, "v3.grad") y = Sin(loss_grad) v3_grad = Mul(y, y) v0 = Neg(v3_grad) loss = ReduceMean<keepdims=0>(v0) }'
    model = onnx_tools.make_model(text, v3=W, **{"1": W + 0.5})
    graph = from_onnx(model, "loss")
    gradients = graph.signature.gradients
    assert gradients["v3"] != "v3.grad" and len({v.name for v in graph.graph.outputs}) == len(graph.graph.outputs)
    outputs = onnx_tools.run_graph(graph, BATCH)
    _, want = onnx_tools.central_differences(model, "loss", BATCH, ["v3", "1"])
    for name in ("v3", "1"):
        onnx_tools.assert_close(outputs[gradients[name]], want[name], name)


def test_the_callers_model_is_never_changed(onnx_tools):
    model = onnx_tools.make_model(HEAD + ") => (float loss) { h = MatMul(x, w) y = Mul(h, h)" + TAIL, w=W)
    before = model.SerializeToString()
    from_onnx(model, "loss")
    assert model.SerializeToString() == before


def test_one_weight_read_twice_by_one_node(onnx_tools):
    onnx_tools.check_model(onnx_tools.make_model("g (float[4,3] w) => (float loss) { y = Mul(w, w)" + TAIL, w=W), {})


def test_two_captures_give_the_same_text(onnx_tools):
    text = (
        HEAD
        + ", float[4,3] u) => (float loss) { a = MatMul(x, w) b = MatMul(x, u) c = Mul(a, b) d = Add(a, c) e = Mul(d, b) y = Add(e, a)"
        + TAIL
    )
    model = onnx_tools.make_model(text, w=W, u=W + 1)
    assert from_onnx(model, "loss").text() == from_onnx(model, "loss").text()


def test_a_repeated_embedding_row_sums_the_same_way_every_run(onnx_tools):
    text = "g (int64[N] i, float[5,8] table) => (float loss) { e = Gather(table, i) y = Mul(e, e)" + TAIL
    table = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    graph = from_onnx(onnx_tools.make_model(text, table=table), "loss")
    assert [n.op_type for n in graph.graph if n.op_type in ("GatherGrad", "EmbeddingGrad")] == ["EmbeddingGrad"]
    index = np.random.default_rng(1).integers(-5, 5, 4000)
    runs = [onnx_tools.run_graph(graph, {"i": index}, 2)["table.grad"] for _ in range(5)]
    assert all(np.array_equal(runs[0], run) for run in runs)
    t = torch.tensor(table, dtype=torch.float64, requires_grad=True)
    torch.sin(t[torch.tensor(index)] ** 2).mean().backward()
    onnx_tools.assert_close(runs[0], t.grad.numpy(), "table")


def test_a_gradient_that_would_miss_a_term_is_refused(onnx_tools):
    text = HEAD + ") => (float loss) { h = MatMul(x, w) a = Abs(h) [power] y = Pow(a, h)" + TAIL
    with pytest.raises(UnsupportedError, match="'power'.*input 1 of Pow"):
        from_onnx(onnx_tools.make_model(text, w=W), "loss")


def test_scalars_train_only_when_named(onnx_tools):
    text = HEAD + ", float t) => (float loss) { h = MatMul(x, w) y = Mul(h, t)" + TAIL
    model = onnx_tools.make_model(text, w=W, t=np.float32(1.5))
    assert [p.name for p in from_onnx(model, "loss").signature.parameters] == ["w"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = onnx_tools.check_model(model, BATCH, trainable=["w", "t"])
    assert [p.name for p in graph.signature.parameters] == ["w", "t"]


def test_folded_masks_and_scales_train_only_when_named(onnx_tools):
    """PyTorch's exporter folds the causal mask and the scale of attention scores into initializers."""
    text = HEAD + (
        ", float[5,3] mask, float[1] scale, float[1] shift, float[5,3] place) => (float loss)"
        " { h = MatMul(x, w) s = Mul(h, scale) p = Add(s, place) b = Add(p, shift) m = Add(b, mask) y = Softmax(m)"
        + TAIL
    )
    place = np.full((5, 3), 0.25, np.float32)
    mask = np.where(np.tri(5, 3, dtype=bool), 0, np.finfo(np.float32).min).astype(np.float32)
    values = {"w": W, "mask": mask, "scale": np.float32([0.5]), "shift": np.float32([0.1]), "place": place}
    model = onnx_tools.make_model(text, **values)
    graph = from_onnx(model, "loss")
    assert [p.name for p in graph.signature.parameters] == ["w", "shift", "place"]
    np.testing.assert_array_equal(graph.graph.initializers["mask"].const_value.numpy(), mask)
    named = from_onnx(model, "loss", ["w", "scale"]).signature.parameters
    assert [p.name for p in named if p.trainable] == ["w", "scale"]
    with pytest.warns(UserWarning, match="mask is a number, a mask"):
        from_onnx(model, "loss", ["w", "ma*"])


def test_merged_scales_are_noticed(onnx_tools):
    """PyTorch's exporter stores the ones of two norms once; training then ties them."""
    text = HEAD + (
        ", float[3] one, float[3] other) => (float loss) { h = MatMul(x, w) a = LayerNormalization(h, one)"
        " b = Sin(a) y = LayerNormalization(b, %s)" + TAIL
    )
    values = {"w": W, "one": np.ones(3, np.float32), "other": np.ones(3, np.float32)}
    with pytest.warns(UserWarning, match=r"^one: each is read .* optimize=False"):
        from_onnx(onnx_tools.make_model(text % "one", **values), "loss", ["w", "one"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_onnx(onnx_tools.make_model(text % "other", **values), "loss")


def test_weights_in_a_file_beside_the_model(onnx_tools, tmp_path, monkeypatch):
    """PyTorch's exporter writes weights to ``<name>.onnx.data``; the model may lie in any folder."""
    text = HEAD + ", float[1,3] a) => (float loss) { h = MatMul(x, w) y = Mul(h, a)" + TAIL
    model = onnx_tools.make_model(text, w=W, a=np.float32([[1, 2, 3]]))
    want = onnx_tools.run_graph(from_onnx(model, "loss", ["w"]), BATCH)["w.grad"]
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "forward.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="forward.onnx.data", size_threshold=0)
    monkeypatch.chdir(tmp_path)
    graph = from_onnx("models/forward.onnx", "loss", ["w"])
    np.testing.assert_array_equal(graph.values["w"], W)
    graph.save("train.onnx")
    (path.parent / "forward.onnx.data").unlink()
    np.testing.assert_array_equal(onnx_tools.run_graph(load("train.onnx"), BATCH)["w.grad"], want)
    with pytest.raises(InputError, match="forward.onnx: its weights cannot be read"):
        from_onnx(path, "loss")


@pytest.mark.parametrize(
    ("source", "message"),
    [("absent.onnx", "no such file"), (b"not a model", "not a readable ONNX model"), (3, "takes a path")],
)
def test_unreadable_sources(source, message):
    with pytest.raises(InputError, match=message):
        from_onnx(source)


def test_a_double_model_with_a_loss_of_one_element(onnx_tools):
    text = "g (double[5,4] x, double[4,3] w) => (double[1,1] loss) { h = MatMul(x, w) y = Mul(h, h) loss = ReduceMean<keepdims=1>(y) }"
    graph = from_onnx(onnx_tools.make_model(text, w=W.astype(np.float64)), "loss")
    x = BATCH["x"].astype(np.float64)
    outputs = onnx_tools.run_graph(graph, {"x": x}, seed=0.5)
    weight = torch.tensor(W, dtype=torch.float64, requires_grad=True)
    (0.5 * ((torch.tensor(x) @ weight) ** 2).mean()).backward()
    np.testing.assert_allclose(
        outputs["w.grad"], weight.grad.numpy(), rtol=1e-6
    )  # the runtime's Scale divides in float32


@pytest.mark.parametrize("shape", [(6,), (6, 2, 3)])
def test_gathered_rows_of_any_rank_sum_repeated_indices(shape, onnx_tools):
    text = (
        f"g (float[{','.join(map(str, shape))}] t) => (float loss) {{ i = Constant<value=int64[2,3] {{0,5,5,-1,2,0}}>() y = Gather(t, i)"
        + TAIL
    )
    table = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    graph = onnx_tools.check_model(onnx_tools.make_model(text, t=table), {})
    assert "GatherGrad" not in {n.op_type for n in graph.graph}


def test_shapes_follow_named_dimensions_through_shape_arithmetic(onnx_tools):
    text = """g (float[batch,length,4] x, float[4,3] w) => (float[batch,c] output) {
        s = Shape<start=0,end=1>(x) m = Constant<value_ints=[-1]>() t = Concat<axis=0>(s, m) h = MatMul(x, w)
        f = Reshape(h, t) output = Sin(f) }"""
    graph = from_onnx(onnx_tools.make_model(text, w=W), "mse")
    shapes = {v.name: [str(d) for d in v.shape] for n in graph.graph for v in n.outputs}
    assert shapes["f"] == ["batch", "3*length"]
    assert [str(d) for d in next(v for v in graph.graph.inputs if v.name == "targets").shape] == ["batch", "3*length"]
    batch = {"x": np.ones((2, 5, 4), np.float32), "targets": np.zeros((2, 15), np.float32)}
    assert onnx_tools.run_graph(graph, batch)["w.grad"].shape == (4, 3)


def test_an_exported_transformer(onnx_tools, tmp_path):
    """torch.onnx.export with a named batch: every gradient by the design's measure, at 1 and 2 threads."""
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(30, 16)
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = torch.nn.Linear(16, 5)

        def forward(self, ids):
            return self.head(self.encoder(self.embed(ids)).mean(1))

    module, ids, labels = Net(), torch.randint(0, 30, (3, 7)), torch.randint(0, 5, (3,))
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, (ids,), dynamo=True, opset_version=18, dynamic_shapes={"ids": batch}, optimize=False, verbose=False
        )
    program.save(tmp_path / "model.onnx")
    graph = from_onnx(tmp_path / "model.onnx", "cross_entropy")
    assert not [
        v.name
        for n in graph.graph
        for v in n.outputs
        if v.shape is None or None in [getattr(d, "value", d) for d in v.shape]
    ]
    double = Net().double()
    double.load_state_dict(module.state_dict())
    for network in (module, double):
        torch.nn.functional.cross_entropy(network(ids), labels).backward()
    trained = {p.name for p in graph.signature.trainable}
    assert trained == {name for name, _ in module.named_parameters()}
    exact = {k: p.grad.numpy() for k, p in double.named_parameters()}
    norm, feeds = np.linalg.norm, {"ids": ids.numpy(), "labels": labels.numpy()}
    for threads in (1, 2):
        outputs = onnx_tools.run_graph(graph, feeds, threads)
        for name, parameter in module.named_parameters():
            error = norm(outputs[f"{name}.grad"] - exact[name])
            assert error <= 4 * norm(parameter.grad.numpy() - exact[name]) + 1e-6 * norm(exact[name]) + 1e-9, name


@pytest.mark.parametrize("wrong", ["shape", "rank", "dtype"])
def test_a_gradient_of_another_shape_is_refused_by_the_parameters_name(wrong, onnx_tools, monkeypatch):
    """Whatever the builder or a rule makes, no gradient of a wrong shape gets out."""
    module = sys.modules["ortgraph.capture.from_onnx"]
    honest = module.append_backward

    def append(model, loss, parameters, names, cut=()):
        joint = honest(model, loss, parameters, names, cut)
        build = module.Builder(model.graph, "test", names=names)
        gradient = joint.gradients["w"]
        made = {
            "shape": lambda: build.op("Transpose", gradient, perm=[1, 0]),
            "rank": lambda: build.op("Unsqueeze", gradient, build.ints([0])),
            "dtype": lambda: build.op("Cast", gradient, to=onnx.TensorProto.DOUBLE),
        }[wrong]()
        joint.gradients["w"] = made
        return joint

    monkeypatch.setattr(module, "append_backward", append)
    with pytest.raises(CaptureError, match="gradient of parameter 'w' is"):
        from_onnx(onnx_tools.make_model(HEAD + ") => (float loss) { y = MatMul(x, w)" + TAIL, w=W), "loss")


def test_an_output_without_shape_and_nodes_of_one_name(onnx_tools):
    text = "g (float[n,4] x, float[4,3] w, float[n,4] z) => (float y, float[n,4] d) { a = Add(x, z) y = MatMul(a, w) d = Sub(x, z) }"
    model = onnx_tools.make_model(text, w=np.linspace(-1.0, 1.0, 12).reshape(4, 3).astype(np.float32))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for node in model.graph.node:
        node.name = "same"
    graph = from_onnx(model, loss="mse", output="y")
    assert [str(d) for d in graph.graph.outputs[0].shape] == ["n", "3"]
    batch = {k: np.random.default_rng(i).standard_normal((5, 4)).astype(np.float32) for i, k in enumerate("xz")}
    got = onnx_tools.run_graph(graph, {**batch, "targets": np.zeros((5, 3), np.float32)})["w.grad"]
    rows = batch["x"] + batch["z"]
    onnx_tools.assert_close(got, rows.T @ (rows @ graph.values["w"]) * 2 / 15, "w")


def test_a_name_that_is_made_twice_is_told(onnx_tools):
    model = onnx_tools.make_model("g (float[4] x) => (float[4] y) { y = Sin(x) y = Cos(x) }")
    with pytest.raises(InputError, match="y"):
        from_onnx(model, loss="mse")


def test_a_classifier_of_scikit_learn(onnx_tools):
    """Its label is looked up by an operator of another domain, beside the probabilities that are trained."""
    text = (
        "g (float[n,4] x, float[4,3] w) => (int64[n] label, float[n,3] p) { c = Constant<value=int64[3] {7,8,9}>() "
        "y = MatMul(x, w) p = Softmax<axis=1>(y) i = ArgMax<axis=1>(p) f = ai.onnx.ml.ArrayFeatureExtractor(c, i) "
        "s = Constant<value_ints=[-1]>() label = Reshape(f, s) }"
    )
    header = '<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>'
    model = onnx.parser.parse_model(header + text)
    del model.graph.input[1]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, 3, dtype=np.float32), "w"))
    batch = {"x": np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)}
    want = onnx_tools.run_model(model, batch)
    graph = from_onnx(model, loss="mse", output="p")
    got = onnx_tools.run_graph(graph, {**batch, "targets": np.zeros((5, 3), np.float32)})
    np.testing.assert_array_equal(got["label"], want["label"])
    np.testing.assert_allclose(got["p"], want["p"], rtol=1e-6)
    assert np.abs(got["w.grad"]).max() > 0
