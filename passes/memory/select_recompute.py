"""SelectRecompute: results are evaluated again instead of kept, so that a program fits its memory budget."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ortgraph.analysis.bind_shapes import is_dynamic
from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.plan.budget import check_budget
from ortgraph.plan.program_plan import plan_program
from ortgraph.plan.rebuild import apply_sequence
from ortgraph.plan.stored_budget import store_budget


@dataclasses.dataclass(frozen=True)
class SelectRecompute(GraphPass):
    """Copies nodes and orders the file so that live memory stays within a budget, at the least predicted time.

    Gradients keep their bits: a copy computes from the same values, and operators that draw from hidden state are never
    copied. Common subexpressions must not be merged afterwards: the budget is noted in the model, and ``plan-memory``
    refuses a graph that does not keep it any more.

    Args:
        budget: ``60%`` of what the given order needs (arena and kernel scratch), or bytes (``30MB``, ``24MiB``).
        seconds: Time for the search.
        reorder: First evaluations may change their order.

    Raises:
        InputError: The budget is not understood.
        PlanError: It cannot be met; the message names the operations that set the floor.

    Refuses when:
        a shape is symbolic: sizes need numbers, so the session runs the pass per batch shape.
    """

    budget: str
    seconds: float = 5.0
    reorder: bool = True

    name: ClassVar[str] = "select-recompute"
    stages: ClassVar[tuple[str, ...]] = ("lowered",)

    def __post_init__(self) -> None:
        check_budget(self.budget)

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        if is_dynamic(graph):
            changes.refusals.append(Refusal("", "shapes are symbolic: the session selects per batch shape"))
            return changes
        plan = plan_program(graph, self.budget, self.seconds, self.reorder)
        before = tuple(graph.graph)
        apply_sequence(graph.graph, plan.problem, plan.sequence, self.name)
        changes.counts["recomputed"] = plan.recomputed
        changes.counts["ordered"] = before != tuple(graph.graph)
        assert plan.budget is not None
        store_budget(graph, plan.program, plan.budget - plan.scratch_bytes)
        return changes
