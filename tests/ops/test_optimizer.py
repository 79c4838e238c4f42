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


def _state(seed=1, shape=(3, 5)):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape) ** (1 + (i == 3))) for i in range(4)]


SGD_CASES = [
    {}, {"weight_decay": 0.1}, {"momentum": 0.9}, {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": 1},
]  # fmt: skip


@pytest.mark.parametrize("attributes", SGD_CASES, ids=str)
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_sgd_is_pytorch(operator_case, attributes, step, scale):
    w, g, buffer, _ = _state()
    parameter = torch.nn.Parameter(torch.tensor(w))
    options = {**attributes, "nesterov": bool(attributes.get("nesterov"))}
    peer = torch.optim.SGD([parameter], lr=0.02, **options)
    parameter.grad = torch.tensor(g * (scale or 1.0))
    momentum = attributes.get("momentum")
    if step == 2 and momentum:
        peer.state[parameter]["momentum_buffer"] = torch.tensor(buffer)
    peer.step()
    expected = [parameter.detach().numpy()]
    inputs = [
        np.array(0.02),
        np.array(step),
        w,
        g,
        buffer if momentum else None,
        None if scale is None else np.array(scale),
    ]
    while inputs[-1] is None:
        inputs.pop()
    if momentum:
        expected.append(peer.state[parameter]["momentum_buffer"].numpy())
    operator_case("SGD", inputs, len(expected), **attributes).check(expected)


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)])
@pytest.mark.parametrize(
    "attributes",
    [{}, {"bias_correction": 0}, {"adapt": 0}, {"min_trust": 2.0}, {"max_trust": 0.5}, {"weight_decay": 0.0}],
)
def test_lamb_is_its_formula(operator_case, attributes, shape):
    w, g, m, v = _state(2, shape)
    options = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1, **attributes}
    rate, step, scale = 0.02, 7, 0.25
    m_new, v_new = 0.8 * m + 0.2 * g * scale, 0.9 * v + 0.1 * (g * scale) ** 2
    corrected = options.get("bias_correction", 1)
    mean, square = (m_new / (1 - 0.8**step), v_new / (1 - 0.9**step)) if corrected else (m_new, v_new)
    u = mean / (np.sqrt(square) + 1e-3) + options["weight_decay"] * w
    sizes = [np.sqrt((x * x).sum()) for x in (w, u)]
    trust = sizes[0] / sizes[1] if min(sizes) > 0 else 1.0
    trust = max(trust, options.get("min_trust", 0.0))
    trust = min(trust, options.get("max_trust", np.inf)) if options.get("adapt", 1) else 1.0
    case = operator_case("LAMB", [np.array(rate), np.array(step), w, g, m, v, np.array(scale)], 3, **options)
    case.check([np.asarray(x) for x in (w - rate * trust * u, m_new, v_new)])


@pytest.mark.parametrize("op,states", [("AdamW", 2), ("LAMB", 2), ("SGD", 1)])
def test_skip_gives_back_the_old_values(operator_case, op, states):
    w, g, *s = _state()
    g[1, 2], g[2, 0] = np.nan, np.inf
    attributes = {"momentum": 0.9} if op == "SGD" else {}
    for skip in (True, False):
        inputs = [np.array(0.1), np.array(3), w, g, *s[:states], None, np.array(skip)]
        case = operator_case(op, inputs, 1 + states, **attributes)
        for threads in (1, 2):
            for old, new in zip((w, *s[:states]), case.runtime(threads), strict=True):
                assert np.array_equal(new, old.astype(np.float32)) == skip


def test_squared_norm(operator_case):
    tensors = [np.asarray(np.random.default_rng(3).standard_normal(s)) for s in ((70, 5), (), (0, 3))]
    case = operator_case("SquaredNorm", tensors)
    want = sum((t**2).sum() for t in tensors)
    for threads in (1, 2):
        assert case.runtime(threads)[0] == pytest.approx(want, rel=1e-6)
    for bad in (np.inf, np.nan):
        tensors[0][3, 3] = bad
        assert not np.isfinite(operator_case("SquaredNorm", tensors).runtime(1)[0])
