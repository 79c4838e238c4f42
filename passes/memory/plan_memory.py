"""PlanMemory: file order becomes execution order, and every value gets its place."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ortgraph.analysis.bind_shapes import is_dynamic
from ortgraph.errors import PlanError
from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.plan.memory.placement import METADATA_KEY, place_values
from ortgraph.plan.schedule import order_updates
from ortgraph.plan.stored_budget import CAUSE, HINT, stored_budget
from ortgraph.runtime.program import loss_value, needed_nodes, results_of
from ortgraph.runtime.selection import program_pairs, training_program


@dataclasses.dataclass(frozen=True)
class PlanMemory(GraphPass):
    """Orders nodes (each update after the last reader of what it overwrites) and stores arena offsets in the model.

    The plan is of program ``step`` when an optimizer is attached, else of ``gradients``; other programs run the same
    order and are placed when a session needs them.

    Args:
        keep_order: The file's order is the order of execution as it stands (``select-recompute`` has set it). A
            graph with symbolic shapes is ordered all the same: that pass waits for sizes. A graph that notes a budget
            keeps its order always.

    Raises:
        PlanError: The graph was rewritten for a budget, and its arena does not keep it any more.

    Refuses when:
        a shape is symbolic: offsets need numbers, so the session plans per batch shape. The order is set all the same.
    """

    keep_order: bool = False

    name: ClassVar[str] = "plan-memory"
    stages: ClassVar[tuple[str, ...]] = ("lowered", "planned")
    sets_stage: ClassVar[str | None] = "planned"

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        g, signature = graph.graph, graph.signature
        values = {v.name: v for v in (*g.inputs, *g.outputs)}
        stepped = any(p.update is not None for p in signature.parameters)
        program = training_program(signature)
        limit = stored_budget(graph, program)
        pairs = [(values[i], values[o]) for i, o in (program_pairs(signature, program) if stepped else ())]
        updates = {new for _, new in pairs}
        loss = loss_value(graph)
        order = list(g)
        if not (self.keep_order or limit is not None) or is_dynamic(graph):
            order = order_updates(g, pairs, results_of(graph, pairs), loss=loss)
        moved = sum(a is not b for a, b in zip(order, tuple(g), strict=True))
        if moved:
            g.remove(order)
            g.extend(order)
        changes.counts["moved"] = moved
        before = graph.model.metadata_props.pop(METADATA_KEY, None)
        if is_dynamic(graph):
            changes.refusals.append(Refusal("", "shapes are symbolic: the session places values per batch shape"))
            changes.counts["dropped"] = before is not None
            return changes
        wanted_names = {signature.loss, *((v.name for v in updates) if stepped else signature.gradients.values())}
        wanted = [v for v in g.outputs if v.name in wanted_names]
        placement = place_values(g, needed_nodes(g, wanted), wanted, pairs, loss=loss, capacity=limit)
        arena = placement.solution.arena_bytes
        if limit is not None and arena > limit:
            what = f"the arena takes {arena} bytes, and the memory budget leaves {limit} for it: {CAUSE}"
            raise PlanError(what, HINT)
        plan = placement.to_json(program)
        graph.model.metadata_props[METADATA_KEY] = plan
        changes.counts["placed"] = len(placement.problem.buffers) if plan != before else 0
        return changes
