"""Checkpoints between a Trainer and a TrainingSession: what one began the other finishes, as the straight run."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

import ortgraph
from ortgraph.distributed import DistributedSession, Group
from ortgraph.errors import InputError
from ortgraph.optim import AdamW, LossScale, schedules
from ortgraph.runtime.hugging_face import trainer_groups

STEPS, HALF, TOLERANCE = 6, 3, 1e-6
RATE = 1e-3


class Rows(Trainer):
    """Takes the rows in their order, so that a session can have the same batches."""

    def _get_train_sampler(self, *_args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer_of(small: Any, folder: Any, **given: Any) -> Trainer:
    more = {
        "max_steps": STEPS,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
    }
    args = TrainingArguments(**small.settings(folder, learning_rate=RATE, **{**more, **given}))
    return Rows(small.model("bert"), args, train_dataset=small.data("bert"))


@pytest.fixture(scope="module")
def begun(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A straight run of a Trainer with a checkpoint in the middle, and the captured model."""
    folder = tmp_path_factory.mktemp("trainer")
    straight = trainer_of(small, folder, save_strategy="steps", save_steps=HALF)
    straight.train()
    model = small.model("bert")
    rows = small.data("bert")
    batches = [{k: torch.stack([r[k] for r in rows[4 * i : 4 * i + 4]]) for k in rows[0]} for i in range(STEPS)]
    return straight, folder / f"checkpoint-{HALF}", ortgraph.capture(model, batches[0]), batches, model


def session_of(graph: Any, model: Any, **more: Any) -> Any:
    own = AdamW(lr=RATE, weight_decay=0.1, no_decay=trainer_groups(model)[1], max_grad_norm=0.5, **more)
    return ortgraph.TrainingSession(ortgraph.optimize(graph, "O0", optimizer=own).graph)


def near(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(np.asarray(found[name]), value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def test_either_finishes_what_the_other_began(small: Any, begun: Any, tmp_path: pathlib.Path) -> None:
    straight, checkpoint, graph, batches, model = begun
    wanted = straight.model.state_dict()
    rate = schedules.linear(RATE, STEPS, warmup_steps=2)
    taken = session_of(graph, model)
    record = taken.load_hugging_face(checkpoint, model)
    assert (record["global_step"], taken.steps) == (HALF, HALF)
    assert taken.learning_rate == pytest.approx(rate(HALF), rel=1e-7)
    for batch in batches[HALF:]:
        taken.step(batch, learning_rate=rate(taken.steps))
    near(taken.state_dict(), wanted)
    first = session_of(graph, model)
    for batch in batches[:HALF]:
        first.step(batch, learning_rate=rate(first.steps))
    folder = first.save_hugging_face(tmp_path / f"checkpoint-{HALF}", model, rate)
    assert {p.name for p in checkpoint.iterdir()} <= {p.name for p in folder.iterdir()} | {"training_args.bin"}
    resumed = trainer_of(small, tmp_path)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == STEPS
    near(resumed.model.state_dict(), wanted)
    with pytest.raises(InputError, match="exists"):
        first.save_hugging_face(folder, model)
    again = session_of(graph, model)
    again.load_hugging_face(folder, model)  # the same bits: nothing is lost on the way
    for one, two in (
        (first.state_dict(), again.state_dict()),
        (first.optimizer_state_dict(), again.optimizer_state_dict()),
    ):
        assert all(np.array_equal(v, two[k]) for k, v in one.items())


def test_what_is_not_the_graphs_is_refused(begun: Any, tmp_path: pathlib.Path) -> None:
    _, checkpoint, graph, _, model = begun
    with pytest.raises(InputError, match=r"no checkpoint of a Trainer \(it has no config.json\)"):
        session_of(graph, model).load_hugging_face(tmp_path, model)
    other = ortgraph.TrainingSession(ortgraph.optimize(graph, "O0", optimizer=AdamW(lr=RATE)).graph)
    with pytest.raises(InputError, match="weight_decay=0.1, the graph has weight_decay=0.01"):
        other.load_hugging_face(checkpoint, model)
    scaled = session_of(graph, model, loss_scale=LossScale(initial=8.0))
    folder = scaled.save_hugging_face(tmp_path / "checkpoint-0", model)
    assert torch.load(folder / "scaler.pt")["scale"] == 8.0
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:-200])
    before = scaled.state_dict()
    with pytest.raises(InputError, match="does not load"):
        scaled.load_hugging_face(folder, model)
    assert all(np.array_equal(v, before[k]) for k, v in scaled.state_dict().items())


def test_a_save_that_fails_leaves_nothing(begun: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, graph, _, model = begun

    def full(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(InputError, match="cannot be written .file write failed"):
        session_of(graph, model).save_hugging_face(tmp_path / "checkpoint-0", model)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_at_the_next_save(begun: Any, tmp_path: pathlib.Path) -> None:
    _, _, graph, _, model = begun
    left, other = tmp_path / ".ortgraph-partial-1", tmp_path / ".partial-of-somebody"
    for folder in (left, other):
        folder.mkdir()
        (folder / "optimizer.pt").write_bytes(b"half")
    session_of(graph, model).save_hugging_face(tmp_path / "checkpoint-0", model)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-0", other.name}


def test_ranks_draw_numbers_of_their_own_after_loading(small: Any, begun: Any, tmp_path: pathlib.Path) -> None:
    """From the saved key and the rank; a Trainer's checkpoint has no key, and changes none."""
    _, checkpoint, _, batches, _ = begun
    model = small.model("bert", dropout=0.1)
    graph = ortgraph.optimize(
        ortgraph.capture(model, batches[0]),
        "O0",
        optimizer=AdamW(lr=RATE, weight_decay=0.1, no_decay=trainer_groups(model)[1]),
        distributed=True,
    ).graph
    key = next(s.input for s in graph.signature.states if s.kind == "random_key")

    def session(rank: int) -> DistributedSession:
        group = Group()
        group.rank = rank
        return DistributedSession(graph, group, threads=1)

    first, second = session(0), session(1)
    own = [int(s.buffer(key)) for s in (first, second)]
    assert own[0] != own[1]
    for s in (first, second):
        s.load_hugging_face(checkpoint, model)
    assert [int(s.buffer(key)) for s in (first, second)] == own
    first.buffer(key)[...] = 12345
    folder = first.save_hugging_face(tmp_path / "checkpoint-0", model)
    assert second.save_hugging_face(tmp_path / "checkpoint-1", model) and not (tmp_path / "checkpoint-1").exists()
    again = [session(0), session(1), session(1)]
    for s in again:
        s.load_hugging_face(folder, model)
    found = [int(s.buffer(key)) for s in again]
    assert found[0] == 12345 != found[1] == found[2]
    again[2].load_hugging_face(folder, model)
    assert int(again[2].buffer(key)) == found[1]
