"""Convolution and pooling gradients against PyTorch autograd in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ortgraph.errors import UnsupportedError
from ortgraph.ops.expand import expand_node

CONVOLUTIONS = {
    # batch, channels, sizes, filters, kernel, strides, pads, dilations, group
    "plain": (2, 3, (7, 6), 4, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "strided with a rest": (2, 3, (8, 9), 5, (3, 2), (2, 3), (1, 0), (1, 1), 1),
    "stride above kernel": (1, 2, (9, 9), 3, (2, 1), (4, 3), (0, 0), (1, 1), 1),
    "dilated": (2, 2, (9, 8), 3, (3, 3), (2, 1), (2, 1), (2, 3), 1),
    "grouped": (2, 6, (5, 5), 4, (3, 3), (1, 2), (1, 1), (1, 1), 2),
    "depthwise": (3, 4, (6, 5), 8, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "pointwise": (2, 17, (3, 4), 5, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "wide": (2, 18, (4, 5), 7, (3, 3), (2, 1), (1, 1), (1, 1), 1),
    "one dimension": (2, 3, (11,), 4, (5,), (2,), (2,), (1,), 1),
    "three dimensions": (1, 2, (4, 3, 5), 2, (2, 2, 3), (1, 1, 2), (0, 1, 1), (1, 1, 1), 1),
    "patches": (2, 3, (8, 8), 6, (4, 4), (4, 4), (0, 0), (1, 1), 1),
}


def conv_problem(name):
    batch, channels, sizes, filters, kernel, strides, pads, dilations, group = CONVOLUTIONS[name]
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((batch, channels, *sizes)), requires_grad=True)
    w = torch.tensor(rng.standard_normal((filters, channels // group, *kernel)), requires_grad=True)
    bias = torch.zeros(filters, dtype=torch.float64, requires_grad=True)
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(sizes)]
    y = conv(x, w, bias, strides, pads, dilations, group)
    dy = rng.standard_normal(y.shape)
    y.backward(torch.tensor(dy))
    attributes = {"strides": list(strides), "pads": [*pads, *pads], "dilations": list(dilations), "group": group}
    inputs = [dy, x.detach().numpy(), w.detach().numpy()]
    return inputs, [t.grad.numpy() for t in (x, w, bias)], attributes


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv_gradient(operator_case, name):
    inputs, expected, attributes = conv_problem(name)
    operator_case("ConvGrad", inputs, 3, **attributes).check(expected)


def test_conv_gradient_with_symbolic_batch(operator_case):
    inputs, expected, attributes = conv_problem("grouped")
    shapes = {0: ["n", *inputs[0].shape[1:]], 1: ["n", *inputs[1].shape[1:]]}
    operator_case("ConvGrad", inputs, 3, shapes=shapes, **attributes).check(expected)


def test_conv_gradient_builds_only_what_is_read(operator_case):
    inputs, _, attributes = conv_problem("plain")
    for output, op_type in ((0, "ConvTranspose"), (1, "MatMul"), (2, "ReduceSum")):
        graph = operator_case("ConvGrad", inputs, 3, **attributes).composite(np.float32).graph
        kept = graph.outputs[output]
        graph.outputs.clear()
        graph.outputs.append(kept)
        expand_node(next(iter(graph)))
        made = {n.op_type for n in graph}
        assert op_type in made
        assert ("ConvTranspose" in made) == (output == 0)
        assert ("MatMul" in made) == (output == 1)


def test_asymmetric_pads(operator_case):
    rng = np.random.default_rng(3)
    x = torch.tensor(rng.standard_normal((2, 3, 6, 7)), requires_grad=True)
    w = torch.tensor(rng.standard_normal((4, 3, 3, 3)), requires_grad=True)
    y = F.conv2d(F.pad(x, (0, 2, 1, 0)), w, stride=2)
    dy = rng.standard_normal(y.shape)
    y.backward(torch.tensor(dy))
    case = operator_case(
        "ConvGrad",
        [dy, x.detach().numpy(), w.detach().numpy()],
        3,
        strides=[2, 2],
        pads=[1, 0, 0, 2],
        dilations=[1, 1],
        group=1,
    )
    case.check([x.grad.numpy(), w.grad.numpy(), dy.sum((0, 2, 3))])


@pytest.mark.parametrize(
    "kernel,stride,pad,sizes",
    [
        ((3, 3), (2, 2), (1, 1), (7, 8)),
        ((2, 2), (2, 2), (0, 0), (6, 6)),
        ((3, 2), (1, 1), (0, 1), (5, 5)),
        ((2,), (1,), (0,), (9,)),
    ],
)
def test_max_pool_gradient(operator_case, kernel, stride, pad, sizes):
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((2, 3, *sizes)), requires_grad=True)
    pool = {1: F.max_pool1d, 2: F.max_pool2d}[len(sizes)]
    y, local = pool(x, kernel, stride, pad, return_indices=True)
    dy = rng.standard_normal(y.shape)
    y.backward(torch.tensor(dy))
    plane = np.arange(6).reshape(2, 3, *[1] * len(sizes)) * int(np.prod(sizes))
    indices = local.numpy() + plane  # ONNX counts over the whole tensor
    operator_case("MaxPoolGrad", [dy, indices, x.detach().numpy()]).check([x.grad.numpy()])


def test_max_pool_indices_of_the_runtime_are_what_the_gradient_takes(operator_case):
    ort = pytest.importorskip("onnxruntime")
    import onnx

    x = np.random.default_rng(1).standard_normal((2, 3, 7, 5)).astype(np.float32)
    node = onnx.helper.make_node("MaxPool", ["x"], ["y", "i"], kernel_shape=[3, 3], strides=[2, 1], pads=[1, 1, 1, 1])
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "g", [info("x", 1, x.shape)], [info("y", 1, None), info("i", 7, None)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    y, indices = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_array_equal(x.reshape(-1)[indices], y)
    t = torch.tensor(x, requires_grad=True)
    F.max_pool2d(t, 3, (2, 1), 1).sum().backward()
    got = operator_case("MaxPoolGrad", [np.ones(y.shape), indices, x]).runtime(2)[0]
    np.testing.assert_array_equal(got, t.grad.numpy())


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(
    "kernel,stride,pad,sizes",
    [
        ((2, 2), (2, 2), (0, 0), (6, 4)),
        ((3, 3), (2, 2), (1, 1), (7, 8)),
        ((3, 2), (2, 3), (0, 1), (8, 9)),
        ((3,), (2,), (1,), (8,)),
    ],
)
def test_average_pool_gradient(operator_case, kernel, stride, pad, sizes, ceil, include):
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((2, 3, *sizes)), requires_grad=True)
    pool = {1: F.avg_pool1d, 2: F.avg_pool2d}[len(sizes)]
    y = pool(x, kernel, stride, pad, ceil, include)
    dy = rng.standard_normal(y.shape)
    y.backward(torch.tensor(dy))
    case = operator_case(
        "AveragePoolGrad",
        [dy, x.detach().numpy()],
        kernel_shape=list(kernel),
        strides=list(stride),
        pads=[*pad, *pad],
        count_include_pad=int(include),
        ceil_mode=int(ceil),
    )
    case.check([x.grad.numpy()])


def test_pool_gradients_need_static_shapes(operator_case):
    dy, x = np.zeros((2, 3, 2, 2)), np.zeros((2, 3, 4, 4))
    with pytest.raises(UnsupportedError, match="MaxPoolGrad(.|\n)*bind"):
        operator_case("MaxPoolGrad", [dy, dy.astype(np.int64), x], shapes={2: ["n", 3, 4, 4]}).expanded(np.float32)
    with pytest.raises(UnsupportedError, match="AveragePoolGrad(.|\n)*bind"):
        operator_case("AveragePoolGrad", [dy, x], kernel_shape=[2, 2], shapes={1: ["n", 3, 4, 4]}).expanded(np.float32)
