"""The AdamW composite against torch.optim.AdamW over many steps."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

ort = pytest.importorskip("onnxruntime")


def session_of(case, threads=1):
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    model = ir.serde.serialize_model(case.expanded(np.float32).model).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("decay,beta2,epsilon", [(0.01, 0.999, 1e-8), (0.0, 0.95, 1e-6), (0.3, 0.999, 1e-8)])
def test_a_thousand_steps(operator_case, decay, beta2, epsilon):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((5, 7)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.tensor(w))
    peer = torch.optim.AdamW([parameter], lr=3e-3, betas=(0.9, beta2), eps=epsilon, weight_decay=decay)
    zero = np.zeros_like(w)
    attributes = {"beta1": 0.9, "beta2": beta2, "epsilon": epsilon, "weight_decay": decay}
    case = operator_case("AdamW", [np.array(3e-3), np.array(1), w, w, zero, zero], 3, **attributes)
    session = session_of(case)
    m, v = zero, zero
    for step in range(1, 1001):
        g = (rng.standard_normal(w.shape) * 0.1 + w * 0.05).astype(np.float32)
        parameter.grad = torch.tensor(g)
        peer.step()
        feed = {"x0": np.float32(3e-3), "x1": np.int64(step), "x2": w, "x3": g, "x4": m, "x5": v}
        w, m, v = session.run(None, {k: np.asarray(x) for k, x in feed.items()})
    state = peer.state[parameter]
    pairs = [(w, parameter.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])]
    for own, theirs in pairs:
        error = np.linalg.norm(own - theirs.numpy()) / np.linalg.norm(theirs.numpy())
        assert error < 1e-6, error


def test_one_step_in_float64_with_scaled_gradient(operator_case):
    rng = np.random.default_rng(1)
    w, g, m = (rng.standard_normal((3, 2)) for _ in range(3))
    v = np.abs(rng.standard_normal((3, 2)))
    rate, step, scale = 0.02, 7, 0.25
    g_scaled = g * scale
    m_new, v_new = 0.8 * m + 0.2 * g_scaled, 0.9 * v + 0.1 * g_scaled**2
    denominator = np.sqrt(v_new) / np.sqrt(1 - 0.9**step) + 1e-3
    w_new = w * (1 - rate * 0.1) - rate / (1 - 0.8**step) * m_new / denominator
    inputs = [np.array(rate), np.array(step), w, g, m, v, np.array(scale)]
    case = operator_case("AdamW", inputs, 3, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.1)
    case.check([w_new, m_new, v_new])


def test_attributes_keep_their_decimal_value_through_a_file(operator_case):
    zero = np.zeros(3)
    inputs = [np.array(1e-3), np.array(1), np.ones(3), np.ones(3), zero, zero]
    fresh = operator_case("AdamW", inputs, 3, beta1=0.9, beta2=0.999)
    stored = operator_case("AdamW", inputs, 3, beta1=float(np.float32(0.9)), beta2=float(np.float32(0.999)))
    for a, b in zip(fresh.runtime(1), stored.runtime(1), strict=True):
        np.testing.assert_array_equal(a, b)
