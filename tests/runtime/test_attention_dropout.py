"""Attention with dropout as one node: the same step, evaluation without it, artifacts with the runtime's own mask."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import ortgraph  # noqa: E402
from ortgraph.capture.artifacts_write import training_model  # noqa: E402
from ortgraph.manager.pass_manager import PassManager  # noqa: E402
from ortgraph.manager.pipeline_text import parse_pipeline  # noqa: E402
from ortgraph.passes import pipelines  # noqa: E402

FUSED = ",".join((pipelines.CANONICAL, pipelines.FUSION, pipelines.CANONICAL, pipelines.ATTENTION, pipelines.MATMUL))


class Model(torch.nn.Module):
    """Self-attention in parts, with dropout of the probabilities; the loss is a mean square."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(16, 48)
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x):
        q, k, v = (part.view(2, 9, 2, 8).transpose(1, 2) for part in self.projection(x).chunk(3, -1))
        p = self.dropout(torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1))
        return ((p @ v).transpose(1, 2).reshape(2, 9, 16) ** 2).mean()


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    module = Model().train()
    batch = {"x": torch.randn(2, 9, 16)}
    return module, batch, ortgraph.capture(module, batch)


@pytest.fixture(scope="module")
def fused(captured):
    graph = captured[2].clone()
    PassManager(parse_pipeline(FUSED)).run(graph)
    assert [n.op_type for n in graph.graph if "Attention" in n.op_type or "Softmax" in n.op_type] == [
        "Attention", "AttentionGrad",
    ]  # fmt: skip
    return graph


def test_gradients_are_those_of_the_parts(captured, fused):
    _, batch, graph = captured
    before, after = (ortgraph.TrainingSession(g, threads=2).gradients(batch) for g in (graph, fused))
    for name, gradient in before.items():
        np.testing.assert_allclose(after[name], gradient, rtol=1e-4, atol=1e-6 * np.abs(gradient).max())


def test_expansions_draw_the_same(captured, fused):
    _, batch, _ = captured
    expanded = fused.clone()
    PassManager(parse_pipeline("mark-optimized,lower{prefer=expansion kernels=false},eliminate-dead-code")).run(
        expanded
    )
    before, after = (ortgraph.TrainingSession(g, threads=2).gradients(batch) for g in (fused, expanded))
    for name, gradient in before.items():
        np.testing.assert_allclose(after[name], gradient, rtol=1e-4, atol=1e-6 * np.abs(gradient).max())


def test_evaluation_is_without_dropout(captured, fused):
    module, batch, _ = captured
    found = ortgraph.TrainingSession(fused, threads=2).evaluate(batch)[fused.signature.loss]
    module.eval()
    with torch.no_grad():
        expected = float(module(**batch))
    module.train()
    np.testing.assert_allclose(found.reshape(()), expected, rtol=1e-5)


def test_artifacts_keep_one_mask_for_both_halves(fused):
    model = training_model(fused.clone())
    ops = [node.op_type for node in model.graph.node]
    assert ops.count("Dropout") == 1 and ops.count("DropoutGrad") == 1
    mask = next(node for node in model.graph.node if node.op_type == "Dropout").output[1]
    assert mask in next(node for node in model.graph.node if node.op_type == "DropoutGrad").input
