"""Batches padded to few sizes: the same step as without padding, or a refusal."""

from __future__ import annotations

import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="modules are captured from PyTorch")

import ortgraph  # noqa: E402
from ortgraph.errors import BatchError, InputError  # noqa: E402
from ortgraph.runtime.buckets import Buckets  # noqa: E402

nn, F = torch.nn, torch.nn.functional

DIMS = {"ids": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "length"}, "labels": {0: "batch", 1: "length"}}
PADDING = {"ids": 0, "mask": 0, "labels": -100}


class Tagger(nn.Module):
    """Attention over the tokens that the mask shows; ``kind`` says what may be wrong with it."""

    def __init__(self, kind: str = "", ratio: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.ratio = kind, ratio
        self.embed, self.mix, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(8) if kind == "statistics" else nn.LayerNorm(8)
        if kind == "flat":
            nn.init.zeros_(self.head.weight)  # the loss is the same whatever comes before

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        hidden = x.new_zeros(()) if self.kind == "unmasked" else (1 - mask[:, None, :].to(x.dtype)) * -1e9
        weights = F.dropout((x @ x.transpose(1, 2) + hidden).softmax(-1), self.ratio)
        x = F.dropout(F.gelu(self.mix(weights @ x)), self.ratio)
        if self.kind == "statistics":
            x = self.norm(x.flatten(0, 1)).unflatten(0, ids.shape)
        elif self.kind == "flat":
            x = x - x.mean(1, keepdim=True)
        else:
            x = self.norm(x)
        scores = self.head(x)
        losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
        loss = losses.mean() if self.kind == "mean" else losses.sum() / (labels != -100).sum()
        return {"loss": loss, "scores": scores}


def make_batch(rows: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(1, n, (rows, length), generator=draw) for n in (20, 5))
    mask = torch.ones(rows, length, dtype=torch.int64)
    return {"ids": ids, "mask": mask, "labels": labels}


def captured(kind: str = "", ratio: float = 0.0) -> ortgraph.TrainingGraph:
    return ortgraph.capture(Tagger(kind, ratio).train(), make_batch(3, 6), dynamic=DIMS)


def session_of(graph, preset="O2", buckets=None, padding=PADDING, **options) -> ortgraph.TrainingSession:
    made = ortgraph.optimize(graph, preset, optimizer=ortgraph.optim.SGD(lr=0.1)).graph if preset else graph
    return ortgraph.TrainingSession(made, threads=1, buckets=buckets, padding=padding, **options)


@pytest.mark.parametrize("preset", [None, pytest.param("O2", marks=pytest.mark.slow)])
def test_padded_steps_are_those_of_the_batch(preset, caplog) -> None:
    caplog.set_level(logging.INFO)
    graph = captured()
    planned: list = []
    session = session_of(graph, preset, {"batch": [2, 4], "length": "powers of two"}, on_plan=planned.append)
    plain = session_of(graph, preset, padding=None)
    for rows, length in ((3, 5), (1, 7), (4, 8)):
        batch = make_batch(rows, length, seed=length)
        want, got = plain.gradients(batch), session.gradients(batch)
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6)
        assert abs(session.loss(batch) - plain.loss(batch)) < 1e-5
        scores = session.evaluate(batch)["scores"]
        assert scores.shape == (rows, length, 5)
        np.testing.assert_allclose(scores, plain.evaluate(batch)["scores"], rtol=1e-4, atol=1e-5)
        if preset:
            assert abs(session.step(batch) - plain.step(batch)) < 1e-5
    assert {tuple(p.sizes.items()) for p in planned} == {(("batch", 4), ("length", 8)), (("batch", 2), ("length", 8))}
    assert caplog.text.count("padding of batch, length changes neither loss nor gradients (") == 1
    assert caplog.text.count("nor outputs") == 1  # compared when they are read
    assert all(p.seconds > 0 and p.arena_bytes > 0 and not p.again for p in planned)


def test_dropout_does_not_hide_what_is_compared() -> None:
    batch = make_batch(3, 5)
    assert session_of(captured("", 0.5), buckets={"length": [8]}).step(batch) > 0
    session = session_of(captured("unmasked", 0.5), buckets={"length": [8]})
    before = session.state_dict()
    with pytest.raises(BatchError, match="padding length from 5 to 6 changes the loss"):
        session.step(batch)
    assert all(np.array_equal(before[n], v) for n, v in session.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "buckets", "words"),
    [
        ("mean", {"batch": [8]}, "padding batch from 3 to 4 changes the loss"),
        ("unmasked", {"length": [8]}, "padding length from 5 to 6 changes the loss"),
        ("statistics", {"batch": [8]}, "changes the loss"),
        ("flat", {"length": [8]}, "changes the gradient of"),
    ],
)
def test_padding_that_changes_a_step_is_refused(kind, buckets, words) -> None:
    graph = captured(kind)
    with pytest.raises(BatchError, match=words):
        session_of(graph, None, buckets).loss(make_batch(3, 5))
    assert session_of(graph, None, buckets, check_padding=False).loss(make_batch(3, 5)) > 0
    full = make_batch(8, 8)
    assert session_of(graph, None, {"batch": [8], "length": [8]}).loss(full) > 0  # nothing is padded


def test_labels_that_count_are_refused() -> None:
    session = session_of(captured(), None, {"batch": [8]}, {**PADDING, "labels": 0})
    with pytest.raises(BatchError, match="changes the loss"):
        session.gradients(make_batch(3, 5))


def test_arguments() -> None:
    graph = captured()
    for buckets, padding, words in (
        ({"rows": [4]}, PADDING, "buckets= names the dimension 'rows'(?s:.*)batch, length"),
        ({"batch": []}, PADDING, "buckets of 'batch' are"),
        ({"batch": "powers of 2"}, PADDING, "'powers of two'"),
        ({"batch": [4]}, {"ids": 0, "mask": 0}, "'labels' has a bucketed dimension and no pad value"),
        ({"batch": [4]}, {**PADDING, "ids": 0.5}, "padding of input 'ids' is 0.5"),
        ({"batch": [4]}, {**PADDING, "x": 0}, "padding= names 'x'"),
    ):
        with pytest.raises(InputError, match=words):
            session_of(graph, None, buckets, padding)
    session = session_of(graph, None, {"batch": [4]})
    with pytest.raises(BatchError, match="'batch' is 5, the largest of buckets= is 4"):
        session.loss(make_batch(5, 6))
    assert Buckets(graph, {"length": "powers of two"}, PADDING).sizes({"batch": 3, "length": 9})["length"] == 16


def test_programs_of_latest_shapes_are_kept_and_new_ones_are_told(caplog) -> None:
    caplog.set_level(logging.INFO)
    planned: list = []
    session = session_of(captured(), None, padding=None, max_shapes=2, on_plan=planned.append)
    for rows in (1, 2, 1, 3, 1, 2):
        session.loss(make_batch(rows, 4))
    assert [p.sizes["batch"] for p in planned] == [1, 2, 3, 2]
    assert [p.again for p in planned] == [False, False, False, True]
    assert len(session.programs) == 2
    assert "planned for batch=1, length=4" in caplog.text and caplog.text.count("try a larger max_shapes=") == 1


def test_a_size_beyond_a_table_of_positions_is_refused() -> None:
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(12, 3))

        def forward(self, x):
            return (x * self.table[: x.shape[1]]).square().mean()

    graph = ortgraph.capture(Positions(), {"x": torch.randn(2, 6, 3)}, dynamic={"x": {0: "batch", 1: "length"}})
    session = session_of(graph, None, {"length": "powers of two"}, {"x": 0.0}, check_padding=False)
    assert session.loss({"x": torch.randn(2, 12, 3)}) > 0
    assert session.programs[0].inputs["x"].shape == (2, 12, 3)  # not 16
    with pytest.raises(BatchError, match="'length' is 13, the module takes up to 12"):
        session.loss({"x": torch.randn(2, 13, 3)})


class Peak(nn.Module):
    """The largest over all positions, which no mask hides: zeros lose beside positive numbers and weights."""

    def __init__(self, in_loss: bool) -> None:
        super().__init__()
        self.in_loss, self.head = in_loss, nn.Linear(3, 4)
        nn.init.uniform_(self.head.weight, 0.5, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        peak = self.head(x).max(1).values
        return {
            "loss": (peak if self.in_loss else self.head(x).sum(1) - self.head.bias * x.shape[1]).sum(),
            "peak": peak,
        }


def test_padding_that_these_parameters_hide_is_refused() -> None:
    batch = {"x": torch.rand(3, 5, 3) + 0.1}
    for in_loss, words in (
        (True, "changes the loss.*with other parameters"),
        (False, "changes output peak.*other param"),
    ):
        torch.manual_seed(0)
        graph = ortgraph.capture(Peak(in_loss), batch, dynamic={"x": {0: "batch", 1: "length"}})
        session = session_of(graph, None, {"length": [8]}, {"x": 0.0})
        if not in_loss:
            assert np.isfinite(session.loss(batch))  # nobody reads the output
        with pytest.raises(BatchError, match=words):
            session.evaluate(batch)
