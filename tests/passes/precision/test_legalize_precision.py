"""Casts around what the processor cannot run on low values, and the table that says what it can."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.graph import Signature, TrainingGraph
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE, KERNELS
from ortgraph.ops.targets import MOVES_LOW, low_reason

ort = pytest.importorskip("onnxruntime")
BF16, FLOAT, INT64 = ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.INT64


def constant(b, array, low):
    """Floats in the low type, integers as they are."""
    return b.op("Cast", b.const(array), to=low) if array.dtype.kind == "f" else b.const(array)


def in_low(low, op_type, shape, *constants, domain="", outputs=1, **attributes):
    """loss = sum of float32(op(low(x))); x is float32."""
    x = ir.val("x", FLOAT, shape)
    g = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="g")
    b = Builder(g, "test")
    inner = b.op("Cast", x, to=low)
    more = [inner if isinstance(c, str) else constant(b, c, low) for c in constants]
    made = b.multi(op_type, inner, *more, outputs=outputs, domain=domain, **attributes)
    for value in made:
        value.type = ir.TensorType(low)
    y = b.op("Cast", made[0], to=FLOAT)
    y.name = "y"
    loss = b.op("ReduceSum", y, keepdims=0)
    loss.name = "loss"
    g.outputs.extend([loss, y])
    return TrainingGraph(ir.Model(g, ir_version=10), Signature(loss="loss", inputs=("x",), outputs=("y",)))


MOVEMENT = {
    "Concat": ([2, 3], ["x"], {"axis": 0}),
    "Flatten": ([2, 3, 4], [], {"axis": 1}),
    "Gather": ([4, 3], [np.array([1, 0])], {}),
    "GatherElements": ([2, 3], [np.array([[0, 1, 1]])], {}),
    "GatherND": ([4, 3], [np.array([[1], [0]])], {}),
    "Identity": ([4, 3], [], {}),
    "Reshape": ([4, 3], [np.array([3, 4])], {}),
    "Slice": ([4, 3], [np.array([1]), np.array([3])], {}),
    "Split": ([4, 3], [], {"axis": 0, "num_outputs": 2}),
    "Squeeze": ([1, 3], [np.array([0])], {}),
    "Transpose": ([2, 3, 4], [], {"perm": [0, 2, 1]}),
    "Unsqueeze": ([3], [np.array([0])], {}),
}


def runs(graph):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(
        ir.to_proto(graph.model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("low", [BF16, ir.DataType.FLOAT16])
@pytest.mark.parametrize("op", sorted(MOVES_LOW))
def test_the_table_of_movement_is_what_the_runtime_runs(op, low, tmp_path):
    shape, constants, attributes = MOVEMENT[op]
    graph = in_low(low, op, shape, *constants, outputs=2 if op == "Split" else 1, **attributes)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    session = runs(graph)
    got = session.run(["y"], {"x": x})[0]
    assert set(np.unique(got)) <= set(np.unique(x.astype(low.numpy()).astype(np.float32)))
    assert all(low_reason(n) is None for n in graph.graph)


@pytest.mark.parametrize(("op", "shape", "constants", "attributes"), [
    ("Expand", [1, 3], [np.array([2, 3])], {}),
    ("Pad", [2, 3], [np.array([0, 1, 0, 1])], {}),
    ("Tile", [2, 3], [np.array([2, 1])], {}),
    ("Relu", [2, 3], [], {}),
    ("Add", [2, 3], [np.array([[1.5, 2.0, 0.1]], np.float32)], {}),
    ("MatMul", [2, 3], [np.ones((3, 2), np.float32)], {}),
    ("Softmax", [2, 3], [], {}),
    ("ReduceMax", [2, 3], [], {}),
])  # fmt: skip
def test_anything_else_runs_between_casts(op, shape, constants, attributes):
    graph = in_low(BF16, op, shape, *constants, **attributes)
    with pytest.raises(Exception, match="NOT_IMPLEMENTED|Could not find an implementation"):
        runs(graph)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    lowered = ortgraph.optimize(graph, "lower", verify="types")
    assert lowered.report.passes[0].counts["widened"] == 1
    assert any("between casts" in r.reason and op in r.reason for r in lowered.report.passes[0].refusals)
    again = ortgraph.optimize(lowered.graph, "legalize-precision")
    assert not again.report.passes[0].modified
    from ortgraph.runtime.reference_evaluator import evaluate_reference

    want = evaluate_reference(graph, {"x": x}).values["y"]
    got = ortgraph.TrainingSession(graph, check_finite=False).results({"x": x})["y"]
    np.testing.assert_array_equal(got, want)
    assert (got == got.astype(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_convolution_in_bfloat16():
    weight = np.random.default_rng(1).standard_normal((4, 3, 3, 3)).astype(np.float32)
    graph = in_low(BF16, "Conv", [2, 3, 6, 6], weight)
    graph.graph.outputs[1].shape = ir.Shape([2, 4, 4, 4])
    graph.graph.outputs[1].producer().inputs[0].shape = ir.Shape([2, 4, 4, 4])
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)
    rounded = [a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in (x, weight)]
    got = ortgraph.TrainingSession(graph).results({"x": x})["y"]
    torch = pytest.importorskip("torch")
    want = torch.nn.functional.conv2d(*map(torch.from_numpy, rounded)).numpy()
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-3)


def test_composites_without_a_low_form_are_lowered_between_casts():
    graph = in_low(BF16, "LogSoftmaxGrad", [2, 3], "x", domain=COMPOSITE, axis=-1)
    result = ortgraph.optimize(graph, "lower{prefer=expansion}", verify="types")
    assert result.report.passes[0].counts["widened"] == 1
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    assert np.isfinite(ortgraph.TrainingSession(result.graph).loss({"x": x}))


def test_nodes_of_our_domains_are_left_alone():
    x = ir.val("x", BF16, [2])
    assert low_reason(ir.node("Anything", [x], domain=KERNELS)) is None
    assert low_reason(ir.node("Fused_1", [x], domain="ortgraph.generated")) is None
    assert "no CPU kernel for BFLOAT16" in low_reason(ir.node("Gelu", [x], domain=COMPOSITE))
    assert low_reason(ir.node("Gelu", [ir.val("y", FLOAT, [2])], domain=COMPOSITE)) is None


def test_a_bfloat16_parameter_is_bound_trained_on_and_saved(tmp_path):
    graph = in_low(BF16, "Mul", [2, 3], np.ones((1, 3), np.float32))
    session = ortgraph.TrainingSession(graph, poison=True)
    x = np.ones((2, 3), np.float32) * 1.001
    assert session.loss({"x": x}) == 6.0
    session.check_memory({"x": x}, "loss")
    assert int(BF16) == onnx.TensorProto.BFLOAT16
