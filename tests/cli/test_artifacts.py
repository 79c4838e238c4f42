"""``ortgraph artifacts``: for the training API, and in standard operators."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

import ortgraph
from ortgraph.cli.output import UNUSABLE
from ortgraph.optim import AdamW

ADAMW = "adamw{lr=1e-2 weight_decay=0.1}"


@pytest.fixture
def forward(tmp_path):
    rng = np.random.default_rng(1)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4,6] x) => (float[4,3] y) '
        "{ a = Gemm(x, up, shift) r = Relu(a) y = MatMul(r, down) }"
    )
    for name, shape in {"up": (6, 8), "shift": (8,), "down": (8, 3)}.items():
        weight = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    path = tmp_path / "forward.onnx"
    onnx.save_model(model, path)
    return path


def batches():
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((4, 6), np.float32), "labels": rng.integers(0, 3, 4)} for _ in range(5)]


def session_of(forward):
    graph = ortgraph.from_onnx(forward, loss="cross_entropy")
    optimizer = AdamW(lr=1e-2, weight_decay=0.1)
    return ortgraph.TrainingSession(ortgraph.optimize(graph, optimizer=optimizer).graph, threads=1)


def test_the_training_api_trains_them_to_the_same_losses(cli, forward, tmp_path):
    folder = tmp_path / "artifacts"
    ran = cli("artifacts", forward, "-o", folder, "--loss", "cross_entropy", "--optimizer", ADAMW, "--json")
    assert ran.code == 0 and ran.json["standard"] is False
    api = pytest.importorskip("onnxruntime.training.api", reason="needs onnxruntime-training")
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = api.Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(1e-2)
    session = session_of(forward)
    module.train()
    for batch in batches():
        loss = module(batch["x"], batch["labels"])
        loss = loss[0] if isinstance(loss, (list, tuple)) else loss
        optimizer.step()
        module.lazy_reset_grad()
        assert float(loss) == pytest.approx(session.step(batch), rel=1e-5)


def test_standard_operators_train_to_the_same_losses(cli, forward, tmp_path):
    from ortgraph.runtime.on_device import Client

    folder = tmp_path / "standard"
    words = ("--standard", "--loss", "cross_entropy", "--optimizer", ADAMW, "--memory-budget", "100%", "--json")
    ran = cli("artifacts", forward, "-o", folder, *words)
    assert ran.code == 0, ran.err
    assert ran.json["memory"] == json.loads((folder / "manifest.json").read_text())["memory"]
    client, session = Client(folder), session_of(forward)
    for batch in batches():
        assert client.step(batch) == pytest.approx(session.step(batch), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory-budget", "60%"), "--memory-budget goes with --standard"),
        (("--optimizer", "sgd{momentum=0.9}"), "training.api has no"),
        (("--standard", "--shapes", "rows=3"), "no input has a symbolic dimension"),
    ],
)
def test_what_does_not_go_together(cli, forward, tmp_path, words, message):
    ran = cli("artifacts", forward, "-o", tmp_path / "out", "--loss", "cross_entropy", *words)
    assert ran.code == UNUSABLE and message in ran.err
    assert not (tmp_path / "out").exists()
