"""The evaluator that really rounds: overflows that ONNX Runtime hides, and agreement with float64 and with sessions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.errors import InputError, UnsupportedError
from ortgraph.graph import Signature, TrainingGraph
from ortgraph.manager.numerics import relative_errors
from ortgraph.ops.builder import Builder
from ortgraph.runtime.reference_evaluator import evaluate_reference

ort = pytest.importorskip("onnxruntime")
HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT


def sum_of_squares() -> TrainingGraph:
    """sqrt of the sum of x^2 in float16."""
    x = ir.val("x", HALF, [4096])
    g = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="g")
    b = Builder(g, "test")
    norm = b.op("Sqrt", b.op("ReduceSumSquare", x, keepdims=0, name="squares"))
    loss = b.op("Cast", norm, to=FLOAT)
    loss.name = "loss"
    g.outputs.append(loss)
    return TrainingGraph(ir.Model(g, ir_version=10), Signature(loss="loss", inputs=("x",)))


def test_an_overflow_in_float16_shows_where_onnx_runtime_hides_it():
    graph = sum_of_squares()
    x = (np.random.default_rng(0).standard_normal(4096) * 8).astype(np.float16)
    plain = ort.InferenceSession(ir.to_proto(graph.model).SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.isfinite(plain.run(None, {"x": x})[0])  # computed in float32 throughout
    found = evaluate_reference(graph, {"x": x})
    assert np.isinf(found.values["loss"])
    (overflow,) = found.overflows
    assert overflow.node == "squares" and "ReduceSumSquare" in overflow.text
    assert np.isinf(ortgraph.TrainingSession(graph, check_finite=False).loss({"x": x}))  # lowered between casts
    small = evaluate_reference(graph, {"x": x / 16})
    assert np.isfinite(small.values["loss"]) and small.overflows == ()


def test_without_rounding_it_is_float64(classifier_graph, classifier_batch):
    torch = pytest.importorskip("torch")
    graph, batch = classifier_graph(), classifier_batch()
    exact = evaluate_reference(graph, batch, rounded=False)
    p = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in graph.values.items()}
    h = torch.nn.functional.gelu(p["table"][torch.tensor(batch["ids"]).reshape(-1)] @ p["w1"] + p["b1"])
    h = torch.nn.functional.layer_norm(h, (8,), p["norm.weight"], p["norm.bias"], 1e-5)
    loss = torch.nn.functional.cross_entropy(h @ p["w2"] @ p["table"].T, torch.tensor(batch["labels"]).reshape(-1))
    loss.backward()
    assert float(exact.values["loss"]) == pytest.approx(float(loss), rel=1e-9)  # epsilon is a float32 attribute
    for name, value in p.items():
        np.testing.assert_allclose(exact.values[f"{name}.grad"], value.grad.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_session_computes_what_the_evaluator_says(classifier_graph, classifier_batch, precision):
    batch = classifier_batch()
    graph = ortgraph.optimize(classifier_graph(), f"mark-optimized,cast-precision{{precision={precision}}}").graph
    found = evaluate_reference(graph, batch)
    session = ortgraph.TrainingSession(graph)
    want = {n: found.values[g] for n, g in graph.signature.gradients.items()}
    near = relative_errors(session.gradients(batch), want)
    exact = evaluate_reference(graph, batch, rounded=False)
    far = relative_errors(want, {n: exact.values[g] for n, g in graph.signature.gradients.items()})
    assert session.loss(batch) == pytest.approx(float(found.values["loss"]), rel=1e-3)
    assert np.median(list(near.values())) < 0.3 * np.median(list(far.values()))  # roundings fall the same way, mostly
    assert found.overflows == ()


def test_values_hold_numbers_of_their_types(classifier_graph, classifier_batch):
    graph = ortgraph.optimize(classifier_graph(), "mark-optimized,cast-precision").graph
    found = evaluate_reference(graph, classifier_batch())
    seen = 0
    for node in graph.graph:
        for value in node.outputs:
            array = found.values.get(value.name)
            if array is None or value.dtype not in (ir.DataType.BFLOAT16, FLOAT):
                continue
            assert (array.astype(value.dtype.numpy()).astype(np.float64) == array).all(), value.name
            seen += value.dtype == ir.DataType.BFLOAT16
    assert seen > 10


def test_seeds_states_and_what_is_missing(classifier_graph, classifier_batch):
    graph, batch = classifier_graph(), classifier_batch()
    one, three = (evaluate_reference(graph, batch, loss_gradient=k).values["w1.grad"] for k in (1.0, 3.0))
    np.testing.assert_allclose(3 * one, three, rtol=1e-5)
    stepped = ortgraph.optimize(graph, "mark-optimized,attach-optimizer{optimizer=adamw(lr=0.1)}").graph
    moved = evaluate_reference(stepped, batch).values["update/w1"]
    session = ortgraph.TrainingSession(stepped)
    session.step(batch)
    np.testing.assert_allclose(session.state_dict()["w1"], moved, rtol=1e-5, atol=1e-6)
    scaled = (
        "mark-optimized,cast-precision{precision=fp16},attach-optimizer{optimizer=adamw(lr=0.1;loss_scale=dynamic)}"
    )
    found = evaluate_reference(ortgraph.optimize(graph, scaled).graph, batch)
    np.testing.assert_allclose(found.values["update/w1"], moved, rtol=1e-2, atol=0.02)  # Adam's first step: lr * sign
    assert all(np.isfinite(a).all() for n, a in found.values.items() if n.startswith("update/"))
    graph.values = {}
    with pytest.raises(InputError, match="has no value"):
        evaluate_reference(graph, batch)


def test_kernels_are_not_evaluated(classifier_graph, classifier_batch):
    graph = classifier_graph()
    plain = ortgraph.optimize(graph, "lower{prefer=expansion}").graph
    assert np.isfinite(evaluate_reference(plain, classifier_batch()).values["loss"])
    first = next(iter(plain.graph))
    first.domain = "ortgraph.kernels"
    with pytest.raises(UnsupportedError, match="is not evaluated"):
        evaluate_reference(plain, classifier_batch())
