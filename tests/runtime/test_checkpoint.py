"""Checkpoints: bit-exact resume, atomic writing, clear refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from ortgraph.errors import InputError
from ortgraph.optim import LAMB, AdamW
from ortgraph.passes.lowering.attach_optimizer import AttachOptimizer
from ortgraph.runtime import checkpoint
from ortgraph.runtime.session import TrainingSession


@pytest.fixture
def stepped(classifier_graph):
    """Factory of sessions over the same graph with an optimizer."""

    def make(threads: int = 2, **options) -> TrainingSession:
        graph = classifier_graph()
        AttachOptimizer.of(AdamW(lr=0.05, max_grad_norm=1.0, **options)).call(graph.model)
        return TrainingSession(graph, threads=threads)

    return make


@pytest.mark.parametrize("threads", [1, 2])
def test_four_steps_equal_two_and_two(stepped, classifier_batch, tmp_path, threads) -> None:
    whole = stepped(threads)
    losses = [whole.step(classifier_batch(seed=i), learning_rate=0.05 / (i + 1)) for i in range(4)]
    first = stepped(threads)
    for i in range(2):
        assert first.step(classifier_batch(seed=i), learning_rate=0.05 / (i + 1)) == losses[i]
    first.save_checkpoint(tmp_path / "at2")
    second = stepped(threads)
    second.gradients(classifier_batch())
    second.step(classifier_batch(seed=8))
    second.load_checkpoint(tmp_path / "at2")
    assert second.steps == 2 and second.learning_rate == first.learning_rate
    for i in range(2, 4):
        assert second.step(classifier_batch(seed=i), learning_rate=0.05 / (i + 1)) == losses[i]
    for a, b in (
        (whole.state_dict(), second.state_dict()),
        (whole.optimizer_state_dict(), second.optimizer_state_dict()),
    ):
        assert list(a) == list(b) and all(np.array_equal(a[k], b[k]) for k in a)


def test_files_have_the_same_mode(stepped, tmp_path) -> None:
    folder = stepped().save_checkpoint(tmp_path / "at0")
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1


def test_learning_rate_is_part_of_it(stepped, classifier_batch, tmp_path) -> None:
    one, two = stepped(), stepped()
    one.step(classifier_batch(), learning_rate=0.125)
    one.save_checkpoint(tmp_path / "c")
    two.load_checkpoint(tmp_path / "c")
    assert two.learning_rate == 0.125
    assert one.step(classifier_batch(seed=3)) == two.step(classifier_batch(seed=3))
    assert np.array_equal(one.state_dict()["w1"], two.state_dict()["w1"])


def test_overwrites_a_checkpoint_and_nothing_else(stepped, classifier_batch, tmp_path) -> None:
    session = stepped()
    folder = tmp_path / "c"
    folder.mkdir()
    for _ in range(3):
        session.step(classifier_batch())
        session.save_checkpoint(folder)
    assert json.loads((folder / "checkpoint.json").read_text())["steps"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["c"] and len(list(folder.iterdir())) == 2, "nothing else is left"
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="is no checkpoint"):
        session.save_checkpoint(other)
    assert (other / "thesis.txt").read_text() == "x"
    with pytest.raises(InputError, match="no such folder"):
        session.save_checkpoint(tmp_path / "a" / "b")


def test_failed_write_leaves_the_old_one(stepped, classifier_batch, tmp_path, monkeypatch) -> None:
    session = stepped()
    session.step(classifier_batch())
    session.save_checkpoint(tmp_path / "c")
    before = {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()}
    session.step(classifier_batch())

    def full(*_args, **_options) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(InputError, match="cannot be written .disk full"):
        session.save_checkpoint(tmp_path / "c")
    assert {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()} == before
    stepped().load_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("fails_at", [1, 2])
def test_crash_between_the_two_files(stepped, classifier_batch, tmp_path, monkeypatch, fails_at) -> None:
    """Whichever of the two renames does not happen, the folder holds the old checkpoint, and saving works again."""
    session, other = stepped(), stepped()
    session.step(classifier_batch())
    folder = session.save_checkpoint(tmp_path / "c")
    old = session.state_dict()
    session.step(classifier_batch())
    replace, calls = checkpoint.os.replace, []

    def crash(*paths) -> None:
        calls.append(paths)
        if len(calls) == fails_at:
            raise KeyboardInterrupt
        replace(*paths)

    monkeypatch.setattr(checkpoint.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        session.save_checkpoint(folder)
    monkeypatch.undo()
    other.load_checkpoint(folder)
    assert other.steps == 1 and all(np.array_equal(old[k], v) for k, v in other.state_dict().items())
    session.save_checkpoint(folder)
    other.load_checkpoint(folder)
    assert other.steps == 2 and len(list(folder.iterdir())) == 2


def test_refusals(stepped, classifier_graph, classifier_batch, tmp_path) -> None:
    session = stepped()
    session.step(classifier_batch())
    folder = session.save_checkpoint(tmp_path / "c")
    fresh = stepped()
    before = fresh.state_dict()

    def refuses(words: str) -> None:
        with pytest.raises(InputError, match=words):
            fresh.load_checkpoint(folder)
        assert all(np.array_equal(before[k], v) for k, v in fresh.state_dict().items())

    with pytest.raises(InputError, match="not a checkpoint"):
        fresh.load_checkpoint(tmp_path / "absent")
    bare = TrainingSession(classifier_graph(), threads=1)
    with pytest.raises(InputError, match="another optimizer: adamw.*, the graph has no optimizer"):
        bare.load_checkpoint(folder)
    with pytest.raises(InputError, match="unknown 'state/exp_avg/b1'"):
        bare.load_checkpoint(folder, strict=False)
    values, extra = checkpoint.load(folder)
    checkpoint.save(folder, {**values, "w1": values["w1"].T}, extra)
    refuses(r"'w1' is float32\[8, 6\]")
    checkpoint.save(folder, {k: v for k, v in values.items() if k != "w1"}, extra)
    refuses("missing 'w1'")
    checkpoint.save(folder, values, extra)
    (file,) = folder.glob("values-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refuses("damaged")
    file.unlink()
    refuses("is missing")
    checkpoint.save(folder, values, extra)
    record = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps({**record, "version": 99}))
    refuses("version 99")
    (folder / "checkpoint.json").write_text("{")
    refuses("does not parse")
    (folder / "checkpoint.json").write_text("[]")
    refuses("does not parse")


def test_same_names_of_another_training_are_refused(stepped, classifier_graph, classifier_batch, tmp_path) -> None:
    """LAMB's states have AdamW's names and shapes; only what the graph says of itself tells them apart."""
    session = stepped()
    session.step(classifier_batch())
    folder = session.save_checkpoint(tmp_path / "c", position={"epoch": 1, "batch": 7})
    made = session.state_dict()

    def graph_of(optimizer, accumulation_steps: int = 1, precision: str = "fp32"):
        graph = classifier_graph()
        AttachOptimizer.of(optimizer, accumulation_steps=accumulation_steps).call(graph.model)
        graph.signature = graph.signature.replace(metadata={**graph.signature.metadata, "precision": precision})
        return TrainingSession(graph, threads=1)

    own = AdamW(lr=0.05, max_grad_norm=1.0)
    for other, words in (
        (graph_of(LAMB(lr=0.05, max_grad_norm=1.0)), "another optimizer: adamw.*, the graph has lamb"),
        (graph_of(AdamW(lr=0.05)), "another optimizer"),
        (graph_of(own, precision="bf16"), "another precision: fp32, the graph has bf16"),
        (graph_of(own, accumulation_steps=2), "another accumulation steps: 1, the graph has 2"),
    ):
        before = other.state_dict()
        with pytest.raises(InputError, match=words):
            other.load_checkpoint(folder)
        assert all(np.array_equal(before[k], v) for k, v in other.state_dict().items())
    taken = graph_of(own, precision="bf16")
    assert taken.load_checkpoint(folder, strict=False) == {"epoch": 1, "batch": 7}
    assert all(np.array_equal(made[k], v) for k, v in taken.state_dict().items())
    values, extra = checkpoint.load(folder)
    del extra["made_with"], extra["position"]  # as earlier releases wrote it
    checkpoint.save(folder, values, extra)
    assert taken.load_checkpoint(folder) is None


def test_four_micro_batches_of_two_are_a_batch_of_eight(classifier_graph, classifier_batch, tmp_path) -> None:
    """Also when the process changes in the middle: sums of gradients are part of a checkpoint."""

    def session_of(batch: int, accumulation_steps: int) -> TrainingSession:
        graph = classifier_graph(batch=batch)
        own = AdamW(lr=0.05, max_grad_norm=0.5)
        AttachOptimizer.of(own, accumulation_steps=accumulation_steps).call(graph.model)
        return TrainingSession(graph, threads=1)

    whole, parts, other = session_of(8, 1), session_of(2, 4), session_of(2, 4)
    for step in range(3):
        large = classifier_batch(batch=8, seed=step)
        micro = [{k: v[2 * i : 2 * i + 2] for k, v in large.items()} for i in range(4)]
        losses = [parts.accumulate(micro[0]), parts.accumulate(micro[1])]
        parts.save_checkpoint(tmp_path / "c", position=2)
        assert other.load_checkpoint(tmp_path / "c") == 2
        parts, other = other, parts
        losses += [parts.accumulate(micro[2]), parts.step(micro[3])]
        assert np.mean(losses) == pytest.approx(whole.step(large), rel=1e-6)
    for name, value in whole.state_dict().items():
        np.testing.assert_allclose(parts.state_dict()[name], value, rtol=2e-5, atol=2e-6)
