"""LSTM, GRU and RNN of ONNX models: the operator's own definition in float64, its central differences, the runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import ortgraph
from ortgraph.errors import UnsupportedError

STEPS, BATCH, WIDTH, HIDDEN = 3, 2, 3, 2
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)), "Tanh": np.tanh, "Relu": lambda x: np.maximum(x, 0),
    "Softsign": lambda x: x / (1 + abs(x)), "HardSigmoid": lambda x: np.clip(0.3 * x + 0.4, 0, 1),
}  # fmt: skip
# name -> (operator, attributes, which of B, sequence lengths, initial states and peepholes are given)
FORMS = {
    "lstm": ("LSTM", {"direction": "bidirectional"}, "B lengths states"),
    "lstm with peepholes": ("LSTM", {"direction": "reverse", "activations": ["HardSigmoid", "Softsign", "Tanh"],
                                     "activation_alpha": [0.3], "activation_beta": [0.4]}, "B states peepholes"),
    "lstm without bias or state": ("LSTM", {}, "lengths peepholes"),
    "gru": ("GRU", {"direction": "bidirectional"}, "B lengths states"),
    "gru reset after the product": ("GRU", {"direction": "reverse", "linear_before_reset": 1}, "B"),
    "gru without bias": ("GRU", {"linear_before_reset": 1}, "states"),
    "rnn": ("RNN", {"direction": "bidirectional", "activations": ["Tanh", "Softsign"]}, "B lengths states"),
    "rnn of batches": ("RNN", {"layout": 1, "activations": ["Relu"]}, "states"),
}  # fmt: skip


def shapes_of(kind, attributes, given):
    d, h, g = 1 + (attributes.get("direction") == "bidirectional"), HIDDEN, GATES[kind]
    shapes = {"W": (d, g * h, WIDTH), "R": (d, g * h, h)}
    state = (BATCH, d, h) if attributes.get("layout") else (d, BATCH, h)
    shapes.update({"B": (d, 2 * g * h)} if "B" in given else {})
    shapes.update({"H0": state} if "states" in given else {})
    shapes.update({"C0": state} if "states" in given and kind == "LSTM" else {})
    shapes.update({"P": (d, 3 * h)} if "peepholes" in given else {})
    return shapes


def defined(kind, attributes, v):
    """Y, Y_h, Y_c by the operator's text."""
    x, d = v["x"], v["W"].shape[0]
    turn = (lambda a: np.swapaxes(a, 0, 1)) if attributes.get("layout") else (lambda a: a)
    x, h0 = turn(x), turn(v["H0"]) if "H0" in v else np.zeros((d, BATCH, HIDDEN))
    c0, peep = v.get("C0", np.zeros_like(h0)), v.get("P", np.zeros((d, 3 * HIDDEN)))
    bias = v.get("B", np.zeros((d, 2 * GATES[kind] * HIDDEN)))
    lengths = v.get("lengths", np.full(BATCH, STEPS))
    default = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[kind]
    names = attributes.get("activations", default * d)
    y, last_h, last_c = np.zeros((STEPS, d, BATCH, HIDDEN)), h0.copy(), c0.copy()
    for i in range(d):
        f = [FUNCTIONS[n] for n in names[i * len(default) :]]
        w, r, (wb, rb) = v["W"][i].T, v["R"][i].T, np.split(bias[i], 2)
        backwards = attributes.get("direction") == "reverse" or i == 1
        for row in range(BATCH):
            h, c = h0[i, row], c0[i, row]
            times = range(lengths[row])
            for t in reversed(times) if backwards else times:
                if kind == "RNN":
                    h = f[0](x[t, row] @ w + h @ r + wb + rb)
                elif kind == "LSTM":
                    gi, go, gf, gc = np.split(x[t, row] @ w + h @ r + wb + rb, 4)
                    pi, po, pf = np.split(peep[i], 3)
                    c = f[0](gf + pf * c) * c + f[0](gi + pi * c) * f[1](gc)
                    h = f[0](go + po * c) * f[2](c)
                else:
                    parts = list(
                        zip(*(np.split(a, 3) for a in (x[t, row] @ w, wb, rb)), np.split(r, 3, 1), strict=True)
                    )
                    z, s = (f[0](a + b + cc + h @ q) for a, b, cc, q in parts[:2])
                    a, b, cc, q = parts[2]
                    inner = s * (h @ q + cc) if attributes.get("linear_before_reset") else (s * h) @ q + cc
                    h = (1 - z) * f[1](a + b + inner) + z * h
                y[t, i, row] = h
            last_h[i, row], last_c[i, row] = h, c
    if attributes.get("layout"):
        return y.transpose(2, 0, 1, 3), turn(last_h), turn(last_c)
    return y, last_h, last_c


def loss_of(kind, attributes, values):
    y, h, c = defined(kind, attributes, values)
    total = np.sum(np.sin(y) * y) + np.sum(np.cos(h) * h)
    return total + (np.sum(np.sin(c)) if kind == "LSTM" else 0)


def forward_model(kind, attributes, values):
    order = ["x", "W", "R", "B", "lengths", "H0", "C0", "P"]
    names = [n if n in values or n == "x" else "" for n in order]
    while not names[-1]:
        names.pop()
    make = onnx.helper.make_node
    outputs = ["y", "h", "c"][: 3 if kind == "LSTM" else 2]
    nodes = [make(kind, names, outputs, hidden_size=HIDDEN, **attributes), make("Sin", ["y"], ["s"])]
    nodes += [make("Mul", ["s", "y"], ["m"]), make("ReduceSum", ["m"], ["a"], keepdims=0), make("Cos", ["h"], ["k"])]
    nodes += [make("Mul", ["k", "h"], ["n"]), make("ReduceSum", ["n"], ["b"], keepdims=0)]
    nodes += [make("Sin", ["c"], ["q"]), make("ReduceSum", ["q"], ["e"], keepdims=0)] if kind == "LSTM" else []
    nodes += [make("Sum", ["a", "b", *(["e"] if kind == "LSTM" else [])], ["loss"])]
    tensors = [onnx.numpy_helper.from_array(v, n) for n, v in values.items() if n != "x"]
    dims = ["batch", STEPS, WIDTH] if attributes.get("layout") else [STEPS, "batch", WIDTH]
    x = onnx.helper.make_tensor_value_info("x", 1, dims)
    loss = onnx.helper.make_tensor_value_info("loss", 1, [])
    graph = onnx.helper.make_graph(nodes, "g", [x], [loss], tensors)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


SLOW = ("lstm without bias or state", "gru without bias", "rnn")
CASES = [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in FORMS]


@pytest.mark.parametrize("name", CASES)
def test_gradient(name, onnx_tools):
    kind, attributes, given = FORMS[name]
    rng = np.random.default_rng(len(name))
    shapes = shapes_of(kind, attributes, given)
    values = {n: rng.uniform(-1, 1, s).astype(np.float32) for n, s in shapes.items()}
    values["x"] = rng.standard_normal(
        (BATCH, STEPS, WIDTH) if "layout" in attributes else (STEPS, BATCH, WIDTH)
    ).astype(np.float32)
    if "lengths" in given:
        values["lengths"] = np.array([STEPS, 1], np.int32)
    model = forward_model(kind, attributes, values)
    wide = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in values.items()}
    expected = loss_of(kind, attributes, wide)
    if "layout" not in attributes:  # which the runtime does not know
        assert onnx_tools.run_model(model, {"x": values["x"]})["loss"] == pytest.approx(expected, rel=1e-5)
    graph = ortgraph.from_onnx(model, loss="loss", trainable=list(shapes))
    for level, threads in (("O0", 1), ("O2", 2)):
        session = ortgraph.TrainingSession(ortgraph.optimize(graph, level).graph, threads=threads)
        assert session.loss({"x": values["x"]}) == pytest.approx(expected, rel=1e-5)
        gradients = session.gradients({"x": values["x"]})
        for weight in shapes:
            onnx_tools.assert_close(gradients[weight], differences(kind, attributes, wide, weight), weight)


def differences(kind, attributes, values, name, step=1e-6):
    result = np.zeros(values[name].shape)
    for index in np.ndindex(*result.shape):
        sides = []
        for sign in (1, -1):
            moved = values[name].copy()
            moved[index] += sign * step
            sides.append(loss_of(kind, attributes, {**values, name: moved}))
        result[index] = (sides[0] - sides[1]) / (2 * step)
    return result


def test_initial_states_train_only_when_named():
    kind, attributes, given = FORMS["lstm"]
    shapes = shapes_of(kind, attributes, given)
    values = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
    model = forward_model(kind, attributes, values)
    assert list(ortgraph.from_onnx(model, loss="loss").signature.gradients) == ["W", "R", "B"]


@pytest.mark.parametrize(
    ("change", "message"), [({"clip": 1.0}, "clip"), ({"input_forget": 1}, "input_forget"), ("steps", "steps")]
)
def test_what_is_not_written_out_is_refused(change, message):
    kind, attributes, given = FORMS["lstm"]
    values = {n: np.zeros(s, np.float32) for n, s in shapes_of(kind, attributes, given).items()}
    model = forward_model(kind, {**attributes, **(change if isinstance(change, dict) else {})}, values)
    if change == "steps":
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "steps"
    with pytest.raises(UnsupportedError, match=message):
        ortgraph.from_onnx(model, loss="loss")
