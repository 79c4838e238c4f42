"""plan-memory: the stored plan, the order of updates, and what symbolic shapes leave to the session."""

from __future__ import annotations

import json

import pytest

import ortgraph
from ortgraph.graph import load
from ortgraph.graph.text import text_hash
from ortgraph.manager import registry
from ortgraph.optim import AdamW
from ortgraph.passes.lowering.attach_optimizer import AttachOptimizer
from ortgraph.passes.memory.plan_memory import PlanMemory
from ortgraph.runtime.session import TrainingSession


@pytest.fixture
def lowered_graph(classifier_graph):
    """Factory: the classifier with an optimizer, lowered for the installed runtime."""

    def make(optimizer: AdamW | None = None, **options):
        from ortgraph.runtime.detect import detect_runtime

        graph = classifier_graph(**options)
        if optimizer is not None:
            AttachOptimizer.of(optimizer).call(graph.model)
            graph.signature = graph.signature.replace(stage="stepped")
        registry.get("lower")(target=detect_runtime().target).call(graph.model)
        graph.signature = graph.signature.replace(stage="lowered")
        return graph

    return make


def planned(graph):
    outcome = PlanMemory().call(graph.model)
    graph.signature = graph.signature.replace(stage="planned")
    return outcome


def test_plan_is_stored_and_used(lowered_graph, classifier_batch, tmp_path) -> None:
    graph = lowered_graph(AdamW())
    outcome = planned(graph)
    assert outcome.modified and outcome.counts["placed"] > 20
    plan = json.loads(graph.model.metadata_props["ortgraph.plan"])
    assert plan["program"] == "step" and plan["max_load_bytes"] <= plan["arena_bytes"]
    session = TrainingSession(load(graph.save(tmp_path / "planned.onnx")), threads=1, poison=True)
    losses = [session.step(classifier_batch(seed=i)) for i in range(3)]
    (program,) = session.programs
    assert program.placement.solution.solver == "stored plan" and session.arena_bytes == plan["arena_bytes"]
    other = TrainingSession(lowered_graph(AdamW()), threads=1)
    assert losses == [other.step(classifier_batch(seed=i)) for i in range(3)]
    assert other.programs[0].placement.solution.solver != "stored plan"


def test_file_order_is_execution_order_with_updates_after_readers(lowered_graph) -> None:
    graph = lowered_graph(AdamW())
    planned(graph)
    position = {node: i for i, node in enumerate(graph.graph)}
    values = {v.name: v for v in (*graph.graph.inputs, *graph.graph.outputs)}
    for p in graph.signature.parameters:
        writer = values[p.update].producer()
        assert all(position[use.node] <= position[writer] for use in values[p.name].uses())


def test_clipping_puts_all_updates_last(lowered_graph) -> None:
    graph = lowered_graph(AdamW(max_grad_norm=1.0))
    planned(graph)
    nodes = list(graph.graph)
    values = {v.name: v for v in graph.graph.outputs}
    gradients = [nodes.index(values[p.gradient].producer()) for p in graph.signature.parameters]
    updates = [nodes.index(values[p.update].producer()) for p in graph.signature.parameters]
    assert max(gradients) < min(updates)


def test_planning_again_changes_nothing(lowered_graph) -> None:
    graph = lowered_graph(AdamW())
    planned(graph)
    before, plan = text_hash(graph), graph.model.metadata_props["ortgraph.plan"]
    outcome = PlanMemory().call(graph.model)
    assert not outcome.modified and text_hash(graph) == before and graph.model.metadata_props["ortgraph.plan"] == plan


def test_without_optimizer_the_plan_is_of_gradients(lowered_graph, classifier_batch) -> None:
    graph = lowered_graph()
    planned(graph)
    assert json.loads(graph.model.metadata_props["ortgraph.plan"])["program"] == "gradients"
    session = TrainingSession(graph, threads=1, poison=True)
    session.gradients(classifier_batch())
    assert session.programs[0].placement.solution.solver == "stored plan"


def test_symbolic_shapes_are_left_to_the_session(classifier_graph, classifier_batch) -> None:
    graph = classifier_graph(batch="batch")
    graph.signature = graph.signature.replace(stage="lowered")
    outcome = PlanMemory().call(graph.model)
    assert "ortgraph.plan" not in graph.model.metadata_props
    assert [r.reason for r in outcome.refusals] == ["shapes are symbolic: the session places values per batch shape"]


def test_gradients_die_early_where_they_are_accumulated(classifier_graph):
    """Sums of gradients are updated as soon as each gradient is there, in both programs."""
    graph = ortgraph.optimize(classifier_graph(32, 8), "O2", optimizer=AdamW(lr=1e-2), accumulation_steps=4).graph
    order = {node: i for i, node in enumerate(graph.graph)}
    sums = [
        v.producer()
        for v in graph.graph.outputs
        if v.name in {s.output for s in graph.signature.states if s.kind == "accumulator"}
    ]
    for node in sums:
        ready = max(order[v.producer()] for v in node.inputs if v is not None and v.producer() is not None)
        later = [n for n in list(graph.graph)[ready + 1 : order[node]] if n not in sums]
        assert len(later) <= 3, f"{node.name} waits for {[n.name for n in later]}"
    assert len(sums) == 6
