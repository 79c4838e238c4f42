"""Gradients of convolutions of every rank, grouped and padded, with and without a gradient of the input."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402
from ortgraph.ops.runtime_forms import RUNTIME_FORMS  # noqa: E402
from ortgraph.ops.targets import reason_not_run  # noqa: E402

CONVOLUTIONS = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
TRANSPOSED = {1: torch.nn.ConvTranspose1d, 2: torch.nn.ConvTranspose2d}


def check(module, shape):
    torch.manual_seed(0)
    x = torch.randn(4, *shape)
    y = torch.randn_like(module(x))
    loss = torch.nn.MSELoss()
    near = torch.autograd.grad(loss(module(x), y), list(module.parameters()))
    module.double()
    exact = torch.autograd.grad(loss(module(x.double()), y.double()), list(module.parameters()))
    module.float()
    names = [n for n, _ in module.named_parameters()]
    graph = ortgraph.capture(module, (x, y), loss=loss)
    for level in ("O0", "O2"):
        result = ortgraph.optimize(graph, level).graph
        assert all(reason_not_run(n, "onnxruntime-training", 18) is None for n in result.graph)
        for threads in (1, 2):
            got = ortgraph.TrainingSession(result, threads=threads).gradients((x, y))
            for name, want, mine in zip(names, exact, near, strict=True):
                norm = float(want.norm())
                allowed = 4 * float((mine - want).norm()) + 1e-6 * norm
                assert np.linalg.norm(got[name] - want.numpy()) <= allowed, (level, threads, name)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("padding", [0, 1])
def test_input_without_gradient(rank, groups, padding):
    torch.manual_seed(1)
    check(CONVOLUTIONS[rank](8, 8, 3, padding=padding, groups=groups), (8, *(7, 6, 5)[:rank]))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("groups", [1, 4])
def test_input_with_gradient(rank, groups):
    torch.manual_seed(1)
    layer = CONVOLUTIONS[rank]
    module = torch.nn.Sequential(
        layer(4, 8, 3, padding=1), torch.nn.Tanh(), layer(8, 8, 3, padding=2, groups=groups, dilation=2)
    )
    check(module, (4, *(9, 8)[:rank]))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("groups", [1, 4])
def test_transposed(rank, groups):
    torch.manual_seed(1)
    check(TRANSPOSED[rank](8, 8, 3, padding=1, stride=2, groups=groups), (8, *(5, 4)[:rank]))


@pytest.mark.parametrize(
    ("dtype", "dilations", "why"),
    [
        (ir.DataType.FLOAT, [1, 1], None),
        (ir.DataType.FLOAT, [2, 1], "dilated"),
        (ir.DataType.DOUBLE, [1, 1], "float32 only"),
        (ir.DataType.DOUBLE, None, "float32 only"),
    ],
)
def test_the_runtimes_gradient_is_float32_only_with_and_without_dilations(dtype, dilations, why):
    def value(name, *shape):
        return ir.val(name, dtype=dtype, shape=shape)

    attributes = [] if dilations is None else [ir.AttrInt64s("dilations", dilations)]
    inputs = [value("dy", 1, 1, 3, 3), value("x", 1, 1, 5, 5), value("w", 1, 1, 3, 3)]
    node = ir.Node("ortgraph", "ConvGrad", inputs, attributes, num_outputs=3)
    reader = ir.node("Identity", [node.outputs[0]])
    reason = RUNTIME_FORMS["ConvGrad"][0].applies(node)
    assert reader.inputs[0] is node.outputs[0]
    assert reason is None if why is None else why in reason
