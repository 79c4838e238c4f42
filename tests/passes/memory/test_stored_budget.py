"""A budget is noted in the graph: what undoes it afterwards is refused by plan-memory, and said by a session."""

from __future__ import annotations

import json
import logging

import numpy as np
import onnx_ir.passes.common
import pytest

import ortgraph
from ortgraph.errors import OrtgraphError
from ortgraph.graph import TrainingGraph
from ortgraph.plan.stored_budget import METADATA_KEY, stored_budget

torch = pytest.importorskip("torch", reason="the models are PyTorch's")
nn = torch.nn
SELECT = "select-recompute{budget=80% seconds=1.5}"
PLAN = "plan-memory{keep_order=true}"


class Net(nn.Module):
    """Deep enough that activations outweigh one layer's need."""

    def __init__(self) -> None:
        super().__init__()
        parts = (m for _ in range(5) for m in (nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)))
        self.blocks = nn.Sequential(*parts)

    def forward(self, x):
        return self.blocks(x).square().mean()


@pytest.fixture(scope="module")
def stepped() -> TrainingGraph:
    torch.manual_seed(0)
    captured = ortgraph.capture(Net(), {"x": torch.randn(64, 16)})
    attach = "mark-optimized,attach-optimizer{optimizer=adamw},lower{target=onnxruntime-training}"
    clean = "eliminate-common-subexpressions,eliminate-identity,eliminate-dead-code"
    return ortgraph.optimize(captured, f"{attach},{clean}").graph


@pytest.fixture(scope="module")
def tight(stepped: TrainingGraph) -> TrainingGraph:
    return ortgraph.optimize(stepped, f"{SELECT},{PLAN}").graph


def batch() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)}


def test_the_arena_keeps_what_is_noted(tight: TrainingGraph) -> None:
    limit = stored_budget(tight, "step")
    session = ortgraph.TrainingSession(tight)
    session.step(batch())
    assert limit is not None and session.arena_bytes <= limit
    assert stored_budget(tight, "gradients") is None


def test_merging_before_the_plan_is_refused(stepped: TrainingGraph) -> None:
    with pytest.raises(OrtgraphError, match=r"the memory budget leaves \d+ for it: nodes were merged"):
        ortgraph.optimize(stepped, f"{SELECT},eliminate-common-subexpressions,{PLAN}")
    ortgraph.optimize(stepped, f"{SELECT},eliminate-dead-code,{PLAN}")


def test_a_session_says_that_a_foreign_pass_merged_what_is_evaluated_twice(tight: TrainingGraph, caplog) -> None:
    merge = onnx_ir.passes.common.CommonSubexpressionEliminationPass()
    merged = ortgraph.optimize(tight, [merge]).graph
    plain, loose = ortgraph.TrainingSession(tight), ortgraph.TrainingSession(merged)
    with caplog.at_level(logging.WARNING):
        assert plain.step(batch()) == loose.step(batch())
    said = [r.getMessage() for r in caplog.records if "memory budget" in r.getMessage()]
    assert len(said) == 1 and loose.arena_bytes > stored_budget(tight, "step") >= plain.arena_bytes


def test_planning_again_keeps_order_and_budget(tight: TrainingGraph) -> None:
    again = ortgraph.optimize(tight, "plan-memory").graph
    assert [n.name for n in again.graph] == [n.name for n in tight.graph]
    assert stored_budget(again, "step") == stored_budget(tight, "step")


def test_a_wasteful_stored_plan_is_not_taken_under_a_budget(tight: TrainingGraph) -> None:
    graph = tight.clone()
    plan = json.loads(graph.model.metadata_props["ortgraph.plan"])
    plan["offsets"] = {name: 2 * offset for name, offset in plan["offsets"].items()}
    graph.model.metadata_props["ortgraph.plan"] = json.dumps(plan)
    session = ortgraph.TrainingSession(graph)
    session.step(batch())
    assert session.arena_bytes <= stored_budget(tight, "step")


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"program": "step"}', '{"program": "step", "arena_bytes": "x"}'])
def test_a_note_that_does_not_parse_is_no_budget(tight: TrainingGraph, text: str) -> None:
    graph = tight.clone()
    graph.model.metadata_props[METADATA_KEY] = text
    assert stored_budget(graph, "step") is None
    ortgraph.TrainingSession(graph).step(batch())
