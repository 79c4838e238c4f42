"""The exported model: standard operators, evaluation mode, original names."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from ortgraph.errors import InputError
from ortgraph.graph import Buffer, Parameter, Signature, State, TrainingGraph, load
from ortgraph.manager import registry
from ortgraph.optim import AdamW
from ortgraph.passes.lowering.attach_optimizer import AttachOptimizer
from ortgraph.runtime.inference_export import keep_evaluation_form
from ortgraph.runtime.session import TrainingSession


def convolution_graph(bench, dropout: float = 0.5) -> TrainingGraph:
    """y = dropout(batch norm(conv x)) with updated statistics and a random state; loss = mean y^2; gradient of w."""
    rng = np.random.default_rng(0)
    t = bench()
    x = t.input("x", rng.standard_normal((4, 2, 5, 5)).astype(np.float32))
    arrays = {
        "w": rng.standard_normal((3, 2, 3, 3)), "bn.weight": rng.standard_normal(3), "bn.bias": rng.standard_normal(3),
        "bn.running_mean": rng.standard_normal(3), "bn.running_var": rng.random(3) + 0.5,
    }  # fmt: skip
    p = {n: t.input(n, a.astype(np.float32)) for n, a in arrays.items()}
    key, step = t.input("key", np.array(3, np.int64)), t.input("random_step", np.array(0, np.int64))
    seed = t.input("loss_gradient", np.array(1, np.float32))
    c = t.op("Conv", x, p["w"], kernel_shape=[3, 3])
    n, mean, var, saved, inv = t.build.multi(
        "BatchNorm", c, p["bn.weight"], p["bn.bias"], p["bn.running_mean"], p["bn.running_var"], outputs=5,
        domain="ortgraph", epsilon=1e-5, momentum=0.1,
    )  # fmt: skip
    y, mask = t.build.multi("Dropout", n, key, step, outputs=2, domain="ortgraph", ratio=dropout, node=1)
    out = t.op("Identity", y, name="y")
    loss = t.op("ReduceMean", t.op("Mul", y, y), keepdims=0, name="loss")
    dy = t.op("Mul", t.op("Mul", y, t.build.scalar(2.0 / (4 * 3 * 9), y)), seed)
    dn = t.op("DropoutGrad", dy, mask, domain="ortgraph", ratio=dropout)
    dc, dweight, dbias = t.build.multi("BatchNormGrad", dn, c, p["bn.weight"], saved, inv, outputs=3, domain="ortgraph")
    _, dw = t.build.multi("ConvGrad", dc, x, p["w"], outputs=2, domain="ortgraph", strides=[1, 1], pads=[0, 0, 0, 0],
                          dilations=[1, 1], group=1)  # fmt: skip
    step_next = t.op("Add", step, t.build.const(1, np.int64), name="random_step.next")
    for value, name in ((mean, "mean.next"), (var, "var.next"), (dw, "dw"), (dweight, "dweight"), (dbias, "dbias")):
        value.name = name
    t.output(loss, out, mean, var, dw, dweight, dbias, step_next)
    signature = Signature(
        loss="loss", inputs=("x",), outputs=("y",), loss_gradient="loss_gradient",
        parameters=(Parameter("w", gradient="dw"), Parameter("bn.weight", gradient="dweight"),
                    Parameter("bn.bias", gradient="dbias")),
        buffers=(Buffer("bn.running_mean", "mean.next"), Buffer("bn.running_var", "var.next")),
        states=(State("random_key", "key", None, "random_key"),
                State("random_step", "random_step", "random_step.next", "random_step")),
    )  # fmt: skip
    values = {n: t.values[n] for n in (*arrays, "key")}
    return TrainingGraph(ir.Model(t.graph, ir_version=10), signature, values)


def evaluation(values, x):
    """conv and batch norm with the running statistics, in numpy."""
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), axis=(2, 3))
    c = np.einsum("bchwij,ocij->bohw", windows, values["w"].astype(np.float64))
    shape = (1, 3, 1, 1)
    v = {k.removeprefix("bn."): a.astype(np.float64).reshape(shape) for k, a in values.items() if k.startswith("bn.")}
    return (c - v["running_mean"]) / np.sqrt(v["running_var"] + 1e-5) * v["weight"] + v["bias"]


def check(path, values, x) -> onnx.ModelProto:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version <= 10 and [o.domain for o in model.opset_import] == [""]
    (found,) = ReferenceEvaluator(model).run(["y"], {"x": x})
    assert np.allclose(found, evaluation(values, x), atol=1e-4)
    return model


X = np.random.default_rng(5).standard_normal((4, 2, 5, 5)).astype(np.float32)


@pytest.mark.parametrize("stage", ["captured", "stepped", "lowered"])
def test_dropout_and_batch_norm_in_evaluation_mode(bench, tmp_path, stage) -> None:
    from ortgraph.runtime.detect import detect_runtime

    graph = convolution_graph(bench)
    if stage != "captured":
        AttachOptimizer.of(AdamW(lr=0.1)).call(graph.model)
    if stage == "lowered":
        registry.get("lower")(target=detect_runtime().target).call(graph.model)
        graph.signature = graph.signature.replace(stage="lowered")
        graph = load(graph.save(tmp_path / "lowered.onnx"))
    session = TrainingSession(graph, threads=1)
    for _ in range(3 if stage != "captured" else 0):
        session.step({"x": X + 1})
    state = session.state_dict()
    model = check(session.export_inference(tmp_path / "m.onnx"), state, X)
    assert [i.name for i in model.graph.input] == ["x"] and [o.name for o in model.graph.output] == ["y"]
    assert {"w", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"} <= {
        i.name for i in model.graph.initializer
    }
    out = session.evaluate({"x": X})
    assert np.allclose(out["y"], evaluation(state, X), atol=1e-4)
    assert out["loss"] == pytest.approx(float((out["y"] ** 2).mean()), rel=1e-4)


def test_training_mode_draws_anew_and_updates_statistics(bench) -> None:
    graph = convolution_graph(bench)
    AttachOptimizer.of(AdamW(lr=0.0, weight_decay=0.0)).call(graph.model)
    session = TrainingSession(graph, threads=1)
    first = session.loss({"x": X})
    assert session.loss({"x": X}) == first, "looking at the loss advances nothing"
    losses = [session.step({"x": X}) for _ in range(6)]
    assert losses[0] == first and len(set(losses)) == 6
    mean = evaluation({**{k: np.ones(3, np.float32) for k in ("bn.weight",)}, "w": graph.values["w"],
                       "bn.bias": np.zeros(3, np.float32), "bn.running_mean": np.zeros(3, np.float32),
                       "bn.running_var": np.ones(3, np.float32)}, X).mean((0, 2, 3)) * np.sqrt(1 + 1e-5)  # fmt: skip
    want = graph.values["bn.running_mean"].astype(np.float64)
    for _ in range(6):
        want = 0.9 * want + 0.1 * mean
    assert np.allclose(session.state_dict()["bn.running_mean"], want, atol=1e-5)


def test_accumulating_advances_draws_and_statistics(bench) -> None:
    graph = convolution_graph(bench)
    AttachOptimizer.of(AdamW(lr=0.0, weight_decay=0.0), accumulation_steps=3).call(graph.model)
    parts = TrainingSession(graph, threads=1)
    graph = convolution_graph(bench)
    AttachOptimizer.of(AdamW(lr=0.0, weight_decay=0.0)).call(graph.model)
    whole = TrainingSession(graph, threads=1)
    assert [parts.accumulate({"x": X}), parts.accumulate({"x": X}), parts.step({"x": X})] == [
        whole.step({"x": X}) for _ in range(3)
    ]
    a, b = parts.state_dict(), whole.state_dict()
    assert all(np.array_equal(a[k], b[k]) for k in a)
    assert int(parts.optimizer_state_dict()["random_step"]) == 3 and int(parts.optimizer_state_dict()["step"]) == 1


def test_resume_continues_the_random_sequence(bench, tmp_path) -> None:
    def make() -> TrainingSession:
        graph = convolution_graph(bench)
        AttachOptimizer.of(AdamW(lr=0.01)).call(graph.model)
        return TrainingSession(graph, threads=1)

    whole, one, two = make(), make(), make()
    losses = [whole.step({"x": X}) for _ in range(4)]
    assert [one.step({"x": X}) for _ in range(2)] == losses[:2]
    two.load_checkpoint(one.save_checkpoint(tmp_path / "c"))
    assert [two.step({"x": X}) for _ in range(2)] == losses[2:]


def test_lowered_without_its_evaluation_form(bench, tmp_path) -> None:
    from ortgraph.runtime.detect import detect_runtime

    lower = registry.get("lower")(target=detect_runtime().target)
    graph = convolution_graph(bench)
    lower.call(graph.model)
    graph.model.metadata_props.pop("ortgraph.evaluation", None)
    graph.signature = graph.signature.replace(stage="lowered")
    session = TrainingSession(graph, threads=1)
    assert set(session.gradients({"x": X})) == {"w", "bn.weight", "bn.bias"}
    for call in (lambda: session.evaluate({"x": X}), lambda: session.export_inference(tmp_path / "m.onnx")):
        with pytest.raises(InputError, match="without its evaluation form"):
            call()


def test_keeping_the_form_is_done_once(bench) -> None:
    graph = convolution_graph(bench)
    assert keep_evaluation_form(graph) and not keep_evaluation_form(graph)


def test_labels_and_loss_are_left_out(classifier_graph, classifier_batch, tmp_path) -> None:
    graph = classifier_graph(batch="batch")
    session = TrainingSession(graph, threads=1)
    path = session.export_inference(tmp_path / "m.onnx")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [i.name for i in model.graph.input] == ["ids"] and [o.name for o in model.graph.output] == ["logits"]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {n.op_type for n in model.graph.node}.isdisjoint({"CrossEntropy", "Gelu", "LogSoftmax"})
    import onnxruntime as ort

    runner = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for size in (4, 1):
        batch = classifier_batch(batch=size)
        (found,) = runner.run(["logits"], {"ids": batch["ids"]})
        assert np.allclose(found, session.evaluate(batch)["logits"], atol=1e-5)


def test_model_with_only_a_loss(linear_graph, tmp_path) -> None:
    session = TrainingSession(linear_graph, threads=1)
    model = onnx.load(session.export_inference(tmp_path / "m.onnx"))
    x = np.ones((4, 3), np.float32)
    (found,) = ReferenceEvaluator(model).run(["loss"], {"x": x})
    assert float(found) == pytest.approx(session.loss({"x": x}), rel=1e-5)


def test_bad_path(linear_graph, tmp_path) -> None:
    session = TrainingSession(linear_graph, threads=1)
    for path in (tmp_path / "m.pt", tmp_path / "absent" / "m.onnx"):
        with pytest.raises(InputError, match="an inference model is an .onnx file"):
            session.export_inference(path)
