"""Artifacts in standard operators on whatever runtime is installed, without PyTorch; the driver alone in a process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import onnx
import pytest

import ortgraph
from ortgraph.capture.standard_step import write_standard
from ortgraph.errors import InputError
from ortgraph.optim import SGD, AdamW
from ortgraph.runtime.detect import detect_runtime

FEDERATED = """
import sys, importlib.util, json
import numpy as np, onnxruntime
before = set(sys.modules)
spec = importlib.util.spec_from_file_location("driver", "artifacts/driver.py")
driver = importlib.util.module_from_spec(spec)
spec.loader.exec_module(driver)
data = np.load("data.npz")
budget = int(sys.argv[1])
clients = [driver.Client("artifacts", threads=1 + i % 2, memory_budget=budget) for i in range(3)]
batches = lambda client, number: [{"ids": data[f"ids{client}"], "labels": data[f"labels{client}"]}] * 4
history = driver.federated(clients, batches, 6)
same = all(np.array_equal(clients[0].weights[n], c.weights[n]) for c in clients for n in c.weights)
clients[0].save("trained.npz")
foreign = [m for m in ("torch", "onnx", "ortgraph") if m in set(sys.modules) - before]
print(json.dumps({"history": history, "same": same, "foreign": foreign}))
"""


@pytest.fixture
def driver(tmp_path):
    """The driver that lies in the folder."""

    def load(folder):
        spec = importlib.util.spec_from_file_location("driver", folder / "driver.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize(
    ("optimizer", "budget"),
    [(AdamW(lr=2e-2, max_grad_norm=0.3, no_decay=("b1",)), "95%"), (SGD(lr=0.1, momentum=0.9), None)],
)
def test_every_step_equals_a_training_session(classifier_graph, classifier_batch, driver, tmp_path, optimizer, budget):
    graph = classifier_graph()
    manifest = write_standard(graph, tmp_path / "a", optimizer, memory_budget=budget)
    for name in ("train_step.onnx", "evaluate.onnx"):
        model = onnx.load(tmp_path / "a" / name)
        assert {n.domain for n in model.graph.node} == {""} and not model.functions
        assert not {t.name for t in model.graph.initializer} & set(manifest["parameters"])
    for threads in (1, 2):
        client = driver(tmp_path / "a").Client(tmp_path / "a", threads=threads)
        made = ortgraph.optimize(graph, optimizer=optimizer, target=detect_runtime().target).graph
        session = ortgraph.TrainingSession(made, threads=threads)
        for i in range(6):
            batch = classifier_batch(seed=i)
            client.learning_rate = 0.02 / (1 + i)
            assert client.step(batch) == pytest.approx(session.step(batch, learning_rate=0.02 / (1 + i)), rel=1e-5)
        wanted = session.state_dict()
        for name, value in client.weights.items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)
        got, want = client.evaluate(batch), session.evaluate(batch)
        np.testing.assert_allclose(got["logits"], want["logits"], rtol=1e-4, atol=1e-4)


def test_clients_train_on_their_own_data_with_numpy_and_the_runtime_only(classifier_graph, classifier_batch, tmp_path):
    manifest = write_standard(classifier_graph(), tmp_path / "artifacts", AdamW(lr=5e-2), memory_budget="95%")
    memory = manifest["memory"]
    needed = sum(memory.values()) + memory["parameters"] + memory["states"]
    batches = [classifier_batch(seed=i) for i in range(3)]
    np.savez(tmp_path / "data.npz", **{f"{k}{i}": v for i, b in enumerate(batches) for k, v in b.items()})
    command = [sys.executable, "-c", FEDERATED]
    ran = subprocess.run([*command, str(needed)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["foreign"] == [] and told["same"]
    assert told["history"][-1] < 0.9 * told["history"][0]
    with np.load(tmp_path / "trained.npz") as trained:
        assert sorted(trained.files) == sorted(manifest["parameters"])
    ran = subprocess.run([*command, str(needed - 1)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode != 0 and "MemoryError: a step takes" in ran.stderr


def test_the_mean_weighs_clients_by_their_rows(classifier_graph, driver, tmp_path):
    write_standard(classifier_graph(), tmp_path / "a", SGD())
    module = driver(tmp_path / "a")
    weights = [{"w": np.full(2, v, np.float32), "n": np.array(i)} for i, v in enumerate((1.0, 4.0))]
    mean = module.average(weights, [30, 10])
    np.testing.assert_allclose(mean["w"], [1.75, 1.75])
    assert mean["n"] == 0 and mean["w"].dtype == np.float32


def test_nothing_is_overwritten(classifier_graph, tmp_path):
    (tmp_path / "kept").write_text("x")
    with pytest.raises(InputError, match="not an empty folder"):
        write_standard(classifier_graph(), tmp_path, SGD())
