"""FuseMaskedSoftmax: masks of all broadcasts, scales, orders; near misses; through a session."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.ops import kernels
from ortgraph.passes.lowering.fuse_masked_softmax import FuseMaskedSoftmax

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")
SHAPE = (2, 3, 4, 19)


def softmax(bench, *, mask=(2, 1, 1, 19), scale=None, swap=False, axis=-1, x=SHAPE, kernel=False, read="", dtype=None):
    """``read`` names an inner value with another reader: ``total`` or ``scaled``."""
    dtype = dtype or ir.DataType.FLOAT

    def make(b, scores, bias):
        scaled = scores if scale is None else b.op("Mul", scores, b.const(scale, dtype))
        total = b.op("Add", *((bias, scaled) if swap else (scaled, bias)))
        made = b.op("Softmax", total, axis=axis, domain=kernels.DOMAIN if kernel else "")
        return [made, *([b.op("Neg", {"total": total, "scaled": scaled}[read])] if read else [])]

    return bench.make(make, {"scores": x, "bias": mask}, {"scores": dtype, "bias": dtype})


@pytest.mark.parametrize(
    "case",
    [
        {}, {"mask": (19,)}, {"mask": (4, 19)}, {"mask": (2, 3, 4, 1)}, {"mask": SHAPE}, {"mask": (1, 3, 4, 19)},
        {"mask": ()}, {"mask": (5, *SHAPE)}, {"swap": True}, {"axis": 3}, {"kernel": True},
        {"x": ("n", 3, 4, 19), "mask": (1, 1, 4, 19)},
        {"x": ("n", 3, 4, 19), "mask": ("n", 1, 1, 19)},
    ],
)  # fmt: skip
def test_masked(bench, case):
    graph = softmax(bench, **case)
    assert bench.apply(graph, FuseMaskedSoftmax(), tolerance=1e-6) == {"masked": 1}
    assert bench.ops(graph) == ["ortgraph.kernels.ScaledMaskedSoftmax"]


@pytest.mark.parametrize("case", [{}, {"swap": True}, {"mask": SHAPE}, {"mask": SHAPE, "swap": True}])
def test_scaled_and_masked(bench, case):
    graph = softmax(bench, scale=0.125, **case)
    assert bench.apply(graph, FuseMaskedSoftmax(), tolerance=1e-6) == {"scaled_and_masked": 1}
    assert bench.ops(graph) == ["ortgraph.kernels.ScaledMaskedSoftmax"]


def test_scaled_scores_with_another_reader_stay(bench):
    graph = softmax(bench, scale=0.5, read="scaled")
    assert bench.apply(graph, FuseMaskedSoftmax(), tolerance=1e-6) == {"masked": 1}
    assert bench.ops(graph).count("Mul") == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_masked_positions(bench, threads):
    graph = softmax(bench, mask=(2, 1, 4, 19))
    feeds = bench.feeds(graph)
    feeds["bias"] = np.where(feeds["bias"] > 0, 0, -np.inf).astype(np.float32)
    feeds["bias"][0, 0, 1], feeds["bias"][1, 0, 2] = -np.inf, np.finfo(np.float32).min
    (before,) = bench.run(graph, feeds, threads)
    FuseMaskedSoftmax()(graph.model)
    (after,) = bench.run(graph, feeds, threads)
    assert np.isnan(before[0, :, 1]).all() and np.isnan(after[0, :, 1]).all()
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"axis": 2}, "not over the last axis"),
        ({"read": "total"}, "also read by Neg"),
        ({"mask": ("n", 1, 1, 19)}, "mask of known shape"),
        ({"x": (None, 3, 4, 19), "mask": (None, 1, 1, 19)}, "mask of known shape"),
        ({"x": (3, 1, 19), "mask": (1, 4, 19)}, "mask of known shape"),
        ({"dtype": ir.DataType.DOUBLE}, "element type"),
    ],
)
def test_near_misses(bench, case, word):
    reasons = bench.refusals(softmax(bench, **case), FuseMaskedSoftmax())
    assert len(reasons) == 1 and word in reasons[0]


def test_exposed_inner_values(bench):
    seen = bench.expose_each(lambda: softmax(bench, scale=0.3), FuseMaskedSoftmax(), tolerance=1e-6)
    assert seen == [("Mul", {"masked": 1}), ("Add", {})]


def test_without_kernels(bench):
    (reason,) = bench.refusals(softmax(bench), FuseMaskedSoftmax(kernels=False))
    assert "kernels=false" in reason


def attention_model(masked):
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 24)

        def forward(self, x, seen, target):
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            mask = seen[:, None, None, :] if masked else None
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked)
            return torch.nn.functional.mse_loss(y, target)

    torch.manual_seed(0)
    seen = torch.ones(3, 5, dtype=torch.bool)
    seen[0, 3:], seen[1] = False, False  # one sequence has no key to see
    return Model(), {"x": torch.randn(3, 5, 8), "seen": seen, "target": torch.randn(3, 2, 5, 4)}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_step_and_gradients(masked, threads, decomposed_attention):
    from ortgraph.manager import PassManager, parse_pipeline
    from ortgraph.runtime.session import TrainingSession

    module, batch = attention_model(masked)
    results = []
    clean = "fold-constants,eliminate-common-subexpressions,eliminate-dead-code"
    for extra in ("", "fuse-attention-gradient,fuse-masked-softmax,eliminate-dead-code,"):
        graph = ortgraph.capture(module, batch)
        lower = f"lower{{table={decomposed_attention}}}"
        text = f"mark-optimized,attach-optimizer{{optimizer=adamw(lr=0.01)}},{lower},{clean},{extra}plan-memory"
        PassManager(parse_pipeline(text)).run(graph)
        ops = {n.op_type for n in graph.graph}
        assert {"ScaledMaskedSoftmax", "SoftmaxGrad"} <= ops or not extra
        session = TrainingSession(graph, threads=threads)
        gradients = session.gradients(batch)
        results.append(([session.step(batch) for _ in range(3)], gradients))
    (losses, gradients), (fused_losses, fused_gradients) = results
    np.testing.assert_allclose(fused_losses, losses, rtol=1e-6)
    assert set(gradients) == set(fused_gradients)
    for key, value in gradients.items():
        np.testing.assert_allclose(fused_gradients[key], value, rtol=0, atol=1e-6)
