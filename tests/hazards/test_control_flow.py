"""Control flow in forward models: branches with nameless nodes, and frozen branches that read outer values."""

import numpy as np
import onnx
import pytest
import torch

import ortgraph

X = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
END = "s = Sin(y) q = Mul(s, y) loss = ReduceSum<keepdims=0>(q)"


def forward_model(body, **weights):
    text = f'<ir_version: 8, opset_import: ["" : 18]> g (float[3,4] x) => (float loss) {{ {body} {END} }}'
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, value in weights.items():
        array = value if isinstance(value, np.ndarray) else rng.standard_normal(value).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model, {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def check(model, names, wanted, trainable=None):
    """``wanted`` computes y of the double-precision weights ``names``."""
    model, weights = model
    wide = [torch.tensor(weights[n], dtype=torch.float64, requires_grad=True) for n in names]
    y = wanted(torch.tensor(X, dtype=torch.float64), *wide)
    loss = (y.sin() * y).sum()
    loss.backward()
    graph = ortgraph.from_onnx(model, loss="loss", trainable=trainable)
    for level in ("O0", "O2"):
        session = ortgraph.TrainingSession(ortgraph.optimize(graph, level).graph)
        assert session.loss({"x": X}) == pytest.approx(loss.item(), rel=1e-5)
        gradients = session.gradients({"x": X})
        for name, weight in zip(names, wide, strict=True):
            if name in gradients:
                np.testing.assert_allclose(gradients[name], weight.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_nameless_nodes_of_two_taken_branches():
    branches = (
        "<then_branch = a () => (float[3,4] k) { i = Exp(h) k = Mul(i, v) },"
        " else_branch = b () => (float[3,4] k) { i = Neg(h) k = Mul(i, h) }>"
    )
    body = f"t = MatMul(x, w) h = Tanh(t) m = If(yes) {branches} n = If(no) {branches} y = Add(m, n)"
    model = forward_model(body, w=(4, 4), v=(4,), yes=np.array(True), no=np.array(False))

    def wanted(x, w, v):
        h = (x @ w).tanh()
        return h.exp() * v - h * h

    check(model, ("w", "v"), wanted)


def test_a_frozen_branch_reads_a_value_that_only_it_needs():
    body = (
        "mean = ReduceMean<keepdims=0>(x) zero = Constant<value_float=0.0>() c = Greater(mean, zero) same = Tanh(v) "
        "f = If(c) <then_branch = a () => (float[3,4] k) { k = Mul(x, same) },"
        " else_branch = b () => (float[3,4] k) { k = Sub(x, same) }> y = MatMul(f, w)"
    )
    model = forward_model(body, w=(4, 4), v=(4,))
    then = X.mean() > 0
    check(model, ("w", "v"), lambda x, w, v: (x * v.tanh() if then else x - v.tanh()) @ w, trainable=["w"])


@pytest.mark.parametrize("reads", ["t", "x"])
def test_a_branch_that_is_only_a_model_output_is_evaluated(reads):
    """What it reads of the weights' values ends there: the gradient is that of the loss."""
    text = (
        '<ir_version: 8, opset_import: ["" : 18]> g (float[3,4] x, bool c) => (float loss, float[3,4] other) {'
        "t = MatMul(x, w) other = If(c) <then_branch = a () => (float[3,4] k) { k = Exp(READ) },"
        f" else_branch = b () => (float[3,4] k) {{ k = MatMul(READ, w) }}> y = Tanh(t) {END} }}"
    ).replace("READ", reads)
    model = onnx.parser.parse_model(text)
    w = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    wide = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(X, dtype=torch.float64) @ wide
    y = t.tanh()
    (y.sin() * y).sum().backward()
    graph = ortgraph.from_onnx(model, loss="loss")
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, "O2").graph)
    for c in (True, False):
        batch = {"x": X, "c": np.array(c)}
        np.testing.assert_allclose(session.gradients(batch)["w"], wide.grad.numpy(), rtol=1e-4, atol=1e-5)
        read = t.detach().numpy() if reads == "t" else X
        wanted = np.exp(read) if c else read @ w
        np.testing.assert_allclose(session.evaluate(batch)["other"], wanted, rtol=1e-4, atol=1e-5)
