"""select-labelled-rows: heads, labels and buffers against PyTorch in float64, and what is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ortgraph
from ortgraph.graph import TrainingGraph
from ortgraph.manager import PassManager, numerics
from ortgraph.optim import AdamW
from ortgraph.passes.memory.select_labelled_rows import SelectLabelledRows
from ortgraph.passes.pipelines import CANONICAL, FUSION, MATMUL
from ortgraph.runtime import labelled_rows
from ortgraph.runtime.session import TrainingSession

torch = pytest.importorskip("torch")
F = torch.nn.functional
WORDS, BATCH, LENGTH, WIDTH = 53, 4, 20, 16
BEFORE = ",".join((CANONICAL, FUSION, CANONICAL, MATMUL))


class Model(torch.nn.Module):
    """A mixing layer, a feed-forward block with norm and a tied head; ``labels`` says how labels reach the loss."""

    def __init__(
        self, labels: str = "plain", end: str = "head", norm: str = "layer", dropout: float = 0.0, **loss: Any
    ):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.mix = torch.nn.Linear(LENGTH, LENGTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(3 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH) if norm == "layer" else torch.nn.RMSNorm(WIDTH)
        self.transform, self.bias = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Parameter(torch.randn(WORDS))
        self.dropout = torch.nn.Dropout(dropout)
        self.labels, self.end, self.loss = labels, end, loss

    def forward(self, ids, labels):
        x = self.table(ids) + self.places.weight
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        h = torch.tanh(self.transform(x))
        if self.end == "places":
            h = h + self.places.weight
        scores = F.linear(h, self.table.weight, self.bias)
        if self.end == "mixed":
            scores = self.mix(scores.transpose(1, 2)).transpose(1, 2)
        seen, target = self.seen(scores, labels, ids)
        loss = F.cross_entropy(seen.reshape(-1, WORDS), target.reshape(-1), **self.loss)
        if self.end == "penalty":
            loss = loss + x.square().mean()
        return {"loss": loss, "logits": scores}

    def seen(self, scores, labels, ids):
        if self.labels == "sliced":
            return scores[:, :-1], labels[:, 1:]
        if self.labels == "padded":
            return scores, F.pad(labels, (0, 1), value=-100)[:, 1:]
        if self.labels == "masked":
            return scores, labels.masked_fill(ids > 40, -100)
        if self.labels == "wrongly padded":
            return scores, F.pad(labels, (0, 1), value=3)[:, 1:]
        if self.labels == "computed":
            return scores, (labels + 1) % WORDS
        return scores, labels


def make_batch(labelled: int = 15, seed: int = 0, ignore: int = -100) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids, labels = rng.integers(0, WORDS, (2, BATCH * LENGTH))
    labels[labels == ignore] += 1
    labels[rng.permutation(BATCH * LENGTH)[labelled:]] = ignore
    return {"ids": ids.reshape(BATCH, LENGTH), "labels": labels.reshape(BATCH, LENGTH)}


def as_torch(batch):
    return {k: torch.from_numpy(v) for k, v in batch.items()}


def captured(module, **options) -> TrainingGraph:
    return ortgraph.capture(module.train(), as_torch(make_batch()), **options)


def select(graph: TrainingGraph, **options) -> tuple[dict[str, int], list[str]]:
    """Run the pass; (counts, reasons of refusals)."""
    (record,) = PassManager([SelectLabelledRows(**options)], verify="types").run(graph).passes
    return dict(record.counts), [r.reason for r in record.refusals]


def by_torch(module, batch, dtype) -> tuple[float, dict[str, np.ndarray]]:
    module = module.to(dtype)
    module.zero_grad()
    module.loss = {k: v.to(dtype) if torch.is_tensor(v) else v for k, v in module.loss.items()}
    loss = module(**as_torch(batch))["loss"]
    loss.backward()
    return loss.item(), {n: p.grad.double().numpy() for n, p in module.named_parameters()}


def assert_exact(graph: TrainingGraph, module, batch) -> TrainingSession:
    """Loss and gradients by the design's measure, at 1 and 2 threads."""
    (loss, exact), (_, single) = by_torch(module, batch, torch.float64), by_torch(module, batch, torch.float32)
    sessions = [TrainingSession(graph, threads=t) for t in (1, 2)]
    typical = np.median([np.linalg.norm(v) for v in exact.values()])
    for session in sessions:
        got = session.gradients(batch)
        assert set(got) == set(exact)
        for name, want in exact.items():
            own, size = np.linalg.norm(single[name] - want), np.linalg.norm(want)
            allowed = 4 * own + 1e-6 * (size if size > 1e-9 * typical else typical)
            assert np.linalg.norm(got[name] - want) <= allowed, name
        assert abs(session.loss(batch) - loss) <= 1e-5 * abs(loss)
    return sessions[-1]


def rows_used(session: TrainingSession, kind: str = "gradients") -> list[int]:
    return [dict(key).get(labelled_rows.KEY, 0) for k, key in session._programs if k == kind]


CASES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "weights": {"weight": torch.rand(WORDS, generator=torch.Generator().manual_seed(1)) + 0.5},
    "ignoring a class": {"ignore_index": 7},
    "sliced": {"labels": "sliced"},
    "padded": {"labels": "padded"},
    "masked": {"labels": "masked"},
    "rms norm": {"norm": "rms"},
    "places added": {"end": "places"},
    "penalty on what the head reads": {"end": "penalty"},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_as_exact_as_torch(case):
    module = Model(**CASES[case])
    batch = make_batch(ignore=7 if "class" in case else -100)
    graph = ortgraph.optimize(captured(module), BEFORE).graph
    before = graph.clone()
    counts, _ = select(graph, rows=24)
    # Forward 4, and two gradients of each: up, down, transform, table. What is whole for another reason stays so.
    assert counts["products"] == {"places added": 9, "penalty on what the head reads": 6}.get(case, 12)
    assert_exact(graph, module, batch)
    assert numerics.compare(before, graph, batch).equal


def test_more_labels_than_rows_give_no_number():
    graph = ortgraph.optimize(captured(Model()), BEFORE).graph
    assert select(graph, rows=24)[0]
    session = TrainingSession(graph, check_finite=False)
    assert np.isfinite(session.loss(make_batch(24)))
    assert np.isnan(session.loss(make_batch(25)))
    assert all(np.isnan(g).any() for g in session.gradients(make_batch(25)).values())


@pytest.mark.parametrize("labels", ["plain", "padded", "sliced"])
def test_sessions_choose_rows_by_the_labels(labels):
    module = Model(labels)
    graph = ortgraph.optimize(captured(module)).graph
    for labelled, rows in ((1, 5), (60, 60), (80, 0)):
        assert rows_used(assert_exact(graph, module, make_batch(labelled))) == [rows]


def test_rows_that_a_batch_needs():
    note = labelled_rows.LabelNote("labels", -100)
    counts = (0, 1, 10, 11, 15, 60, 61, 80)
    needed = [note.rows(make_batch(labelled)["labels"]) for labelled in counts]
    assert needed == [5, 5, 10, 15, 15, 60, 0, 0]
    assert note.rows(np.zeros((0, 4), np.int64)) == 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_labels_at_all(reduction):
    graph = ortgraph.optimize(captured(Model(reduction=reduction))).graph
    session, whole = TrainingSession(graph), TrainingSession(graph)
    whole._rows.labels = None
    got, want = session.gradients(make_batch(0)), whole.gradients(make_batch(0))
    assert rows_used(session) == [5]
    assert all(not g.any() for g in want.values())
    assert all(np.array_equal(got[k], want[k]) for k in want)
    np.testing.assert_equal(session.loss(make_batch(0)), whole.loss(make_batch(0)))  # NaN for the mean, as in PyTorch


@pytest.mark.parametrize(
    ("dropout", "options"), [(0.0, {}), (0.3, {"accumulation_steps": 2}), (0.0, {"memory_budget": "95%"})]
)
def test_steps_as_with_all_rows(dropout, options):
    graph = captured(Model(dropout=dropout))
    graph = ortgraph.optimize(graph, optimizer=AdamW(lr=1e-2, max_grad_norm=1.0), **options).graph
    session, whole = TrainingSession(graph), TrainingSession(graph)
    whole._rows.labels = None
    for i, labelled in enumerate((15, 70, 5, 15)):
        batch = make_batch(labelled, seed=i)
        if options.get("accumulation_steps"):
            np.testing.assert_allclose(session.accumulate(batch), whole.accumulate(batch), rtol=1e-4)
        np.testing.assert_allclose(session.step(batch), whole.step(batch), rtol=1e-4)
    assert rows_used(session, "step") == [0, 5, 15]  # the one used latest is last
    for name, value in session.state_dict().items():
        np.testing.assert_allclose(value, whole.state_dict()[name], atol=1e-4)
    got, want = session.evaluate(batch), whole.evaluate(batch)
    assert got["logits"].shape == (BATCH, LENGTH, WORDS)
    np.testing.assert_allclose(got["logits"], want["logits"], atol=1e-3)


def test_model_outputs_stay_whole():
    graph = ortgraph.optimize(captured(Model()), BEFORE).graph
    before, batch = graph.clone(), make_batch()
    assert select(graph, rows=24)[0]
    got, want = TrainingSession(graph).results(batch), TrainingSession(before).results(batch)
    np.testing.assert_allclose(got["logits"], want["logits"], atol=1e-5)
    session = TrainingSession(graph)
    session.gradients(batch)
    shapes = [tuple(o.shape) for n in session.programs[0].order for o in n.outputs if o.shape is not None]
    assert not any(s and s[-1] == WORDS and np.prod(s[:-1]) > 24 for s in shapes)


def test_a_saved_graph_chooses_rows(tmp_path):
    module = Model()
    ortgraph.optimize(captured(module)).graph.save(tmp_path / "train.onnx")
    assert rows_used(assert_exact(ortgraph.load(tmp_path / "train.onnx"), module, make_batch())) == [15]


def test_a_dynamic_batch_chooses_rows():
    module = Model()
    dynamic = {"ids": {0: "batch"}, "labels": {0: "batch"}}
    session = assert_exact(ortgraph.optimize(captured(module, dynamic=dynamic)).graph, module, make_batch())
    assert rows_used(session) == [15]
    small = {k: v[:1] for k, v in make_batch().items()}  # 20 rows are too few to choose among
    session.gradients(small)
    assert np.isfinite(session.loss(small)) or not (small["labels"] >= 0).any()


def test_a_graph_changed_later_or_elsewhere_has_no_form():
    graph = ortgraph.optimize(captured(Model())).graph
    assert TrainingSession(graph)._rows.labels is not None
    changed = graph.clone()
    changed.graph.remove(next(n for n in reversed(list(changed.graph)) if not any(o.uses() for o in n.outputs)))
    assert labelled_rows.label_note(changed) is None
    extra = ortgraph.optimize(captured(Model()), passes_after={"optimized": "eliminate-dead-code"}).graph
    assert labelled_rows.label_note(extra) is None
    early = ortgraph.optimize(captured(Model()), f"{BEFORE},select-labelled-rows").graph
    assert labelled_rows.label_note(early) is not None
    assert labelled_rows.label_note(ortgraph.optimize(early, "eliminate-dead-code").graph) is None


REFUSALS = {
    "one entry per row": (Model(reduction="none"), "one entry per row"),
    "wrongly padded": (Model("wrongly padded"), "come from Pad"),
    "computed": (Model("computed"), "come from"),
    "mixed": (Model(end="mixed"), "no matrix product would get smaller"),
}


class Summed(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids, labels):
        return self.inner(ids, labels)["loss"].sum()


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("rows", [0, 24])
def test_refusals(case, rows):
    module, reason = REFUSALS[case]
    graph = ortgraph.optimize(captured(Summed(module)), BEFORE).graph
    counts, reasons = select(graph, rows=rows)
    assert not counts and len(reasons) == 1 and reason in reasons[0], reasons
    assert labelled_rows.METADATA_KEY not in graph.model.metadata_props


def test_further_refusals():
    graph = ortgraph.optimize(captured(Model()), BEFORE).graph
    assert "least_rows is 100" in select(graph, least_rows=100)[1][0]
    assert "no smaller" in select(graph, rows=80)[1][0]
    dynamic = captured(Model(), dynamic={"ids": {0: "batch"}, "labels": {0: "batch"}})
    assert "symbolic" in select(ortgraph.optimize(dynamic, BEFORE).graph, rows=24)[1][0]
