"""Helpers for tests of from_onnx: models from text, running joint graphs, central differences in float64."""

from __future__ import annotations

import types

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from ortgraph.capture.from_onnx import from_onnx
from ortgraph.graph import TrainingGraph
from ortgraph.graph.training_graph import TrainingGraph as Graph
from ortgraph.ops.expand import expand_composites


def make_model(text: str, opset: int = 18, ir_version: int = 8, **weights: np.ndarray) -> onnx.ModelProto:
    """A model from ONNX text; inputs named in ``weights`` become initializers."""
    header = f'<ir_version: {ir_version}, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
    model = onnx.parser.parse_model(header + text)
    names = {k.replace("__", "."): v for k, v in weights.items()}
    kept = [v for v in model.graph.input if v.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in names.items())
    return model


def run_graph(
    graph: TrainingGraph, batch: dict[str, np.ndarray], threads: int = 1, seed: float = 1.0
) -> dict[str, np.ndarray]:
    """Every output of a captured graph, composites expanded, on ONNX Runtime without its optimizers."""
    import onnxruntime

    lowered: Graph = graph.clone()
    expand_composites(lowered)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(lowered.model).SerializeToString(), options)
    feeds = {**graph.values, **batch}
    if graph.signature.loss_gradient is not None:
        feeds[graph.signature.loss_gradient] = np.asarray(seed, np.float32)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def run_model(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output of a forward model on ONNX Runtime without its optimizers."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def _wide_tensor(tensor: onnx.TensorProto) -> onnx.TensorProto:
    array = onnx.numpy_helper.to_array(tensor)
    return onnx.numpy_helper.from_array(array.astype(np.float64) if array.dtype == np.float32 else array, tensor.name)


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float64."""
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    for tensor in twin.graph.initializer:
        tensor.CopyFrom(_wide_tensor(tensor))
    for value in (*twin.graph.input, *twin.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for node in twin.graph.node:
        for attribute in node.attribute:
            if node.op_type in ("Constant", "ConstantOfShape") and attribute.name == "value":
                attribute.t.CopyFrom(_wide_tensor(attribute.t))
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = onnx.TensorProto.DOUBLE
    return twin


def _wide(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}


def central_differences(
    model: onnx.ModelProto, loss: str, batch: dict[str, np.ndarray], names: list[str], step: float = 1e-5
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and d loss / d initializer, in float64 with ONNX's reference implementation."""
    twin = widen(model)
    values = {t.name: onnx.numpy_helper.to_array(t) for t in twin.graph.initializer}
    for tensor in [t for t in twin.graph.initializer if t.name in names]:
        twin.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        twin.graph.initializer.remove(tensor)
    evaluator = ReferenceEvaluator(twin)
    feeds = _wide({**batch, **{n: values[n] for n in names}})

    def evaluate(**changed: np.ndarray) -> float:
        return float(np.asarray(evaluator.run([loss], {**feeds, **changed})[0]).reshape(()))

    result = {}
    for name in names:
        gradient = np.zeros(values[name].shape)
        for index in np.ndindex(*values[name].shape):
            sides = []
            for sign in (1.0, -1.0):
                moved = feeds[name].copy()
                moved[index] += sign * step
                sides.append(evaluate(**{name: moved}))
            gradient[index] = (sides[0] - sides[1]) / (2 * step)
        result[name] = gradient
    return evaluate(), result


def assert_close(got: np.ndarray, want: np.ndarray, name: str, tolerance: float = 2e-5) -> None:
    scale = float(np.linalg.norm(want)) + 1e-3
    error = float(np.linalg.norm(got.astype(np.float64) - want)) / scale
    assert got.shape == want.shape, f"{name}: {got.shape} {want.shape}"
    assert error < tolerance, f"{name}: relative error {error:.2e}\n got {got}\nwant {want}"


def check_model(
    model: onnx.ModelProto, batch: dict[str, np.ndarray], loss: str = "loss", tolerance: float = 2e-5, **options: object
) -> TrainingGraph:
    """Capture, run at 1 and 2 threads, and compare the loss and every gradient with central differences."""
    graph = from_onnx(model, loss=loss, **options)
    names = [p.name for p in graph.signature.trainable]
    expected, want = central_differences(model, loss, batch, names)
    for threads in (1, 2):
        outputs = run_graph(graph, batch, threads)
        np.testing.assert_allclose(outputs[graph.signature.loss].reshape(()), expected, rtol=2e-5, atol=1e-6)
        for name in names:
            assert_close(outputs[f"{name}.grad"], want[name], name, tolerance)
    return graph


@pytest.fixture
def onnx_tools() -> types.SimpleNamespace:
    """make_model, run_model, run_graph, central_differences, assert_close, check_model."""
    return types.SimpleNamespace(
        make_model=make_model, run_model=run_model, run_graph=run_graph, central_differences=central_differences,
        assert_close=assert_close, check_model=check_model,
    )  # fmt: skip
