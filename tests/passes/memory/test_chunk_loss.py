"""chunk-loss: every form of head against PyTorch in float64, what stays whole, and the memory that it saves."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.graph import TrainingGraph, replace_value
from ortgraph.manager import PassManager, numerics, registry
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE
from ortgraph.optim import AdamW
from ortgraph.passes.memory.chunk_loss import ChunkLoss, _chunks
from ortgraph.passes.pipelines import CANONICAL, FUSION, MATMUL
from ortgraph.runtime.session import TrainingSession

torch = pytest.importorskip("torch")
F = torch.nn.functional
CLASSES, ROWS = 211, 5
FORMS = {"optimized": ",".join((CANONICAL, FUSION, CANONICAL, MATMUL)), "captured": "fuse-cross-entropy"}


class Tagger(torch.nn.Module):
    """Words to classes, by a head with or without bias, on all places or on all but the last one."""

    def __init__(self, bias: bool = True, shift: bool = False, tied: bool = False, frozen: bool = False, **loss):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(CLASSES, 24)
        self.inner = torch.nn.Linear(24, 24)
        self.head = torch.nn.Linear(24, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.table.weight
        if frozen:
            self.head.requires_grad_(False)
        self.shift, self.loss = shift, loss

    def forward(self, ids, labels):
        scores = self.head(torch.tanh(self.inner(self.table(ids))))
        if self.shift:
            scores, labels = scores[:, :-1], labels[:, 1:]
        return F.cross_entropy(scores.reshape(-1, CLASSES), labels.reshape(-1), **self.loss)


def make_batch():
    ids, labels = torch.arange(24).reshape(3, 8) * 7 % CLASSES, torch.arange(24).reshape(3, 8) * 31 % CLASSES
    labels[1, 2:5] = -100
    return {"ids": ids, "labels": labels}


def gradients_by_torch(module, batch, dtype):
    module = module.to(dtype)
    module.zero_grad()
    module.loss = {k: v.to(dtype) if torch.is_tensor(v) else v for k, v in module.loss.items()}
    module(**batch).backward()
    return {n: p.grad.double().numpy() for n, p in module.named_parameters() if p.grad is not None}


def chunk(graph: TrainingGraph, **options):
    """Run the pass; (counts, reasons of refusals)."""
    options = {"least_bytes": 0, "rows": ROWS, **options}
    (record,) = PassManager([ChunkLoss(**options)], verify="types").run(graph).passes
    return dict(record.counts), [r.reason for r in record.refusals]


def whole_scores(graph: TrainingGraph, classes: int, rows: int):
    """Values of a step that hold more rows of scores than a chunk has."""
    from ortgraph.runtime.program import needed_nodes
    from ortgraph.runtime.selection import wanted_outputs

    names = set(wanted_outputs(graph.signature, "gradients")[0])
    nodes = needed_nodes(graph.graph, [v for v in graph.graph.outputs if v.name in names])
    shapes = {o.name: tuple(o.shape) for n in nodes for o in n.outputs if o.shape is not None}
    return {n: s for n, s in shapes.items() if s and s[-1] == classes and np.prod(s[:-1]) > rows}


CASES = {
    "plain": {},
    "no bias": {"bias": False},
    "shifted": {"shift": True},
    "shifted, no bias": {"shift": True, "bias": False},
    "tied": {"tied": True},
    "frozen head": {"frozen": True},
    "sum": {"reduction": "sum"},
    "weights": {"weight": torch.rand(CLASSES, generator=torch.Generator().manual_seed(1)) + 0.5},
    "ignoring a class": {"ignore_index": 31},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_as_exact_as_torch(case, form):
    module, batch = Tagger(**CASES[case]), make_batch()
    if case == "ignoring a class":
        batch["labels"] = batch["labels"].clamp(min=0)
    graph = ortgraph.optimize(ortgraph.capture(module, batch), FORMS[form]).graph
    before = graph.clone()
    assert chunk(graph)[0] == {"chunked": 1}
    assert not whole_scores(graph, CLASSES, ROWS)
    feeds = {k: v.numpy() for k, v in batch.items()}
    exact = gradients_by_torch(module, batch, torch.float64)
    single = gradients_by_torch(module, batch, torch.float32)
    runs = [TrainingSession(graph, threads=t) for t in (1, 2)]
    got, again = (s.gradients(feeds) for s in runs)
    assert set(got) == set(exact)
    for name, want in exact.items():
        own = np.linalg.norm(single[name] - want)
        assert np.linalg.norm(got[name] - want) <= 4 * own + 1e-6 * np.linalg.norm(want), name
        np.testing.assert_array_equal(got[name], again[name])
    assert numerics.compare(before, graph, feeds).equal


def test_model_outputs_stay_for_programs_that_ask(classifier_graph, classifier_batch):
    graph, batch = classifier_graph(), classifier_batch()
    before = graph.clone()
    assert chunk(graph)[0] == {"chunked": 1}
    assert not whole_scores(graph, 11, ROWS)
    assert numerics.compare(before, graph, batch).equal
    got, want = (TrainingSession(g).evaluate(batch) for g in (graph, before))
    assert np.array_equal(got["logits"], want["logits"])


def test_a_step_with_an_optimizer(classifier_graph, classifier_batch):
    batch = classifier_batch()
    losses = []
    for chunked in (False, True):
        graph = classifier_graph()
        if chunked:
            assert chunk(graph)[0] == {"chunked": 1}
        graph = ortgraph.optimize(graph, "O1", optimizer=AdamW(lr=0.01)).graph
        session = TrainingSession(graph)
        losses.append([session.step(batch) for _ in range(4)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)


def make_head(b: Builder, x, w, labels, seed, dependent=False, stray=None):
    """loss, dx, dw of cross-entropy(x w), with a part that does not fit in."""
    scores = b.op("MatMul", x, w)
    loss, logs, total = b.multi("CrossEntropy", scores, labels, outputs=3, domain=COMPOSITE)
    if dependent:
        seed = b.op("Mul", seed, b.op("Exp", loss))
    ds = b.op("CrossEntropyGrad", seed, logs, labels, None, total, domain=COMPOSITE)
    dx = b.op("MatMul", ds, b.op("Transpose", w, perm=[1, 0]))
    dw = b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), ds)
    outputs = [b.op("Exp", loss) if dependent else loss, dx, dw]
    if stray is not None:
        outputs[1] = b.op("Add", dx, b.op("ReduceMax", stray(b, scores, logs, ds), keepdims=0))
    return outputs


def head_graph(bench, **options):
    inputs = {"x": (12, 4), "w": (4, 6), "labels": (12,), "seed": ()}
    return bench.make(lambda b, *v: make_head(b, *v, **options), inputs, {"labels": ir.DataType.INT64})


PASS = ChunkLoss(least_bytes=0, rows=ROWS)


def test_a_seed_that_depends_on_the_loss(bench):
    graph = head_graph(bench, dependent=True)
    assert bench.apply(graph, PASS) == {"chunked": 1}
    assert bench.ops(graph).count("ortgraph.CrossEntropyAndGrad") == 3


def test_a_seed_made_between_the_loss_and_its_gradient(bench):
    def body(b, x, w, labels, seed):
        late = []

        class Late(Builder):
            def op(self, op_type, *inputs, **attributes):
                if op_type == "CrossEntropyGrad":
                    late.append(super().op("Mul", super().op("Neg", inputs[0]), inputs[4]))
                    inputs = (late[0], *inputs[1:])
                return super().op(op_type, *inputs, **attributes)

        return make_head(Late(b.graph, "capture", names=b.names), x, w, labels, seed)

    inputs = {"x": (12, 4), "w": (4, 6), "labels": (12,), "seed": ()}
    graph = bench.make(body, inputs, {"labels": ir.DataType.INT64})
    assert bench.apply(graph, PASS) == {"chunked": 1}


@pytest.mark.parametrize(
    "stray,reason",
    [
        (lambda b, scores, logs, ds: scores, "is also read by ReduceMax"),
        (lambda b, scores, logs, ds: b.op("Exp", logs), "is also read by Exp"),
        (lambda b, scores, logs, ds: ds, "the gradient of the scores is also read by ReduceMax"),
    ],
)
def test_other_readers_are_noticed(bench, stray, reason):
    graph = head_graph(bench, stray=stray)
    graph.signature = graph.signature.replace(outputs=("out2",), input_gradients={"x": "out1"})
    (found,) = bench.refusals(graph, PASS)
    assert reason in found


def test_a_metric_of_the_scores_does_not_matter(bench):
    graph = head_graph(bench, stray=lambda b, scores, logs, ds: scores)
    assert bench.apply(graph, PASS) == {"chunked": 1}  # out1 is a model output here


@pytest.mark.parametrize(
    "options,reason",
    [
        ({"least_bytes": 12 * 6 * 4}, "the scores take 288 bytes, least_bytes is 288"),
        ({"rows": 12}, "the scores of 12 rows fit in one chunk"),
    ],
)
def test_what_is_small_stays_whole(bench, options, reason):
    assert bench.refusals(head_graph(bench), dataclasses.replace(PASS, **options)) == [reason]


def test_other_products_and_losses_are_refused(bench):
    def refusal(edit):
        graph = head_graph(bench)
        edit(graph, {n.op_type: n for n in graph.graph})
        (found,) = bench.refusals(graph, PASS)
        return found

    def scaled(graph, nodes):
        b = Builder(graph.graph, "capture", before=nodes["CrossEntropy"])
        product = nodes["CrossEntropy"].inputs[0]
        nodes["CrossEntropy"].replace_input_with(0, b.op("Mul", product, b.scalar(2.0, product)))

    def per_row(graph, nodes):
        for name in ("CrossEntropy", "CrossEntropyGrad"):
            nodes[name].attributes["reduction"] = ir.AttrString("reduction", "none")

    def other_labels(graph, nodes):
        b = Builder(graph.graph, "capture", before=nodes["CrossEntropyGrad"])
        nodes["CrossEntropyGrad"].replace_input_with(2, b.op("Abs", nodes["CrossEntropy"].inputs[1]))

    def other_total(graph, nodes):
        b = Builder(graph.graph, "capture", before=nodes["CrossEntropyGrad"])
        nodes["CrossEntropyGrad"].replace_input_with(4, b.op("Abs", nodes["CrossEntropy"].outputs[2]))

    def no_gradient(graph, nodes):
        ds = nodes["CrossEntropyGrad"].outputs[0]
        replace_value(ds, nodes["CrossEntropy"].inputs[0])
        graph.graph.remove(nodes["CrossEntropyGrad"], safe=True)

    assert refusal(scaled) == "the scores come from Mul, not from a matrix product"
    assert refusal(per_row) == "the loss has one entry per row"
    assert refusal(other_labels) == "the loss and its gradient read different labels or weights"
    assert refusal(other_total) == "the gradient is normalised by another number than the loss"
    assert refusal(no_gradient) == "the loss has no gradient"


def test_symbolic_rows_are_refused(classifier_graph):
    counts, (reason,) = chunk(classifier_graph(batch="batch"))
    assert not counts and "bind the symbolic dimensions first" in reason


def test_label_smoothing_is_refused():
    graph = ortgraph.capture(Tagger(label_smoothing=0.1), make_batch())
    graph = ortgraph.optimize(graph, FORMS["optimized"]).graph
    assert chunk(graph) == ({}, ["the loss has no gradient"])


def test_ignored_labels_only():
    module, batch = Tagger(), make_batch()
    graph = ortgraph.optimize(ortgraph.capture(module, batch), FORMS["optimized"]).graph
    assert chunk(graph)[0] == {"chunked": 1}
    batch["labels"][:] = -100
    session = TrainingSession(graph)
    assert all((g == 0).all() for g in session.gradients({k: v.numpy() for k, v in batch.items()}).values())


@dataclasses.dataclass(frozen=True)
class _Sizes:
    rows: int
    classes: int
    loss: object = None


@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 300, 511, 512, 513, 4096])
@pytest.mark.parametrize("given,chunk_bytes", [(0, 1), (0, 1 << 25), (1, 1), (7, 1), (64, 1), (100, 1)])
def test_chunks_cover_all_rows_once(rows, given, chunk_bytes):
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[rows, 32000])
    loss = ir.node("CrossEntropy", [x], domain=COMPOSITE)
    chunks = _chunks(_Sizes(rows, 32000, loss), given, chunk_bytes)  # type: ignore[arg-type]
    assert [i for start, end in chunks for i in range(start, end)] == list(range(rows))
    assert max(end - start for start, end in chunks) <= (given or max(256, chunk_bytes // 128000))


def test_the_arena_holds_one_chunk_of_scores():
    ids = torch.arange(12 * 32).reshape(12, 32) % CLASSES
    module, batch = Tagger(), {"ids": ids, "labels": ids * 31 % CLASSES}
    arenas = []
    for passes in ("", "chunk-loss{least_bytes=0 rows=48},"):
        graph = ortgraph.optimize(ortgraph.capture(module, batch), f"{FORMS['optimized']},{passes}mark-optimized").graph
        session = TrainingSession(graph)
        session.gradients({k: v.numpy() for k, v in batch.items()})
        arenas.append(session.arena_bytes)
    assert arenas[0] - arenas[1] >= 0.9 * (ids.numel() - 48) * CLASSES * 4


@pytest.mark.parametrize("budget,least", [(None, 1 << 25), ("50%", 1 << 25), ("8MiB", 1 << 20), ("4GB", 1 << 25)])
def test_a_budget_in_bytes_lowers_the_threshold(budget, least):
    options = {"optimizer": None, "target": "onnxruntime", "shapes": {}, "accumulation_steps": 1}
    (found,) = [p for p in registry.preset("O2", memory_budget=budget, **options) if p.name == "chunk-loss"]
    assert found.least_bytes == least
