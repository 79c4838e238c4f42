"""On-device artifacts: what is read trains, what is written trains to the same losses as the original."""

# ruff: noqa: E501 - a model is one line of text

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnxruntime
import pytest

import ortgraph
from ortgraph.capture.artifacts import OptimizerSpec, read_artifacts, write_artifacts
from ortgraph.capture.from_onnx import from_onnx
from ortgraph.errors import InputError, UnsupportedError
from ortgraph.passes.pipelines import CANONICAL, FUSION, MATMUL

api = pytest.importorskip("onnxruntime.training.api")
artifacts = pytest.importorskip("onnxruntime.training.artifacts")


def _values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"table": (7, 4), "scale": (4,), "bias": (4,), "w": (4, 3), "fixed": (3,)}
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def _forward(onnx_tools) -> onnx.ModelProto:
    values = _values()
    inputs = ", ".join(f"float[{','.join(map(str, v.shape))}] {k}" for k, v in values.items())
    text = f"""g (int64[N] x, {inputs}) => (float[N,3] output) {{
        e = Gather(table, x) n, m, i = LayerNormalization(e, scale, bias) h = Relu(n) o = MatMul(h, w)
        output = Add(o, fixed) }}"""
    return onnx_tools.make_model(text, opset=17, **values)


@pytest.fixture
def original(tmp_path, onnx_tools):
    """An artifact folder made by ONNX Runtime: a frozen parameter, an embedding, a layer norm."""

    def make(optimizer: str) -> pathlib.Path:
        folder = tmp_path / f"original-{optimizer}"
        folder.mkdir()
        artifacts.generate_artifacts(
            _forward(onnx_tools), requires_grad=["table", "scale", "bias", "w"], frozen_params=["fixed"],
            loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType[optimizer],
            artifact_directory=str(folder), prefix="",
        )  # fmt: skip
        return folder

    return make


def _mended(folder: pathlib.Path) -> pathlib.Path:
    """ONNX Runtime writes its optimizer model at an IR version that it refuses itself."""
    path = folder / "optimizer_model.onnx"
    model = onnx.load_model(path)
    model.ir_version = 8
    onnx.save_model(model, path)
    return folder


def _train(folder: pathlib.Path, micro_batches: int = 1) -> tuple[list[float], float, dict[str, np.ndarray]]:
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(0.05)
    rng = np.random.default_rng(1)
    losses = []
    module.train()
    for _ in range(4):
        for _ in range(micro_batches):
            losses.append(float(np.asarray(module(rng.integers(0, 7, 6), rng.integers(0, 3, 6))).reshape(-1)[0]))
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    evaluated = float(np.asarray(module(rng.integers(0, 7, 5), rng.integers(0, 3, 5))).reshape(-1)[0])
    return losses, evaluated, {name: np.array(p.data) for name, p in state.parameters}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("passes", [None, CANONICAL, f"{CANONICAL},{FUSION},{CANONICAL},{MATMUL},mark-optimized"])
def test_round_trip_trains_to_the_same_losses(optimizer, micro_batches, passes, original, tmp_path):
    source = original(optimizer)
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    graph = read_artifacts(source)
    assert {p.name for p in graph.signature.trainable} == {"table", "scale", "bias", "w"}
    assert [p.name for p in graph.signature.parameters if not p.trainable] == ["fixed"]
    assert graph.signature.inputs == ("x", "labels")
    if passes is not None:
        graph = ortgraph.optimize(graph, passes, verify="types").graph
    written = write_artifacts(graph, tmp_path / "written")
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before, "the input folder was touched"
    want, got = _train(_mended(source), micro_batches), _train(written, micro_batches)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    assert got[2].keys() == want[2].keys()
    for name, value in want[2].items():
        np.testing.assert_allclose(got[2][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert len(set(want[0])) > 4 * micro_batches - 1, "nothing was trained"


def test_a_mask_times_a_reciprocal_loads(onnx_tools, tmp_path):
    """ONNX Runtime 1.19.2 dies while it turns c * (1 / x) into c / x when c is a Cast: it must not meet that."""
    text = """g (float[5,4] x, float[4,3] w) => (float loss) { zero = Constant<value=float {0.0}>()
        one = Constant<value=float {1.0}>() h = MatMul(x, w) p = Greater(h, zero) c = Cast<to=1>(p)
        n = ReduceSum<keepdims=0>(c) i = Div(one, n) m = Mul(c, i) y = Mul(h, m) loss = ReduceSum<keepdims=0>(y) }"""
    w, x = _values()["w"], np.random.default_rng(2).standard_normal((5, 4)).astype(np.float32)
    folder = write_artifacts(from_onnx(onnx_tools.make_model(text, w=w), "loss"), tmp_path / "made")
    for name in ("training_model.onnx", "eval_model.onnx"):
        nodes = list(onnx.load_model(folder / name).graph.node)
        made_by = {o: n.op_type for n in nodes for o in n.output}
        numerators = [made_by.get(n.input[0]) for n in nodes if n.op_type == "Div"]
        assert numerators and None not in numerators and "Constant" not in numerators
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    h = x @ w
    for mode in (module.train, module.eval):
        mode()
        np.testing.assert_allclose(np.asarray(module(x)).reshape(()), h[h > 0].mean(), rtol=1e-5)


POOL = """g (float[N,2,9,9] x, float[3,2,3,3] w) => (float loss) {{ h = Conv(x, w)
    p = {}Pool<kernel_shape=[2,2],strides=[2,2]>(h) q = Mul(p, p) loss = ReduceMean<keepdims=0>(q) }}"""


@pytest.mark.parametrize("kind", ["Max", "Average"])
def test_pooling_wants_a_batch_of_known_size(kind, onnx_tools, tmp_path):
    """The runtime's kernels read the sizes from the file, and take the process down where it holds a name."""
    w = np.linspace(-1, 1, 54, dtype=np.float32).reshape(3, 2, 3, 3)
    model = onnx_tools.make_model(POOL.format(kind), w=w)
    with pytest.raises(UnsupportedError, match="sizes of symbolic dimensions"):
        write_artifacts(from_onnx(model, "loss"), tmp_path / "made")
    assert not (tmp_path / "made").exists()
    graph = ortgraph.optimize(from_onnx(model, "loss"), "bind-shapes{sizes=N:4}").graph
    folder = write_artifacts(graph, tmp_path / "made", OptimizerSpec("SGDOptimizerV2"))
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(0.1)
    x = np.random.default_rng(4).standard_normal((4, 2, 9, 9)).astype(np.float32)
    session = ortgraph.TrainingSession(graph, threads=1)
    module.train()
    np.testing.assert_allclose(np.asarray(module(x)).reshape(()), session.loss({"x": x}), rtol=1e-5)
    optimizer.step()
    want = w - np.float32(0.1) * session.gradients({"x": x})["w"]
    np.testing.assert_allclose(np.array(state.parameters["w"].data), want, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_read_graph_equal_those_of_the_forward_model(original, onnx_tools):
    graph = read_artifacts(original("AdamW"))
    again = from_onnx(_forward(onnx_tools), "cross_entropy", ["table", "scale", "bias", "w"])
    rng = np.random.default_rng(4)
    batch = {"x": rng.integers(0, 7, 6), "labels": rng.integers(0, 3, 6)}
    for threads in (1, 2):
        got, want = onnx_tools.run_graph(graph, batch, threads), onnx_tools.run_graph(again, batch, threads)
        np.testing.assert_allclose(got[graph.signature.loss], want["loss"], rtol=1e-6)
        for name in ("table", "scale", "bias", "w"):
            onnx_tools.assert_close(got[f"{name}.grad"], want[f"{name}.grad"].astype(np.float64), name, 1e-6)


def test_the_seed_scales_every_gradient(original, onnx_tools):
    graph = read_artifacts(original("AdamW"))
    batch = {"x": np.arange(6) % 7, "labels": np.arange(6) % 3}
    one, half = onnx_tools.run_graph(graph, batch), onnx_tools.run_graph(graph, batch, seed=0.5)
    np.testing.assert_allclose(half["w.grad"], 0.5 * one["w.grad"], rtol=1e-6)


def test_dropout_and_batch_norm_become_the_runtimes_own(tmp_path, onnx_tools):
    values = {"w": np.ones((1, 4, 1, 1), np.float32), "s": np.ones(4, np.float32), "b": np.zeros(4, np.float32),
              "mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)}  # fmt: skip
    inputs = ", ".join(f"float[{','.join(map(str, v.shape))}] {k}" for k, v in values.items())
    text = f"""g (float[8,4,3,3] x, {inputs}) => (float loss) {{ t = Constant<value=bool {{1}}>()
        r = Constant<value=float {{0.5}}>() m = Mul(x, w) n = BatchNormalization<momentum=0.9>(m, s, b, mean, var)
        d = Dropout(n, r, t) q = Mul(d, d) loss = ReduceMean<keepdims=0>(q) }}"""
    graph = from_onnx(onnx_tools.make_model(text, **values), "loss")
    folder = write_artifacts(graph, tmp_path / "made", OptimizerSpec("SGDOptimizerV2"))
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    x = np.random.default_rng(0).standard_normal((8, 4, 3, 3)).astype(np.float32) + 2.0
    module.train()
    onnxruntime.set_seed(7)  # the runtime's generator draws the same for seeds 0 and 1, which follow each other
    losses = [float(np.asarray(module(x)).reshape(-1)[0]) for _ in range(3)]
    assert len(set(losses)) == 3, "dropout drew the same mask"
    mean = np.array(state.parameters["mean"].data)
    batch_mean, want = x.mean((0, 2, 3)), np.zeros(4)
    for _ in range(3):
        want = 0.9 * want + 0.1 * batch_mean
    np.testing.assert_allclose(mean, want, rtol=1e-4)
    module.eval()
    first, second = (float(np.asarray(module(x)).reshape(-1)[0]) for _ in range(2))
    assert first == second, "evaluation draws"


NORMS = """g (int64[N] x, float[7,4] table, float[4] s, float[4] b, float[4] mean, float[4] var, float[4,3] w)
    => (float[N,3] output) {{ t = Constant<value=bool {{1}}>() r = Constant<value=float {{{ratio}}}>()
    e = Gather(table, x) {norms} d, kept = Dropout(n, r, t) output = MatMul(d, w) }}"""
ONE = "n, m1, v1 = BatchNormalization<momentum=0.7,training_mode=1>(e, s, b, mean, var)"
TWO = (
    f"{ONE.replace('n, m1', 'k, m1')} n, m2, v2 = BatchNormalization<momentum=0.7,training_mode=1>(k, s, b, mean, var)"
)


def _with_norms(tmp_path, onnx_tools, norms: str, ratio: float) -> tuple[pathlib.Path, onnx.ModelProto]:
    rng = np.random.default_rng(0)
    shapes = {"table": (7, 4), "s": (4,), "b": (4,), "mean": (4,), "var": (4,), "w": (4, 3)}
    values = {k: rng.random(s).astype(np.float32) + 0.5 for k, s in shapes.items()}
    model = onnx_tools.make_model(NORMS.format(norms=norms, ratio=ratio), opset=17, **values)
    folder = tmp_path / "normed"
    folder.mkdir()
    artifacts.generate_artifacts(
        model, requires_grad=["table", "s", "b", "w"], frozen_params=["mean", "var"],
        loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.AdamW,
        artifact_directory=str(folder), prefix="",
    )  # fmt: skip
    return folder, model


def _statistics_after(folder: pathlib.Path, batch: dict[str, np.ndarray], steps: int) -> dict[str, np.ndarray]:
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state)
    module.train()
    for _ in range(steps):
        module(*batch.values())
    return {n: np.array(p.data) for n, p in state.parameters if n in ("mean", "var")}


@pytest.mark.parametrize("norms", [ONE, TWO])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_running_statistics_are_updated_as_the_runtime_does(norms, level, tmp_path, onnx_tools):
    """The runtime's kernel writes them over its inputs, which no output of the file tells."""
    folder, model = _with_norms(tmp_path, onnx_tools, norms, 0.0)
    batch = {"x": np.array([0, 3, 6, 3, 1, 1]), "labels": np.array([0, 2, 1, 1, 0, 2])}
    want = _statistics_after(folder, batch, 3)
    graph = read_artifacts(folder)
    assert [b.name for b in graph.signature.buffers] == ["mean", "var"]
    for target in ("onnxruntime-training", "onnxruntime"):
        optimizer = ortgraph.optim.AdamW(lr=0.0)
        session = ortgraph.TrainingSession(ortgraph.optimize(graph, level, optimizer=optimizer, target=target).graph)
        for _ in range(3):
            session.step(batch)
        values = session.state_dict()
        for name in ("mean", "var"):
            np.testing.assert_allclose(values[name], want[name], rtol=1e-5)
        still = _frozen(model, values)
        np.testing.assert_allclose(session.evaluate(batch)[graph.signature.loss], still(batch), rtol=1e-5)
    written = write_artifacts(graph, tmp_path / f"written-{level}")
    for name, value in _statistics_after(written, batch, 3).items():
        np.testing.assert_allclose(value, want[name], rtol=1e-5)
    assert _evaluated(written, batch) == pytest.approx(_frozen(model, graph.values)(batch), rel=1e-5)


def _evaluated(folder: pathlib.Path, batch: dict[str, np.ndarray]) -> float:
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    module.eval()
    return float(np.asarray(module(*batch.values())).reshape(-1)[0])


def test_both_models_take_parameters_in_one_order(tmp_path, onnx_tools):
    """The training API feeds both by position: statistics for a scale of the same shape would be another evaluation."""
    folder, model = _with_norms(tmp_path, onnx_tools, ONE, 0.0)
    graph = read_artifacts(folder)
    graph.graph.inputs.reverse()  # the order of a graph is no promise
    written = write_artifacts(graph, tmp_path / "written")
    batch = {"x": np.array([0, 3, 6, 3, 1, 1]), "labels": np.array([0, 2, 1, 1, 0, 2])}
    assert _evaluated(written, batch) == pytest.approx(_frozen(model, graph.values)(batch), rel=1e-5)


def _frozen(model: onnx.ModelProto, values):
    """The cross-entropy of the forward model in evaluation mode, in float64."""

    def loss(batch: dict[str, np.ndarray]) -> float:
        v = {k: a.astype(np.float64) for k, a in values.items()}
        h = v["table"][batch["x"]]
        for _ in range(sum(n.op_type == "BatchNormalization" for n in model.graph.node)):
            h = (h - v["mean"]) / np.sqrt(v["var"] + 1e-5) * v["s"] + v["b"]
        scores = h @ v["w"]
        log_z = np.log(np.exp(scores).sum(1))
        return float((log_z - scores[np.arange(len(scores)), batch["labels"]]).mean())

    return loss


def test_the_runtimes_dropout_is_off_in_evaluation(tmp_path, onnx_tools):
    folder, model = _with_norms(tmp_path, onnx_tools, ONE, 0.5)
    graph = read_artifacts(folder)
    batch = {"x": np.array([0, 3, 6, 3, 1, 1]), "labels": np.array([0, 2, 1, 1, 0, 2])}
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, "O2").graph)
    want = _frozen(model, session.state_dict())(batch)
    np.testing.assert_allclose(session.evaluate(batch)[graph.signature.loss], want, rtol=1e-5)
    path = session.export_inference(tmp_path / "model.onnx")
    exported = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(exported.run(None, batch)[0], want, rtol=1e-5)


def test_errors(tmp_path, original, onnx_tools):
    with pytest.raises(InputError, match="training_model.onnx"):
        read_artifacts(tmp_path / "absent")
    graph = read_artifacts(original("SGD"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(InputError, match="not an empty folder"):
        write_artifacts(graph, tmp_path / "full")
    with pytest.raises(UnsupportedError, match="Lamb"):
        write_artifacts(graph, tmp_path / "new", OptimizerSpec("LambOptimizer"))
    assert not (tmp_path / "new").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "original-SGD"]
