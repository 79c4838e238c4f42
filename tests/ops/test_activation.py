"""Activations and their gradients against PyTorch autograd in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

SHAPES = [(7,), (3, 5), (2, 3, 17), (1, 1), (0, 4), ()]
FORWARD = {
    "Gelu": lambda x, a: F.gelu(x, approximate=a["approximate"]),
    "Silu": lambda x, a: F.silu(x),
}
GRADIENTS = {
    "GeluGrad": (lambda x, a: F.gelu(x, approximate=a["approximate"]), "x"),
    "SiluGrad": (lambda x, a: F.silu(x), "x"),
    "ReluGrad": (lambda x, a: F.relu(x), "y"),
    "TanhGrad": (lambda x, a: torch.tanh(x), "y"),
    "SigmoidGrad": (lambda x, a: torch.sigmoid(x), "y"),
}


def options(name):
    return [{"approximate": "none"}, {"approximate": "tanh"}] if name.startswith("Gelu") else [{}]


def sample(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape) * 3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORWARD)
def test_forward(operator_case, name, shape):
    for attributes in options(name):
        x = np.asarray(sample(shape))
        operator_case(name, [x], **attributes).check([FORWARD[name](torch.tensor(x), attributes).numpy()])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(operator_case, name, shape):
    function, saved = GRADIENTS[name]
    for attributes in options(name):
        x = torch.tensor(np.asarray(sample(shape)), requires_grad=True)
        dy = np.asarray(sample(shape, 1))
        y = function(x, attributes)
        y.backward(torch.tensor(dy))
        forward = (x if saved == "x" else y).detach().numpy()
        operator_case(name, [dy, forward], **attributes).check([x.grad.numpy()])


def test_relu_gradient_takes_the_forward_input_as_well(operator_case):
    x, dy = sample((4, 9)), sample((4, 9), 1)
    x[0, :3] = 0.0
    operator_case("ReluGrad", [dy, x]).check([np.where(x > 0, dy, 0.0)])


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_gradient_far_from_zero(operator_case, tanh):
    x = np.linspace(-12, 12, 97)
    t = torch.tensor(x, requires_grad=True)
    F.gelu(t, approximate="tanh" if tanh else "none").sum().backward()
    got = operator_case("GeluGrad", [np.ones_like(x), x], approximate="tanh" if tanh else "none").runtime(1)[0]
    np.testing.assert_allclose(got, t.grad.numpy(), atol=3e-6)


@pytest.mark.parametrize("name", ["SoftmaxGrad", "LogSoftmaxGrad"])
@pytest.mark.parametrize("shape,axis", [((5,), 0), ((3, 7), -1), ((3, 7), 0), ((2, 5, 3), 1), ((2, 3, 4, 33), 3)])
def test_softmax_gradient(operator_case, name, shape, axis):
    x = torch.tensor(sample(shape), requires_grad=True)
    dy = sample(shape, 1)
    y = (torch.softmax if name == "SoftmaxGrad" else torch.log_softmax)(x, axis)
    y.backward(torch.tensor(dy))
    operator_case(name, [dy, y.detach().numpy()], axis=axis).check([x.grad.numpy()])


def test_symbolic_shapes_need_no_binding(operator_case):
    x, dy = sample((3, 5)), sample((3, 5), 1)
    symbolic = {0: ["batch", "width"], 1: ["batch", "width"]}
    for name in (*GRADIENTS, "SoftmaxGrad", "LogSoftmaxGrad"):
        case = operator_case(name, [dy, x], shapes=symbolic)
        result = case.expanded(np.float32).graph.outputs[0]
        assert [str(d) for d in result.shape] == ["batch", "width"], name
