"""A graph made from a sequence reads, at every step, the latest evaluation: its peak is that of the sequence."""

from __future__ import annotations

import random

import pytest

from ortgraph.plan.program_plan import program_problem
from ortgraph.plan.rebuild import apply_sequence
from ortgraph.plan.simulate import simulate


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_has_the_same_peak_as_a_graph(blocks, seed: int) -> None:
    """Every chain of evaluations is repeated at random, often before an operation runs for the first time."""
    rng = random.Random(seed)
    graph = blocks().clone()
    program, problem = program_problem(graph)
    operations = problem.operations
    sequence: list[int] = []
    for i in operations.given_order():
        for made in sorted({operations.producer[v] for v in operations.operations[i].inputs}):
            if operations.operations[made].recompute and rng.random() < 0.3:
                sequence.append(made)
        sequence.append(i)
        if operations.operations[i].recompute and rng.random() < 0.3:
            sequence += [*(j for j in operations.predecessors(i) if operations.operations[j].recompute), i]
    before = simulate(operations, sequence)
    apply_sequence(graph.graph, problem, sequence, "test")
    last: dict[str, str] = {}
    origin = {n.name: n.metadata_props.get("ortgraph.recompute", n.name) for n in graph.graph}
    for node in graph.graph:
        for value in node.inputs:
            maker = value.producer() if value is not None else None
            if maker is not None:
                assert last[origin[maker.name]] == maker.name, f"{node.name} reads a stale {value.name}"
        last[origin[node.name]] = node.name
    _, again = program_problem(graph, program)
    assert simulate(again.operations, again.operations.given_order()).peak <= before.peak
