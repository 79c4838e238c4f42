"""remove-padding: packed rows against PyTorch in float64, buffers by the mask of a batch, and what is left alone.

More heads, masks and sessions: ``pytest -m slow -n 0 tests/passes/memory/test_remove_padding.py``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.graph import TrainingGraph
from ortgraph.manager import PassManager, registry
from ortgraph.ops import Builder
from ortgraph.optim import SGD
from ortgraph.passes.memory.remove_padding import RemovePadding
from ortgraph.passes.pipelines import ATTENTION, CANONICAL, FUSION, MATMUL
from ortgraph.runtime import labelled_rows, padded_rows
from ortgraph.runtime.session import TrainingSession

torch = pytest.importorskip("torch")
F = torch.nn.functional
WORDS, CLASSES, BATCH, LENGTH, WIDTH, HEADS = 23, 5, 4, 20, 16, 2
BEFORE = ",".join((CANONICAL, FUSION, CANONICAL, ATTENTION, MATMUL))
FORM = f"{BEFORE},remove-padding,select-labelled-rows"
LOWEST = torch.finfo(torch.float32).min


class Block(torch.nn.Module):
    def __init__(self, dropout: float, attention: str):
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.last = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.dropout, self.attention = torch.nn.Dropout(dropout), attention

    def forward(self, x, bias):
        q, k, v = (f(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.attention == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            y = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v
        x = self.first(x + self.dropout(self.out(y.transpose(1, 2).reshape(x.shape))))
        return self.last(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Encoder(torch.nn.Module):
    """Two layers; ``head`` says what is read of them, ``bias`` how the mask reaches the scores."""

    def __init__(self, head: str = "first", attention: str = "sdpa", bias: str = "bool", dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(dropout, attention) for _ in range(2))
        self.scores, self.head, self.bias = torch.nn.Linear(WIDTH, CLASSES), head, bias

    def forward(self, ids, mask, labels):
        x, bias = self.words(ids) + self.places.weight, self.masked(mask)
        for block in self.blocks:
            x = block(x, bias)
        return self.loss(x, mask, labels)

    def masked(self, mask):
        keys = mask[:, None, None, :]
        if self.bias == "bool":
            return (keys != 0).expand(-1, 1, LENGTH, LENGTH)
        if self.bias == "lowest":
            return (1 - keys.to(self.words.weight.dtype)) * LOWEST
        if self.bias == "causal":
            future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            return torch.zeros(()).to(self.words.weight.dtype).masked_fill(future | (keys == 0), -torch.inf)
        if self.bias == "weak":
            return (1 - keys.to(self.words.weight.dtype)) * -100
        return (keys == 0).to(self.words.weight.dtype) * LOWEST if self.bias == "float" else keys == 0

    def loss(self, x, mask, labels):
        if self.head == "tokens":
            return F.cross_entropy(self.scores(x).view(-1, CLASSES), labels.view(-1))
        if self.head == "shifted":
            return F.cross_entropy(self.scores(x[:, :-1]).reshape(-1, CLASSES), labels[:, 1:].reshape(-1))
        if self.head == "first":
            return F.cross_entropy(self.scores(x[:, 0]), labels[:, 0].clamp(min=0))
        weights = mask[:, :, None].to(x.dtype) if self.head == "mean" else torch.ones(BATCH, LENGTH, 1).to(x)
        pooled = (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return F.cross_entropy(self.scores(pooled), labels[:, 0].clamp(min=0))


def make_batch(lengths=(20, 6, 11, 3), labelled: float = 0.6, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = (np.arange(LENGTH) < np.array(lengths)[:, None]).astype(np.int64)
    labels = rng.integers(0, CLASSES, (BATCH, LENGTH))
    labels[(mask == 0) | (rng.random(mask.shape) > labelled)] = -100
    return {"ids": rng.integers(0, WORDS, (BATCH, LENGTH)), "mask": mask, "labels": labels}


def as_torch(batch):
    return {k: torch.from_numpy(v) for k, v in batch.items()}


def captured(module, **options) -> TrainingGraph:
    return ortgraph.capture(module.train(), as_torch(make_batch()), **options)


def pack(graph: TrainingGraph, **options) -> tuple[dict[str, int], list[str]]:
    (record,) = PassManager([RemovePadding(**options)], verify="types").run(graph).passes
    return dict(record.counts), [r.reason for r in record.refusals]


def by_torch(module, batch, dtype) -> tuple[float, dict[str, np.ndarray]]:
    module = module.to(dtype)
    module.zero_grad()
    loss = module(**as_torch(batch))
    loss.backward()
    return loss.item(), {n: p.grad.double().numpy() for n, p in module.named_parameters()}


def assert_exact(graphs: list[TrainingSession], module, batch) -> None:
    """Loss and gradients by the design's measure."""
    (loss, exact), (_, single) = by_torch(module, batch, torch.float64), by_torch(module, batch, torch.float32)
    typical = np.median([np.linalg.norm(v) for v in exact.values()])
    for session in graphs:
        got = session.gradients(batch)
        assert set(got) == set(exact)
        for name, want in exact.items():
            own, size = np.linalg.norm(single[name] - want), np.linalg.norm(want)
            assert np.linalg.norm(got[name] - want) <= 4 * own + 1e-6 * (size if size > 1e-9 * typical else typical), (
                name
            )
        assert abs(session.loss(batch) - loss) <= 1e-5 * abs(loss)


def rows_used(session: TrainingSession) -> list[int]:
    return [dict(key).get(padded_rows.KEY, 0) for _, key in session._programs]


slow = pytest.mark.slow
CASES = [
    ("first", "sdpa", "bool"),
    ("tokens", "eager", "causal"),
    pytest.param("first", "eager", "lowest", marks=slow),
    pytest.param("mean", "sdpa", "bool", marks=slow),
    pytest.param("tokens", "sdpa", "float", marks=slow),
    pytest.param("mean", "eager", "lowest", marks=slow),
]


@pytest.mark.parametrize(("head", "attention", "bias"), CASES)
def test_gradients_as_exact_as_torch(head, attention, bias):
    module, batch = Encoder(head, attention, bias), make_batch()
    graph = ortgraph.optimize(captured(module), BEFORE).graph
    counts, _ = pack(graph, rows=44)
    # Products of both layers and of a head over all rows, three each; of a first token the last layer's rest is narrow.
    assert counts["products"] == {"first": 24, "tokens": 39, "mean": 36}[head]
    assert_exact([TrainingSession(graph, threads=t, poison=True) for t in (1, 2)], module, batch)
    widths = [tuple(n.outputs[0].shape) for n in graph.graph if n.op_type == "Gemm" and n.outputs[0].shape is not None]
    assert not any(shape[0] == BATCH * LENGTH for shape in widths)


@pytest.mark.parametrize(
    ("head", "bias"),
    [
        ("first", "lowest"),
        *(pytest.param(*case, marks=slow) for case in (("tokens", "bool"), ("tokens", "lowest"), ("mean", "lowest"))),
    ],
)
def test_sequences_of_padding_alone(head, bias):
    """They see all their keys alike, or nothing; a label on padding, and a first token that is padding, are read."""
    module, batch = Encoder(head, "eager" if bias == "lowest" else "sdpa", bias), make_batch((7, 0, 20, 4))
    batch["labels"][3, 9] = 1
    graph = ortgraph.optimize(captured(module), BEFORE).graph
    assert pack(graph, rows=72)[0]
    assert_exact([TrainingSession(graph)], module, batch)


def test_too_many_rows_or_another_mask_give_no_number():
    graph = ortgraph.optimize(captured(Encoder("tokens")), BEFORE).graph
    assert pack(graph, rows=40)[0]
    session = TrainingSession(graph, check_finite=False)
    assert np.isfinite(session.loss(make_batch((20, 6, 11, 3))))
    other = make_batch((20, 6, 10, 3))
    other["mask"][0, 0] = 2
    for batch in (make_batch((20, 6, 11, 4)), other):
        assert np.isnan(session.loss(batch))
        assert all(np.isnan(g).any() for g in session.gradients(batch).values())


def test_sessions_choose_rows_by_the_mask(tmp_path):
    module = Encoder("first", bias="bool")
    ortgraph.optimize(captured(module), FORM).graph.save(tmp_path / "train.onnx")
    session = TrainingSession(ortgraph.load(tmp_path / "train.onnx"))
    for lengths, rows in (((20, 6, 11, 3), 40), ((20, 20, 20, 20), 0), ((2, 3, 0, 1), 30)):
        assert_exact([session], module, make_batch(lengths))
        assert rows_used(session)[-1] == rows
    wrong = make_batch()
    wrong["mask"][0] = 2
    session.loss(wrong)
    assert rows_used(session)[-1] == 0


@slow
def test_a_dynamic_batch_chooses_rows_and_labelled_ones_among_them():
    module = Encoder("tokens", bias="lowest", attention="eager")
    dynamic = {name: {0: "batch"} for name in ("ids", "mask", "labels")}
    session = TrainingSession(ortgraph.optimize(captured(module, dynamic=dynamic), FORM).graph)
    assert_exact([session], module, make_batch(labelled=0.2))
    assert rows_used(session)[-1] == 40
    assert dict(list(session._programs)[-1][1])[labelled_rows.KEY] == 9


def test_rows_that_a_batch_needs():
    note = padded_rows.PaddingNote("mask", (0,), True, (("labels", -100),))
    full = make_batch((20, 20, 20, 20))
    for lengths, needed in (((20, 6, 11, 3), 40), ((1, 1, 1, 1), 4), ((0, 1, 1, 1), 23), ((20, 20, 20, 20), 80)):
        batch = make_batch(lengths)
        assert note.needed(batch) == needed
        assert note.rows(batch) == (0 if needed == 80 else -(-needed // 10) * 10)
    assert note.needed({**full, "mask": make_batch((3, 20, 20, 20))["mask"]}) == 80  # labels on padding
    assert note.needed({**full, "mask": 2 * full["mask"]}) is None


def test_where_the_preset_has_it():
    options = {"optimizer": None, "target": "onnxruntime-training", "shapes": {}, "accumulation_steps": 1}
    names = [p.name for p in registry.preset("O2", remove_padding=True, **options)]
    assert names[names.index("select-labelled-rows") - 1] == "remove-padding"
    assert "remove-padding" not in [p.name for p in registry.preset("O2", **options)]


@slow
def test_steps_as_with_all_rows():
    graph = captured(Encoder("tokens"))
    packed, whole = (
        TrainingSession(ortgraph.optimize(graph, optimizer=SGD(lr=1e-1), remove_padding=p).graph) for p in (True, False)
    )
    for i, lengths in enumerate(((20, 6, 11, 3), (20, 20, 20, 20), (4, 4, 4, 4))):
        batch = make_batch(lengths, seed=i)
        np.testing.assert_allclose(packed.step(batch), whole.step(batch), rtol=1e-4)
    assert rows_used(packed) == [40, 0, 20]
    for name, value in packed.state_dict().items():
        np.testing.assert_allclose(value, whole.state_dict()[name], atol=1e-5)


def test_dropout_by_its_masks():
    """The whole graph with the masks of the packed one in place of its own draws has the same loss and gradients."""
    graph = ortgraph.optimize(captured(Encoder("tokens", dropout=0.4)), BEFORE).graph
    graph.values["random_key"] = np.array(7)
    packed, batch, rows = graph.clone(), make_batch(), 44
    assert pack(packed, rows=rows)[0]
    draws = [n for n in packed.graph if n.op_type == "Dropout"]
    assert [n.outputs[1].shape.numpy() for n in draws] == [(1, rows, WIDTH)] * 4
    assert [n.attributes["node"].as_int() for n in draws] == [
        n.attributes["node"].as_int() for n in graph.graph if n.op_type == "Dropout"
    ]
    session = TrainingSession(_showing(packed, [n.outputs[1] for n in draws]))
    shown = session.results(batch)
    flat = batch["mask"].reshape(-1)
    kept = np.concatenate([np.flatnonzero(flat), np.flatnonzero(flat == 0)])[:rows]
    for node in [n for n in graph.graph if n.op_type == "Dropout"]:
        mask = np.zeros((BATCH * LENGTH, WIDTH), np.float32)
        found = next(n for n in draws if n.attributes["node"].as_int() == node.attributes["node"].as_int())
        mask[kept] = shown[f"shown.{found.outputs[1].name}"][0]
        assert abs(mask[kept].mean() - 0.6) < 0.08
        _fix_draw(graph, node, mask.reshape(BATCH, LENGTH, WIDTH))
    want, got = TrainingSession(graph).gradients(batch), session.gradients(batch)
    assert all(np.linalg.norm(got[k] - want[k]) <= 2e-5 * np.linalg.norm(want[k]) + 1e-7 for k in want)


def _showing(graph: TrainingGraph, values: list[ir.Value]) -> TrainingGraph:
    """The graph with further outputs, as floats."""
    names = []
    for value in values:
        node = ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name=f"shown.{value.name}")
        node.outputs[0].name, node.outputs[0].shape = f"shown.{value.name}", value.shape
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        graph.graph.append(node)
        graph.graph.outputs.append(node.outputs[0])
        names.append(node.outputs[0].name)
    graph.signature = graph.signature.replace(outputs=(*graph.signature.outputs, *names))
    return graph


def _fix_draw(graph: TrainingGraph, node: ir.Node, mask: np.ndarray) -> None:
    b = Builder(graph.graph, "test", before=node)
    scale = b.const(mask / 0.6, np.float32)
    ir.convenience.replace_all_uses_with(node.outputs[0], b.op("Mul", node.inputs[0], scale))
    for gradient in [u.node for u in node.outputs[1].uses()]:
        before = Builder(graph.graph, "test", before=gradient)
        ir.convenience.replace_all_uses_with(gradient.outputs[0], before.op("Mul", gradient.inputs[0], scale))
        graph.graph.remove(gradient, safe=True)
    graph.graph.remove(node, safe=True)


REFUSED = {
    "all rows": (Encoder("all"), "no matrix product can leave out rows of padding: they are read by"),
    "weak": (Encoder("first", "eager", "weak"), "no attention is masked by an integer input"),
    "the other way": (Encoder("first", "sdpa", "turned"), "no attention is masked by an integer input"),
    "shifted": (Encoder("shifted"), "no matrix product can leave out rows of padding: they are read by"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    module, reason = REFUSED[case]
    graph = ortgraph.optimize(captured(module), BEFORE).graph
    counts, reasons = pack(graph, rows=40)
    assert not counts and reasons[0].startswith(reason)


class Tokens(Encoder):
    def loss(self, x, mask, labels):
        scores = self.scores(x)
        return {"loss": F.cross_entropy(scores.view(-1, CLASSES), labels.view(-1)), "scores": scores}


@slow
def test_outputs_are_whole():
    """With ``rows`` the forward half stays whole for an output; a session's training programs have none."""
    graph = captured(Tokens("tokens"))
    before = ortgraph.optimize(graph, BEFORE).graph
    after, batch = before.clone(), make_batch()
    assert pack(after, rows=40)[0]["products"] == 26  # the backward half
    got, want = TrainingSession(after).results(batch), TrainingSession(before).results(batch)
    assert all(np.linalg.norm(got[k] - want[k]) <= 1e-5 * np.linalg.norm(want[k]) + 1e-7 for k in want)
    session = TrainingSession(ortgraph.optimize(graph, FORM).graph)
    session.gradients(batch)
    assert rows_used(session) == [40]
    assert np.array_equal(session.results(batch)["scores"], want["scores"])
    with pytest.raises(ortgraph.errors.InputError, match="remove_padding goes with O2"):
        ortgraph.optimize(graph, "O1", remove_padding=True)
