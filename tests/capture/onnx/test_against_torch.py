"""Operators whose reference implementation is no float64 reference: loss and gradients against PyTorch in double."""

# ruff: noqa: E501 - a model is one line of text

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from ortgraph.capture.from_onnx import from_onnx

X = (2, 4, 5, 5)
CASES = {
    "Erf": ("y = Erf(t)", {}, lambda t, w: torch.erf(t)),
    "LRN": ("y = LRN<size=3,alpha=0.5,beta=0.7>(t)", {}, lambda t, w: functional.local_response_norm(t, 3, 0.5, 0.7, 1.0)),
    "GroupNormalization": (
        "y = GroupNormalization<num_groups=2>(t, a, b)", {"a": (4,), "b": (4,)},
        lambda t, w: functional.group_norm(t, 2, w["a"], w["b"], 1e-5),
    ),
    "ConvTranspose_group": (
        "y = ConvTranspose<group=2,strides=[2,2],dilations=[1,2]>(t, a)", {"a": (4, 2, 3, 3)},
        lambda t, w: functional.conv_transpose2d(t, w["a"], groups=2, stride=2, dilation=(1, 2)),
    ),
    "MeanVarianceNormalization": (
        "y = MeanVarianceNormalization<axes=[0,2,3]>(t)", {},
        lambda t, w: (t - t.mean((0, 2, 3), True)) / t.std((0, 2, 3), correction=0, keepdim=True),
    ),
    "Gelu": ("y = Gelu(t)", {}, lambda t, w: functional.gelu(t)),
    "Gelu_tanh": ('y = Gelu<approximate="tanh">(t)', {}, lambda t, w: functional.gelu(t, approximate="tanh")),
    "PRelu_zero": ("m = Mul(t, z) y = PRelu(m, a)", {"a": (5,)}, lambda t, w: torch.where(t * 0 > 0, t * 0, w["a"] * t * 0)),
    "SimplifiedLayerNormalization": (
        "y = SimplifiedLayerNormalization(t, a)", {"a": (5,)},
        lambda t, w: t / torch.sqrt((t * t).mean(-1, True) + 1e-5) * w["a"],
    ),
    "SkipLayerNormalization": (
        "y, m1, m2, s = com.microsoft.SkipLayerNormalization<epsilon=0.001>(t, x, a, b)", {"a": (5,), "b": (5,)},
        lambda t, w: functional.layer_norm(t + w["x"], (5,), w["a"], w["b"], 1e-3),
    ),
    "FusedMatMul": (
        "y = com.microsoft.FusedMatMul<transB=1,alpha=0.5>(t, x)", {}, lambda t, w: 0.5 * t @ w["x"].transpose(-1, -2),
    ),
    "FusedGemm": (
        'f = Flatten(t) y = com.microsoft.FusedGemm<transB=1,activation="LeakyRelu",activation_alpha=0.2>(f, a, b)',
        {"a": (3, 100), "b": (3,)}, lambda t, w: functional.leaky_relu(t.flatten(1) @ w["a"].T + w["b"], 0.2),
    ),
    "FusedConv": (
        'y = com.microsoft.FusedConv<activation="Relu">(t, a, b)', {"a": (2, 4, 2, 2), "b": (2,)},
        lambda t, w: functional.conv2d(t, w["a"], w["b"]).relu(),
    ),
    "BiasGelu": ("y = com.microsoft.BiasGelu(t, a)", {"a": (5,)}, lambda t, w: functional.gelu(t + w["a"])),
    "FastGelu": ("y = com.microsoft.FastGelu(t, a)", {"a": (5,)}, lambda t, w: functional.gelu(t + w["a"], approximate="tanh")),
    "QuickGelu": ("y = com.microsoft.QuickGelu<alpha=1.5>(t)", {}, lambda t, w: t * torch.sigmoid(1.5 * t)),
    "Softmax_loss_ties": ("y = ReduceMax<keepdims=0>(q1)", {}, None),
}  # fmt: skip
del CASES["Softmax_loss_ties"]


@pytest.mark.parametrize("name", CASES)
def test_case(name, onnx_tools):
    text, shapes, function = CASES[name]
    rng = np.random.default_rng(len(name))
    values = {"p": rng.standard_normal((4, 5, 5)), **{k: rng.standard_normal(s) for k, s in shapes.items()}}
    values = {k: v.astype(np.float32) for k, v in values.items()}
    x = rng.standard_normal(X).astype(np.float32)
    inputs = ", ".join(f"float[{','.join(map(str, v.shape))}] {k}" for k, v in values.items())
    body = f"z = Constant<value=float {{0.0}}>() t = Mul(x, p) {text} f1 = Sin(y) f2 = Mul(f1, y) loss = ReduceMean<keepdims=0>(f2)"
    opset = 21
    graph = from_onnx(
        onnx_tools.make_model(f"g (float[2,4,5,5] x, {inputs}) => (float loss) {{ {body} }}", opset=opset, **values),
        "loss",
    )
    weights = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in values.items()}
    wide = torch.tensor(x, dtype=torch.float64)
    y = function(wide * weights["p"], {**weights, "x": wide})
    loss = (torch.sin(y) * y).mean()
    loss.backward()
    for threads in (1, 2):
        outputs = onnx_tools.run_graph(graph, {"x": x}, threads)
        np.testing.assert_allclose(outputs["loss"], loss.item(), rtol=2e-5, atol=1e-6)
        for key, weight in weights.items():
            onnx_tools.assert_close(outputs[f"{key}.grad"], weight.grad.numpy(), key, 5e-5)


def _batch_norm_model(onnx_tools, values):
    inputs = ", ".join(f"float[{','.join(map(str, v.shape))}] {k}" for k, v in values.items())
    text = f"g (float[6,3,4,4] x, {inputs}) => (float loss, float[6,3,4,4] y) {{ h = Mul(x, p) y = BatchNormalization<epsilon=0.001,momentum=0.8>(h, scale, bias, mean, var) f = Sin(y) loss = ReduceMean<keepdims=0>(f) }}"
    return onnx_tools.make_model(text, **values)


def _batch_norm_values():
    rng = np.random.default_rng(3)
    values = {
        "p": rng.standard_normal((3, 4, 4)),
        **{k: rng.uniform(0.5, 1.5, 3) for k in ("scale", "bias", "mean", "var")},
    }
    return {k: v.astype(np.float32) for k, v in values.items()}, rng.standard_normal((6, 3, 4, 4)).astype(np.float32)


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm(train, onnx_tools):
    values, x = _batch_norm_values()
    graph = from_onnx(_batch_norm_model(onnx_tools, values), "loss", train_batch_norm=train)
    assert [b.name for b in graph.signature.buffers] == ["mean", "var"]
    assert [p.name for p in graph.signature.trainable] == ["p", "scale", "bias"]
    weights = {
        k: torch.tensor(v, dtype=torch.float64, requires_grad=k not in ("mean", "var")) for k, v in values.items()
    }
    h = torch.tensor(x, dtype=torch.float64) * weights["p"]
    y = functional.batch_norm(h, weights["mean"], weights["var"], weights["scale"], weights["bias"], train, 0.2, 1e-3)
    loss = torch.sin(y).mean()
    loss.backward()
    outputs = onnx_tools.run_graph(graph, {"x": x})
    np.testing.assert_allclose(outputs["y"], y.detach(), rtol=1e-4, atol=1e-5)
    for key in ("p", "scale", "bias"):
        onnx_tools.assert_close(outputs[f"{key}.grad"], weights[key].grad.numpy(), key, 5e-5)
    updates = {b.name: b.update for b in graph.signature.buffers}
    if not train:
        assert updates == {"mean": None, "var": None}
        return
    for key, update in updates.items():
        np.testing.assert_allclose(outputs[update], weights[key].detach(), rtol=1e-5)


def test_dropout_draws_anew_and_its_gradient_uses_the_same_mask(onnx_tools):
    w = np.linspace(0.5, 1.5, 4000).astype(np.float32)
    text = "g (float[4000] w) => (float loss, float[4000] y) { r = Constant<value=float {0.25}>() t = Constant<value=bool {1}>() y = Dropout(w, r, t) loss = ReduceSum<keepdims=0>(y) }"
    graph = from_onnx(onnx_tools.make_model(text, w=w), "loss")
    assert {s.kind for s in graph.signature.states} == {"random_key", "random_step"}
    runs = [onnx_tools.run_graph(graph, {"random_step": np.array(step)}) for step in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0]["y"], runs[1]["y"])
    assert (runs[0]["y"] != runs[2]["y"]).any()
    for outputs in runs:
        kept = outputs["y"] != 0
        assert 0.7 < kept.mean() < 0.8
        np.testing.assert_allclose(outputs["w.grad"], kept / 0.75, rtol=1e-6)
        np.testing.assert_allclose(outputs["y"], kept * w / 0.75, rtol=1e-6)
    assert int(runs[2]["random_step.next"]) == 2


@pytest.mark.parametrize("mode", ["", ", r, off", ", zero, on"])
def test_dropout_without_training_mode_or_ratio_is_an_identity(mode, onnx_tools):
    text = f"g (float[8] w) => (float loss, bool[8] mask) {{ r = Constant<value=float {{0.5}}>() zero = Constant<value=float {{0.0}}>() on = Constant<value=bool {{1}}>() off = Constant<value=bool {{0}}>() y, mask = Dropout(w{mode}) s = Mul(y, y) loss = ReduceSum<keepdims=0>(s) }}"
    w = np.arange(8, dtype=np.float32)
    graph = from_onnx(onnx_tools.make_model(text, w=w), "loss")
    outputs = onnx_tools.run_graph(graph, {})
    np.testing.assert_allclose(outputs["w.grad"], 2 * w)
    assert outputs["mask"].all() and not graph.signature.states


@pytest.mark.parametrize("kind", ["mse", "l1", "bce_with_logits", "cross_entropy"])
def test_losses(kind, onnx_tools):
    rng = np.random.default_rng(1)
    w, x = rng.standard_normal((4, 3)).astype(np.float32), rng.standard_normal((5, 4)).astype(np.float32)
    w[:, 1] = 0.0  # a logit of exactly zero
    graph = from_onnx(
        onnx_tools.make_model("g (float[N,4] x, float[4,3] w) => (float[N,3] output) { output = MatMul(x, w) }", w=w),
        kind,
    )
    assert graph.signature.outputs == ("output",)
    weight = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    y = torch.tensor(x, dtype=torch.float64) @ weight
    if kind == "cross_entropy":
        target = np.array([0, 2, -100, 1, 1])
        loss, batch = functional.cross_entropy(y, torch.tensor(target)), {"labels": target}
    else:
        target = rng.uniform(0, 1, (5, 3)).astype(np.float32)
        function = {
            "mse": functional.mse_loss,
            "l1": functional.l1_loss,
            "bce_with_logits": functional.binary_cross_entropy_with_logits,
        }[kind]
        loss, batch = function(y, torch.tensor(target, dtype=torch.float64)), {"targets": target}
    loss.backward()
    assert graph.signature.inputs == ("x", *batch)
    for threads, seed in ((1, 1.0), (2, 0.25)):
        outputs = onnx_tools.run_graph(graph, {"x": x, **batch}, threads, seed)
        np.testing.assert_allclose(outputs["loss"], loss.item(), rtol=1e-5)
        onnx_tools.assert_close(outputs["w.grad"], seed * weight.grad.numpy(), "w")
