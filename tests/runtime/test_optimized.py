"""Presets on whatever runtime is installed, without PyTorch: gradients and updates against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.graph import Buffer, Parameter, Signature, State, TrainingGraph
from ortgraph.ops import kernels
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE
from ortgraph.plan.memory.validate import validate
from ortgraph.runtime.detect import detect_runtime

Arrays = dict[str, np.ndarray]
F32, I64 = ir.DataType.FLOAT, ir.DataType.INT64
LEVELS = ("O0", "O1", "O2")


@pytest.fixture(params=["kernels", "no_kernels"], autouse=True)
def with_kernels(request, monkeypatch):
    """With the compiled kernels, and as on a machine without a compiler."""
    if request.param == "no_kernels":
        monkeypatch.setattr(kernels, "_built", lambda: (None, "switched off"))
    elif not kernels.available():
        pytest.skip("no compiler")


def finish(b: Builder, values: Arrays, loss: ir.Value, gradients: dict[str, ir.Value], **roles) -> TrainingGraph:
    """Name and return loss and gradients."""
    named = {"loss": loss, **{f"{k}.grad": v for k, v in gradients.items()}}
    for name, value in named.items():
        value.name = name
    b.graph.outputs.extend(named.values())
    parameters = tuple(Parameter(k, gradient=f"{k}.grad") for k in gradients)
    signature = Signature(loss="loss", parameters=parameters, loss_gradient="loss_gradient", **roles)
    return TrainingGraph(ir.Model(b.graph, ir_version=10), signature, values)


def start(values: Arrays, data: dict[str, tuple[ir.DataType, list[int]]]) -> tuple[Builder, dict[str, ir.Value]]:
    inputs = {k: ir.val(k, dtype=d, shape=s) for k, (d, s) in data.items()}
    for name, array in values.items():
        inputs[name] = ir.val(name, dtype=ir.DataType.from_numpy(array.dtype), shape=list(array.shape))
    inputs["loss_gradient"] = ir.val("loss_gradient", dtype=F32, shape=[])
    graph = ir.Graph(list(inputs.values()), [], nodes=[], opset_imports={"": 18}, name="joint")
    return Builder(graph, "capture"), inputs


def convolution_graph() -> TrainingGraph:
    """Convolution, batch normalization, relu, max pooling, mean, linear, cross-entropy."""
    rng = np.random.default_rng(0)
    shapes = {"conv": (4, 2, 3, 3), "scale": (4,), "shift": (4,), "head": (4, 3)}
    values = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    values |= {"mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)}
    b, v = start(values, {"x": (F32, [3, 2, 6, 6]), "labels": (I64, [3])})
    c = b.op("Conv", v["x"], v["conv"], pads=[1, 1, 1, 1])
    statistics = [v[k] for k in ("scale", "shift", "mean", "var")]
    y, new_mean, new_var, saved, inverse = b.multi(
        "BatchNorm", c, *statistics, outputs=5, domain=COMPOSITE, epsilon=1e-5, momentum=0.1
    )
    r = b.op("Relu", y)
    p, indices = b.multi("MaxPool", r, outputs=2, kernel_shape=[2, 2], strides=[2, 2])
    for value, dtype in ((p, F32), (indices, I64)):
        value.dtype, value.shape = dtype, ir.Shape([3, 4, 3, 3])
    m = b.op("ReduceMean", p, b.ints([2, 3]), keepdims=0)
    ce = {"reduction": "mean", "ignore_index": -100}
    logits = b.op("MatMul", m, v["head"])
    loss, logp, total = b.multi("CrossEntropy", logits, v["labels"], outputs=3, domain=COMPOSITE, **ce)
    dlogits = b.op("CrossEntropyGrad", v["loss_gradient"], logp, v["labels"], None, total, domain=COMPOSITE, **ce)
    dhead = b.op("MatMul", b.op("Transpose", m, perm=[1, 0]), dlogits)
    dm = b.op("MatMul", dlogits, b.op("Transpose", v["head"], perm=[1, 0]))
    spread = b.op("Div", b.op("Unsqueeze", dm, b.ints([2, 3])), b.scalar(9.0, dm))
    dp = b.op("Expand", spread, b.ints([3, 4, 3, 3]))
    dr = b.op("MaxPoolGrad", dp, indices, r, domain=COMPOSITE)
    dy = b.op("ReluGrad", dr, r, domain=COMPOSITE)
    dc, dscale, dshift = b.multi("BatchNormGrad", dy, c, v["scale"], saved, inverse, outputs=3, domain=COMPOSITE)
    absent, dconv = b.multi("ConvGrad", dc, v["x"], v["conv"], outputs=2, domain=COMPOSITE, pads=[1, 1, 1, 1])
    absent.name = ""
    buffers = (Buffer("mean", "mean.next"), Buffer("var", "var.next"))
    new_mean.name, new_var.name = "mean.next", "var.next"
    gradients = {"conv": dconv, "scale": dscale, "shift": dshift, "head": dhead}
    graph = finish(b, values, loss, gradients, inputs=("x", "labels"), buffers=buffers)
    graph.graph.outputs.extend((new_mean, new_var))
    return graph


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float(-np.take_along_axis(logp, labels[..., None], -1).mean())


def convolution_loss(p: Arrays, batch: Arrays) -> float:
    x = np.pad(batch["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    c = np.einsum("nchwij,fcij->nfhw", windows, p["conv"])
    mean, var = c.mean((0, 2, 3), keepdims=True), c.var((0, 2, 3), keepdims=True)
    y = (c - mean) / np.sqrt(var + 1e-5) * p["scale"][:, None, None] + p["shift"][:, None, None]
    pooled = np.maximum(y, 0).reshape(3, 4, 3, 2, 3, 2).max((3, 5))
    return cross_entropy(pooled.mean((2, 3)) @ p["head"], batch["labels"])


def attention_graph() -> TrainingGraph:
    """Rows through three projections, causal attention with two heads, silu, mean square."""
    rng = np.random.default_rng(1)
    values = {k: rng.standard_normal((4, 8)).astype(np.float32) * 0.5 for k in ("wq", "wk", "wv")}
    b, v = start(values, {"x": (F32, [2, 5, 4])})
    split, heads = b.ints([2, 5, 2, 4]), [0, 2, 1, 3]
    q, k, u = (
        b.op("Transpose", b.op("Reshape", b.op("MatMul", v["x"], v[w]), split), perm=heads) for w in ("wq", "wk", "wv")
    )
    options = {"scale": 0.5, "is_causal": 1, "domain": COMPOSITE}
    y, summed = b.multi("Attention", q, k, u, outputs=2, **options)
    s = b.op("Silu", y, domain=COMPOSITE)
    loss = b.op("ReduceMean", b.op("Mul", s, s), b.ints([0, 1, 2, 3]), keepdims=0)
    ds = b.op("Mul", b.op("Mul", s, b.scalar(2.0 / 80.0, s)), v["loss_gradient"])
    dy = b.op("SiluGrad", ds, y, domain=COMPOSITE)
    down = b.multi("AttentionGrad", dy, q, k, u, y, summed, outputs=3, **options)
    rows = b.op("Transpose", b.op("Reshape", v["x"], b.ints([10, 4])), perm=[1, 0])
    gradients = {
        w: b.op("MatMul", rows, b.op("Reshape", b.op("Transpose", d, perm=heads), b.ints([10, 8])))
        for w, d in zip(("wq", "wk", "wv"), down, strict=True)
    }
    return finish(b, values, loss, gradients, inputs=("x",))


def attention_loss(p: Arrays, batch: Arrays) -> float:
    q, k, v = ((batch["x"] @ p[w]).reshape(2, 5, 2, 4).transpose(0, 2, 1, 3) for w in ("wq", "wk", "wv"))
    scores = q @ k.swapaxes(-1, -2) * 0.5 + np.triu(np.full((5, 5), -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = weights / weights.sum(-1, keepdims=True) @ v
    return float(np.mean((y / (1 + np.exp(-y))) ** 2))


def dropout_graph() -> TrainingGraph:
    """loss = sum (dropout(x w))^2, the kept values as output y."""
    values = {"w": np.linspace(0.5, 1.5, 400, dtype=np.float32)}
    states = {"key": np.array(3, np.int64), "draws": np.array(0, np.int64)}
    b, v = start({**values, **states}, {"x": (F32, [6, 400])})
    y, mask = b.multi(
        "Dropout", b.op("Mul", v["x"], v["w"]), v["key"], v["draws"], outputs=2, domain=COMPOSITE, ratio=0.3, node=1
    )
    loss = b.op("ReduceSum", b.op("Mul", y, y), b.ints([0, 1]), keepdims=0)
    dy = b.op("Mul", b.op("Mul", y, b.scalar(2.0, y)), v["loss_gradient"])
    dh = b.op("DropoutGrad", dy, mask, domain=COMPOSITE, ratio=0.3)
    dw = b.op("ReduceSum", b.op("Mul", dh, v["x"]), b.ints([0]), keepdims=0)
    kept, following = b.op("Identity", y), b.op("Add", v["draws"], b.const(np.array(1)))
    kept.name, following.name = "y", "draws.next"
    pairs = (State("key", "key", None, "random_key"), State("draws", "draws", "draws.next", "random_step"))
    graph = finish(b, {**values, **states}, loss, {"w": dw}, inputs=("x",), outputs=("y",), states=pairs)
    graph.graph.outputs.extend((kept, following))
    return graph


def central_differences(loss_of: Callable[[Arrays, Arrays], float], values: Arrays, batch: Arrays, name: str):
    exact = {k: v.astype(np.float64) for k, v in values.items()}
    wide = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in batch.items()}
    result, moved = np.zeros(values[name].shape), exact[name].copy()
    for index in np.ndindex(*result.shape):
        around = []
        for sign in (1, -1):
            moved[index] = exact[name][index] + sign * 1e-5
            around.append(loss_of({**exact, name: moved}, wide))
        moved[index] = exact[name][index]
        result[index] = (around[0] - around[1]) / 2e-5
    return result


MODELS = {"convolution": (convolution_graph, convolution_loss), "attention": (attention_graph, attention_loss)}


def batch_for(name: str, seed: int = 5) -> Arrays:
    rng = np.random.default_rng(seed)
    if name == "convolution":
        return {"x": rng.standard_normal((3, 2, 6, 6)).astype(np.float32), "labels": rng.integers(0, 3, 3)}
    return {"x": rng.standard_normal((2, 5, 4)).astype(np.float32)}


def optimized(graph: TrainingGraph, level: str, **options) -> TrainingGraph:
    return ortgraph.optimize(graph, level, target=detect_runtime().target, verify="types", **options).graph


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name):
    make, loss_of = MODELS[name]
    batch, graph = batch_for(name), make()
    want = {p.name: central_differences(loss_of, graph.values, batch, p.name) for p in graph.signature.trainable}
    for level in LEVELS:
        planned = optimized(graph, level)
        for threads in (1, 2):
            session = ortgraph.TrainingSession(planned, threads=threads, poison=True)
            first, second = session.gradients(batch), session.gradients(batch)
            assert session.loss(batch) == pytest.approx(loss_of(graph.values, batch), rel=1e-5)
            for key, reference in want.items():
                assert np.array_equal(first[key], second[key]), f"{key} differs between runs"
                error = np.linalg.norm(first[key] - reference) / np.linalg.norm(reference)
                assert error < 1e-5, f"{level}, {threads} threads, {key}: {error:.1e}"


@pytest.mark.parametrize("level", LEVELS)
def test_dropout_draws_anew_and_its_gradient_has_the_same_mask(level):
    planned = optimized(dropout_graph(), level, optimizer=ortgraph.optim.AdamW(lr=0.0))
    x = np.random.default_rng(2).standard_normal((6, 400)).astype(np.float32)
    per_thread = []
    for threads in (1, 2):
        session = ortgraph.TrainingSession(planned, threads=threads, poison=True)
        w = session.state_dict()["w"]
        seen = []
        for _ in range(3):
            kept = session.gradients({"x": x})["w"] / (2 * x * x * w / 0.49).sum(0)
            seen.append(session.gradients({"x": x})["w"])
            assert 0.6 < kept.mean() < 0.8
            session.step({"x": x})
        assert not np.array_equal(seen[0], seen[1]) and not np.array_equal(seen[1], seen[2])
        np.testing.assert_array_equal(session.evaluate({"x": x})["y"], x * w)
        per_thread.append(seen)
    assert all(np.array_equal(a, b) for a, b in zip(*per_thread, strict=True)), "masks depend on threads"


def adamw(values: Arrays, gradients: Arrays, moments: dict[str, list[np.ndarray]], step: int, lr: float) -> Arrays:
    """torch.optim.AdamW's rule with its defaults, in float64."""
    result = {}
    for name, g in gradients.items():
        g = g.astype(np.float64)
        m, v = moments.setdefault(name, [np.zeros(g.shape), np.zeros(g.shape)])
        moments[name] = [0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g]
        m, v = moments[name]
        denominator = np.sqrt(v) / np.sqrt(1 - 0.999**step) + 1e-8
        decayed = values[name].astype(np.float64) * (1 - lr * 0.01)
        result[name] = decayed - lr * m / (1 - 0.9**step) / denominator
    return result


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*MODELS, "classifier"])
def test_adamw_steps(level, name, classifier_graph, classifier_batch):
    make = classifier_graph if name == "classifier" else MODELS[name][0]
    planned = optimized(make(), level, optimizer=ortgraph.optim.AdamW(lr=0.03))
    states = []
    for threads in (1, 2):
        session = ortgraph.TrainingSession(planned, threads=threads, poison=True)
        moments: dict[str, list[np.ndarray]] = {}
        losses = []
        for step in range(1, 6):
            batch = classifier_batch(seed=step) if name == "classifier" else batch_for(name, step % 2)
            want = adamw(session.state_dict(), session.gradients(batch), moments, step, 0.03)
            losses.append(session.step(batch))
            state = session.state_dict()
            for key, value in want.items():
                np.testing.assert_allclose(state[key], value, rtol=2e-6, atol=2e-6, err_msg=f"{key}, step {step}")
        assert len(set(losses)) == 5
        states.append(state)
        for program in session.programs:
            validate(program.placement.problem, program.placement.solution)
    assert all(np.array_equal(states[1][k], v) for k, v in states[0].items()), "threads change the result"
    if name == "convolution":
        assert not np.array_equal(states[0]["mean"], np.zeros(4)), "running statistics stand still"


def test_a_saved_graph_trains_on(tmp_path):
    """Captured, saved, loaded, optimized; and planned, saved, loaded: the same losses."""
    graph, batch = convolution_graph(), batch_for("convolution")
    optimizer = ortgraph.optim.AdamW(lr=0.01)
    captured = ortgraph.load(graph.save(tmp_path / "captured.onnx"))
    planned = optimized(captured, "O2", optimizer=optimizer)
    again = ortgraph.load(planned.save(tmp_path / "planned.onnx"))
    losses = []
    for found in (optimized(graph, "O2", optimizer=optimizer), planned, again):
        session = ortgraph.TrainingSession(found, threads=2)
        losses.append([session.step(batch) for _ in range(4)])
    assert losses[0] == losses[1] == losses[2]
