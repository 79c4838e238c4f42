"""Functions far out in their tails, where one operand is all that is left of a difference: losses and gradients have the
digits that PyTorch's float32 has."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import torch.nn.functional as F  # noqa: E402

import ortgraph  # noqa: E402
from ortgraph.runtime.detect import detect_runtime  # noqa: E402

W = torch.cat([torch.linspace(-80, 80, 81), torch.tensor([-17.5, -1e-3, -1e-6, 1e-6, 3.7, 8.5])])


class Model(torch.nn.Module):
    def __init__(self, function, w):
        super().__init__()
        self.function, self.w = function, torch.nn.Parameter(w.clone())

    def forward(self, x):
        return self.function(self.w * x)


def _focal(z):
    p, hit = torch.sigmoid(z), (torch.arange(len(z)) % 3 == 0).to(z.dtype)
    return (-hit * (1 - p) ** 2 * torch.log(p.clamp_min(1e-38)) - (1 - hit) * p**2 * torch.log(1 - 0.999 * p)).sum()


CASES = {
    "log sigmoid": lambda z: torch.log(torch.sigmoid(z)).sum(),
    "cross entropy": lambda z: F.binary_cross_entropy(torch.sigmoid(z - 80), torch.full_like(z, 0.7)),
    "focal": _focal,
    "silu": lambda z: (F.silu(z[:35]) * 1e6).square().sum(),
    "glu": lambda z: torch.log(F.glu(torch.stack([torch.ones_like(z), z]), 0)).sum(),
    "small elu": lambda z: F.elu(z.clamp_max(-1e-6) * 1e-6).sum() ** 2,
    "small selu": lambda z: F.selu(z.clamp_max(-1e-6) * 1e-6).sum() ** 2,
    "small celu": lambda z: F.celu(z.clamp_max(-1e-6) * 1e-6, 0.5).sum() ** 2,
    "erfc": lambda z: torch.log(torch.erfc(z / 9)).sum(),
    "small erfc": lambda z: torch.erfc(z / 8 + 1).square().sum(),
}


def _gradient(module, x):
    loss = module(x)
    loss.backward()
    return loss.item(), module.w.grad.double().numpy()


def _error(found, exact):
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("name", CASES)
def test_torch_functions(name):
    x = torch.ones(1)
    plain, exact = Model(CASES[name], W), Model(CASES[name], W.double()).double()
    loss, gradient = _gradient(exact, x.double())
    near_loss, near = _gradient(plain, x)
    graph = ortgraph.capture(plain, {"x": x})
    for preset, threads in (("O0", 1), ("O2", 2)):
        session = ortgraph.TrainingSession(ortgraph.optimize(graph, preset).graph, threads=threads)
        assert abs(session.loss({"x": x}) - loss) <= 4 * abs(near_loss - loss) + 1e-6 * abs(loss)
        assert _error(session.gradients({"x": x})["w"], gradient) <= 4 * _error(near, gradient) + 1e-6


@pytest.mark.parametrize("options", ["", "{kernels=false}"])
def test_sigmoid_without_a_compiler(options):
    x = torch.ones(1)
    plain = Model(CASES["log sigmoid"], W)
    near_loss, near = _gradient(plain, x)
    graph = ortgraph.optimize(ortgraph.capture(plain, {"x": x}), f"mark-optimized,lower{options}").graph
    assert [n.op_type for n in graph.graph].count("Sigmoid") == (0 if options else 1)
    assert not any(n.op_type == "Sigmoid" and n.domain == "" for n in graph.graph)
    session = ortgraph.TrainingSession(graph, threads=1)
    assert session.loss({"x": x}) == pytest.approx(near_loss, rel=1e-6)
    np.testing.assert_allclose(session.gradients({"x": x})["w"], near, rtol=1e-5)


def test_double_precision_erfc_is_refused():
    with pytest.raises(ortgraph.errors.UnsupportedError, match="erfc in double precision"):
        ortgraph.capture(Model(CASES["erfc"], W.double()).double(), {"x": torch.ones(1).double()})


@pytest.mark.skipif(detect_runtime().target != "onnxruntime-training", reason="the gradient builder is in that build")
@pytest.mark.parametrize("preset", ["O0", "O2"])
def test_imported_sigmoid(preset, tmp_path):
    """-sum log sigmoid(w x) of a foreign model: gradient -(1 - sigmoid) x."""
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["z"]), helper.make_node("Sigmoid", ["z"], ["s"]),
        helper.make_node("Log", ["s"], ["l"]), helper.make_node("ReduceSum", ["l"], ["loss"], keepdims=0),
    ]  # fmt: skip
    w = W.numpy()
    graph = helper.make_graph(
        nodes, "foreign", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [len(w)])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])], [numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    found = ortgraph.from_onnx(tmp_path / "m.onnx", loss="loss")
    session = ortgraph.TrainingSession(ortgraph.optimize(found, preset).graph, threads=2)
    batch = {"x": np.ones(len(w), np.float32)}
    wide = w.astype(np.float64)
    assert session.loss(batch) == pytest.approx(-np.logaddexp(0, -wide).sum(), rel=1e-6)
    np.testing.assert_allclose(session.gradients(batch)["w"], 1 / (1 + np.exp(wide)), rtol=1e-5, atol=2e-7)
