"""Gradients of pools of every rank in ONNX models, against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="compares with PyTorch")
from torch.nn import functional as F  # noqa: E402

import ortgraph  # noqa: E402
from ortgraph.errors import UnsupportedError  # noqa: E402

SIZES = (6, 5, 4)
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAXIMUM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def forward_model(node, rank, batch):
    sizes = ",".join(map(str, SIZES[:rank]))
    text = (
        f'<ir_version: 8, opset_import: ["" : 18]> g (float[{batch},3,{sizes}] x) => (float loss) <float[3,{sizes}] p> '
        f"{{ t = Mul(x, p) {node} s = Sin(y) m = Mul(s, y) loss = ReduceSum<keepdims=0>(m) }}"
    )
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(rank).standard_normal((3, *SIZES[:rank])).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "p"))
    return model, weight


def require_gradient(session, function, x, weight):
    wide = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    y = function(torch.tensor(x, dtype=torch.float64) * wide)
    (y.sin() * y).sum().backward()
    np.testing.assert_allclose(session.gradients({"x": x})["p"], wide.grad.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", ["2", "n"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    ("node", "pools", "options"),
    [
        ("y = AveragePool<kernel_shape={k}, strides={s}>(t)", AVERAGE, {}),
        ("y = AveragePool<kernel_shape={k}, strides={s}, pads={p}, count_include_pad=1>(t)", AVERAGE, {"padding": 1}),
        ("y, i = MaxPool<kernel_shape={k}, strides={s}, storage_order=1>(t)", MAXIMUM, {}),
    ],
    ids=["average", "counted pads", "column-major maximum"],
)
def test_gradient(node, pools, options, rank, batch):
    """Lowered with and without known sizes: an operator that waits for sizes is lowered before it runs."""
    text = node.format(k=[2] * rank, s=[1] * rank, p=[1] * 2 * rank)
    model, weight = forward_model(text, rank, batch)
    x = np.random.default_rng(9).standard_normal((2, 3, *SIZES[:rank])).astype(np.float32)
    graph = ortgraph.from_onnx(model, loss="loss")
    for level in ("O0", "O2"):
        session = ortgraph.TrainingSession(ortgraph.optimize(graph, level).graph)
        require_gradient(session, lambda t: pools[rank](t, 2, 1, **options), x, weight)
        if batch == "n":
            require_gradient(session, lambda t: pools[rank](t, 2, 1, **options), x[:1], weight)


EXTENDED = {
    "ceil": (
        "y = AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1>(t)",
        lambda t: F.avg_pool2d(t, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    ),
    "ceil, counted pads": (
        "y = AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1, count_include_pad=1>(t)",
        lambda t: F.avg_pool2d(t, 3, 2, 1, ceil_mode=True),
    ),
    "dilated": (
        "y = AveragePool<kernel_shape=[2,2], dilations=[2,3]>(t)",
        lambda t: (t[..., :-2, :-3] + t[..., 2:, :-3] + t[..., :-2, 3:] + t[..., 2:, 3:]) / 4,
    ),
    "root of squares": ("y = LpPool<kernel_shape=[2,2], p=2>(t)", lambda t: F.lp_pool2d(t, 2, 2, 1)),
    "global sum": ("y = GlobalLpPool<p=1>(t)", lambda t: t.abs().sum((2, 3), keepdim=True)),
}


@pytest.mark.parametrize("name", EXTENDED)
def test_what_the_runtime_has_no_gradient_for(name):
    node, function = EXTENDED[name]
    model, weight = forward_model(node, 2, "n")
    model.opset_import[0].version = 19
    model.ir_version = 9
    x = np.random.default_rng(9).standard_normal((2, 3, *SIZES[:2])).astype(np.float32)
    session = ortgraph.TrainingSession(ortgraph.optimize(ortgraph.from_onnx(model, loss="loss"), "O2").graph)
    require_gradient(session, function, x, weight)
    require_gradient(session, function, x[:1], weight)


def test_a_last_window_in_the_pads_that_shape_inference_counts_is_refused():
    node = "y = AveragePool<kernel_shape=[1,1], strides=[3,3], pads=[0,0,1,1], ceil_mode=1>(t)"
    with pytest.raises(UnsupportedError, match="other sizes"):
        ortgraph.from_onnx(forward_model(node, 2, "2")[0], loss="loss")


def test_a_pool_of_unknown_sizes_is_refused():
    model, _ = forward_model("y = AveragePool<kernel_shape=[2,2], ceil_mode=1>(t)", 2, "n")
    del model.graph.initializer[:]
    model.graph.input.append(onnx.helper.make_tensor_value_info("p", 1, [3, "h", 5]))
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "h"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, 1, 1), np.float32), "q"))
    model.graph.node[0].input[1] = "q"
    with pytest.raises(UnsupportedError, match="spatial sizes must be known"):
        ortgraph.from_onnx(model, loss="loss", trainable=["q"])


def test_column_major_indices_that_are_read_are_refused():
    node = "y0, i = MaxPool<kernel_shape=[2,2], storage_order=1>(t) c = Cast<to=1>(i) y = Mul(y0, c)"
    with pytest.raises(UnsupportedError, match="column-major"):
        ortgraph.from_onnx(forward_model(node, 2, "2")[0], loss="loss")
