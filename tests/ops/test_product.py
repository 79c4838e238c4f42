"""Product: its expansion against float64 in every form, its types, and how lowering treats it."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator

from ortgraph.errors import UnsupportedError
from ortgraph.graph import TrainingGraph
from ortgraph.ops import Builder
from ortgraph.ops.alternatives import alternatives
from ortgraph.ops.expand import expand_composites
from ortgraph.ops.spec import spec_of
from ortgraph.ops.targets import STOCK, TRAINING
from ortgraph.ops.work import work_of

FLOAT, BF16, HALF, DOUBLE = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT16, ir.DataType.DOUBLE
ACTIVATIONS = {
    "none": lambda z: z, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "relu": F.relu,
    "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def graph_of(shapes, dtypes, outputs=1, **attributes):
    """A graph of one Product; a shape of None leaves the input out."""
    values = [None if s is None else ir.val(f"x{i}", t, s) for i, (s, t) in enumerate(zip(shapes, dtypes, strict=True))]
    graph = ir.Graph([v for v in values if v is not None], [], nodes=[], opset_imports={"": 18}, name="product")
    made = Builder(graph, "test").multi("Product", *values, outputs=outputs, domain="ortgraph", **attributes)
    graph.outputs.extend(made)
    return TrainingGraph(ir.Model(graph, ir_version=10))


@pytest.mark.parametrize("trans", list(itertools.product((0, 1), (0, 1))))
@pytest.mark.parametrize("batch", [((), ()), ((3,), ()), ((2, 1), (1, 3)), ((), (4,))], ids=str)
def test_expansion_in_float64(operator_case, trans, batch):
    a = numbers(*batch[0], *((5, 4) if trans[0] else (4, 5)))
    b = numbers(*batch[1], *((6, 5) if trans[1] else (5, 6)), seed=1)
    left = a.swapaxes(-1, -2) if trans[0] else a
    right = b.swapaxes(-1, -2) if trans[1] else b
    product = left @ right
    bias, addend = numbers(6, seed=2), numbers(*product.shape, seed=3)
    for activation, function in ACTIVATIONS.items():
        z = 0.5 * product + bias
        case = operator_case(
            "Product", [a, b, bias, addend], 2, transA=trans[0], transB=trans[1], alpha=0.5, activation=activation,
            to=int(DOUBLE),
        )  # fmt: skip
        y, found = case.reference()
        assert np.allclose(found, z, rtol=1e-12, atol=1e-12)
        assert np.allclose(y, function(torch.tensor(z)).numpy() + addend, rtol=1e-9, atol=1e-12)


def test_operands_are_rounded_and_sums_are_not():
    a = np.array([[1 + 2**-9, 1 + 2**-7], [3.0, 2**-12]], np.float32)
    b = np.array([[1.0], [1 + 2**-9]], np.float32)
    for precision, dtype in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16), ("fp32", np.float32)):
        graph = graph_of([[2, 2], [2, 1]], [FLOAT, FLOAT], precision=precision, to=int(FLOAT))
        expand_composites(graph)
        found = ReferenceEvaluator(ir.serde.serialize_model(graph.model)).run(None, {"x0": a, "x1": b})[0]
        wanted = a.astype(dtype).astype(np.float32) @ b.astype(dtype).astype(np.float32)
        assert found.dtype == np.float32 and np.array_equal(found, wanted)


@pytest.mark.parametrize("a,b,y", list(itertools.product((FLOAT, BF16, HALF), repeat=3)))
def test_types_and_shapes_in_every_combination(a, b, y):
    graph = graph_of(
        [["n", 7, 4], [5, 4], [5], ["n", 7, 5]], [a, b, FLOAT, y], 2, transB=1, to=int(y), precision="bf16"
    )
    node = graph.graph[0]
    assert [(o.dtype, str(o.shape)) for o in node.outputs] == [(y, "[n,7,5]")] * 2
    expand_composites(graph)
    assert [o.dtype for o in graph.graph.outputs] == [y, y]


def test_flops_and_work():
    node = graph_of([[3, 6, 4], [4, 5]], [FLOAT, FLOAT]).graph[0]
    assert work_of(node).flops == spec_of(node).flops(node) == 2 * 3 * 6 * 4 * 5
    turned = graph_of([[3, 4, 6], [3, 5, 4]], [FLOAT, FLOAT], transA=1, transB=1, precision="bf16").graph[0]
    assert work_of(turned).flops == 2 * 3 * 6 * 4 * 5
    assert work_of(turned).kind == "product" and work_of(turned).names[0] == "product:bf16:TT"


@pytest.mark.parametrize("target", [TRAINING, STOCK])
def test_alternatives(target):
    node = graph_of([[8, 6], [6, 5]], [BF16, FLOAT], precision="bf16", to=int(BF16)).graph[0]
    assert [a.name for a in alternatives(node, target)] == ["kernel", "expansion"]
    assert [a.name for a in alternatives(node, target, kernels=False)] == ["expansion"]


def test_kernel_is_refused_for_vectors_double_and_types_that_differ():
    from ortgraph.ops import kernels

    assert kernels.reason(graph_of([[8, 6], [6, 5]], [BF16, FLOAT], to=int(HALF)).graph[0]) is None
    assert "matrices" in (kernels.reason(graph_of([[6], [6, 5]], [FLOAT, FLOAT]).graph[0]) or "")
    assert "takes A" in (kernels.reason(graph_of([[8, 6], [6, 5]], [DOUBLE, FLOAT]).graph[0]) or "")
    mixed = graph_of([[8, 6], [6, 5], None, [8, 5]], [FLOAT, FLOAT, FLOAT, FLOAT], to=int(BF16)).graph[0]
    assert "one type" in (kernels.reason(mixed) or "")


@pytest.mark.parametrize("attributes", [{"precision": "fp8"}, {"activation": "elu"}])
def test_unknown_attribute_values_are_refused(attributes):
    with pytest.raises(UnsupportedError, match="unknown"):
        expand_composites(graph_of([[8, 6], [6, 5]], [FLOAT, FLOAT], **attributes))
