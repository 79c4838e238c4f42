"""FuseEmbeddingUpdate: the same bits without the gradient table; near misses; both programs of a session."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.ops import kernels
from ortgraph.passes.lowering.fuse_embedding_update import FuseEmbeddingUpdate

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")
I64 = ir.DataType.INT64
ROWS, WIDTH = 9, 5


def update(bench, *, rows=ROWS, weight=(ROWS, WIDTH), padding=-1, scale=False, body=None, expose=True, ids=(2, 4)):
    """AdamW of a table; ``body(builder, gradient)`` may change the gradient or read it."""

    def make(b, rate, step, w, dy, indices, m, v, factor):
        grad = b.op("EmbeddingGrad", dy, indices, domain=kernels.DOMAIN, rows=rows, padding_idx=padding)
        used, more = (grad, []) if body is None else body(b, grad)
        inputs = [rate, step, w, used, m, b.op("Mul", v, v), *([factor] if scale else [])]
        new = b.multi(
            "AdamW", *inputs, outputs=3, domain=kernels.DOMAIN, beta1=0.8, beta2=0.99, epsilon=1e-7, weight_decay=0.1
        )
        return [*new, *([grad] if expose else []), *more]

    shapes = {
        "rate": (), "step": (), "w": weight, "dy": (*ids, WIDTH), "indices": ids, "m": weight, "v": weight, "factor": ()
    }  # fmt: skip
    return bench.make(make, shapes, {"step": I64, "indices": I64})


@pytest.mark.parametrize(
    "case", [{}, {"padding": 2}, {"scale": True}, {"expose": False}, {"ids": (7,)}, {"ids": (1, 2, 3)}]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_same_bits(bench, case, threads):
    graph = update(bench, **case)
    feeds = bench.feeds(graph) | {"step": np.array(3)}
    before = bench.run(graph, feeds, threads)
    assert bench.apply(graph, FuseEmbeddingUpdate()) == {"updates": 1}
    for old, new in zip(before, bench.run(graph, feeds, threads), strict=True):
        np.testing.assert_array_equal(old, new)
    assert bench.ops(graph).count("ortgraph.kernels.EmbeddingGrad") == case.get("expose", True)
    fused = next(n for n in graph.graph if n.op_type == "EmbeddingAdamW")
    assert fused.attributes["beta1"].as_float() == pytest.approx(0.8)
    assert fused.attributes["padding_idx"].as_int() == case.get("padding", -1)


def norm(b, grad):
    return grad, [b.op("ReduceL2", grad, keepdims=0)]


def tied(b, grad):
    return b.op("Add", grad, b.const(np.ones((ROWS, WIDTH), np.float32))), []


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"body": norm}, "also read by ReduceL2"),
        ({"body": tied}, "a sum of which"),
        ({"weight": ("n", WIDTH)}, "not known to be a table"),
        ({"weight": (ROWS * WIDTH,)}, "not known to be a table"),
        ({"rows": ROWS + 1}, "not known to be a table"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(update(bench, **case), FuseEmbeddingUpdate())
    assert len(reasons) == 1 and word in reasons[0]


def test_without_kernels(bench, monkeypatch):
    assert bench.refusals(update(bench), FuseEmbeddingUpdate(kernels=False)) == [
        "compiled kernels are switched off (kernels=false)"
    ]
    monkeypatch.setattr(kernels, "available", lambda: False)
    (reason,) = bench.refusals(update(bench), FuseEmbeddingUpdate())
    assert "not available" in reason


def test_other_updates_are_no_candidates(bench):
    assert bench.refusals(update(bench, body=lambda b, g: (b.op("Neg", g), [])), FuseEmbeddingUpdate()) == []


def embedding_model():
    import torch

    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(50, 8, padding_idx=0)
            self.position = torch.nn.Embedding(6, 8)
            self.head = torch.nn.Linear(8, 3)

        def forward(self, ids, labels):
            hidden = self.table(ids) + self.position(torch.arange(ids.shape[1]))
            return torch.nn.functional.cross_entropy(self.head(torch.tanh(hidden)).mean(1), labels)

    batch = {"ids": torch.randint(0, 50, (4, 6)), "labels": torch.randint(0, 3, (4,))}
    return Model(), batch


@pytest.mark.parametrize("threads", [1, 2])
def test_step_and_gradients(threads):
    from ortgraph.manager import PassManager, parse_pipeline
    from ortgraph.runtime.session import TrainingSession

    module, batch = embedding_model()
    results = []
    for extra in ("", "fuse-embedding-update,eliminate-dead-code,"):
        graph = ortgraph.capture(module, batch)
        text = f"mark-optimized,attach-optimizer{{optimizer=adamw(lr=0.01)}},lower,{extra}plan-memory"
        PassManager(parse_pipeline(text)).run(graph)
        ops = [n.op_type for n in graph.graph]
        assert ("EmbeddingAdamW" in ops) == bool(extra)
        session = TrainingSession(graph, threads=threads)
        losses = [session.step(batch) for _ in range(3)]
        results.append((losses, session.state_dict(), session.gradients(batch)))
    (losses, state, gradients), (fused_losses, fused_state, fused_gradients) = results
    assert losses == fused_losses
    for old, new in ((state, fused_state), (gradients, fused_gradients)):
        assert set(old) == set(new)
        for key in old:
            np.testing.assert_array_equal(np.asarray(old[key]), np.asarray(new[key]))
