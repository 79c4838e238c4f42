"""Figures of a memory plan, and the rows of the tables that the command line and the HTML report show."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ortgraph.graph import TrainingGraph
from ortgraph.plan.budget import size_text
from ortgraph.plan.footprint import Footprint, footprint
from ortgraph.plan.largest_batch import LargestBatch
from ortgraph.plan.program_plan import ProgramPlan
from ortgraph.plan.sweep import Sweep
from ortgraph.plan.timeline import Occupant, Timeline, find_roles, recomputed_operators, timeline

if TYPE_CHECKING:
    from ortgraph.runtime.measure_memory import MeasuredMemory

OCCUPANT_COLUMNS = ("bytes", "value", "operator", "module", "phase", "role", "steps", "shape")
SWEEP_COLUMNS = ("budget", "of peak", "peak", "arena", "overhead", "recomputed", "remark")
SHOWN = 10  # values listed at a peak


@dataclasses.dataclass(frozen=True)
class MemoryFacts:
    """A plan, and what there is to say about it.

    Attributes:
        plan: The plan; without a budget, of the given order.
        fixed: Memory outside the arena.
        gradients: Bytes of all parameter gradients together, as they are placed.
        given: The given order as a picture shows it.
        planned: The planned sequence; the same object as ``given`` without a budget.
        recomputed: Evaluations beyond the first, by operator.
        order_bound: No order without recomputation has a smaller peak; None when it was not computed.
        measured: Of the given order and of the plan, in fresh processes; None when it was not measured.
    """

    plan: ProgramPlan
    fixed: Footprint
    gradients: int
    given: Timeline
    planned: Timeline
    recomputed: dict[str, int]
    order_bound: int | None = None
    measured: tuple[MeasuredMemory, MeasuredMemory] | None = None

    @property
    def changed(self) -> bool:
        """Whether the plan is another than the given order."""
        return self.planned is not self.given

    def total(self, arena: int) -> int:
        """Bytes of a step with an arena of so many."""
        return self.fixed.total + arena + self.plan.scratch_bytes


def memory_facts(graph: TrainingGraph, plan: ProgramPlan, order_bound: int | None = None) -> MemoryFacts:
    """The facts about a plan of a graph.

    Args:
        graph: The graph that the plan was made from.
        plan: Its plan.
        order_bound: See MemoryFacts.
    """
    roles = find_roles(graph, plan.problem)
    order = tuple(plan.problem.operations.given_order())
    given = timeline(roles, order)
    planned = given if plan.sequence == order else timeline(roles, plan.sequence)
    recomputed = recomputed_operators(plan.problem, plan.sequence)
    gradients = sum(plan.problem.operations.values[v].size for v in roles.gradients)
    return MemoryFacts(plan, footprint(graph), gradients, given, planned, recomputed, order_bound)


def time_text(microseconds: float) -> str:
    """``12.3 ms``."""
    return f"{microseconds / 1e3:.2f} ms" if microseconds >= 1000 else f"{microseconds:.1f} µs"


def figure_columns(facts: MemoryFacts) -> tuple[str, ...]:
    """Columns of ``figure_rows``."""
    return ("what", "given order", "planned", "") if facts.changed else ("what", "given order", "")


def figure_rows(facts: MemoryFacts) -> list[tuple[str, ...]]:
    """What the step takes, in the given order and as planned."""
    plan, fixed = facts.plan, facts.fixed
    scratch = plan.scratch_bytes
    rows: list[tuple[str, int, int, str]] = [(name, size, size, note) for name, size, note in _outside(fixed)]
    most = [int(picture.bands["gradients"].max(initial=0)) for picture in (facts.given, facts.planned)]
    totals = [facts.total(a.arena_bytes) for a in (plan.arena_before, plan.arena)]
    rows += [
        ("gradients", most[0], most[1], f"in the arena, most at once; {size_text(facts.gradients)} in sum"),
        ("activation peak", plan.before.peak, plan.after.peak, _share(plan.after.peak, plan.before.peak)),
        ("arena", plan.arena_before.arena_bytes, plan.arena.arena_bytes, _arena_note(plan)),
        ("kernel scratch", scratch, scratch, _scratch_note(plan)),
        ("step in total", totals[0], totals[1], "without the runtime's own"),
    ]  # fmt: skip
    texts: list[tuple[str, ...]] = [(name, size_text(a), size_text(b), note) for name, a, b, note in rows]
    overhead = f"{plan.after.overhead:+.1%} for {plan.recomputed} recomputations" if facts.changed else ""
    texts.append(("predicted time", time_text(plan.before.cost), time_text(plan.after.cost), overhead))
    texts += _measured_rows(facts)
    if facts.changed:
        return texts
    return [(t[0], t[1], t[3]) for t in texts]


def _measured_rows(facts: MemoryFacts) -> list[tuple[str, str, str, str]]:
    if facts.measured is None:
        return []
    given, planned = facts.measured
    against = f"{planned.deviation:+.1%} against {'its ' if facts.changed else ''}arena and scratch"
    slower = planned.milliseconds / given.milliseconds - 1 if given.milliseconds else 0.0
    return [
        ("measured", size_text(given.peak), size_text(planned.peak), f"rise of the resident size; {against}"),
        (
            "measured time",
            time_text(1e3 * given.milliseconds),
            time_text(1e3 * planned.milliseconds),
            f"{slower:+.1%}" if facts.changed else "",
        ),
    ]


def _outside(fixed: Footprint) -> list[tuple[str, int, str]]:
    return [
        ("parameters", fixed.parameters, "weights, trainable and frozen"),
        ("states", fixed.states, "optimizer moments, counters, buffers"),
        ("batch", fixed.batch, "data inputs"),
        ("constants", fixed.constants, "stored in the graph"),
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%} of the given order's" if whole and part != whole else ""


def _scratch_note(plan: ProgramPlan) -> str:
    scratch = plan.problem.scratch
    where = f" ({plan.problem.operations.operations[scratch.index(max(scratch))].name})" if plan.scratch_bytes else ""
    return f"largest temporaries of one kernel{where}, outside the arena"


def _arena_note(plan: ProgramPlan) -> str:
    gap = plan.arena.gap
    return "placed at max-load: no placement is smaller" if gap == 0 else f"{gap:.2%} over max-load"


def bound_rows(facts: MemoryFacts) -> list[tuple[str, str, str]]:
    """(bound, bytes, meaning)."""
    plan = facts.plan
    rows = [("max-load", size_text(plan.arena.bound), "no placement of this sequence needs less")]
    if facts.order_bound is not None:
        gap = plan.before.peak / facts.order_bound - 1 if facts.order_bound else 0.0
        meaning = f"no order without recomputation has a smaller peak; the given order is {gap:.2%} above"
        rows.append(("order bound", size_text(facts.order_bound), meaning))
    names = [plan.problem.operations.operations[i].name for i in plan.floor.operations]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    cause = f"{names[0]}{more}" if names else "what is kept after the step"
    rows.append(("floor", size_text(plan.floor.bytes), f"no sequence at all has a smaller peak; set by {cause}"))
    return rows


def occupant_rows(picture: Timeline, shown: int = SHOWN) -> list[tuple[str, ...]]:
    """OCCUPANT_COLUMNS of the largest values at a peak; the last row sums up the rest."""
    rows = [_occupant_row(o) for o in picture.occupants[:shown]]
    rest = picture.occupants[shown:]
    if rest:
        rows.append((size_text(sum(o.bytes for o in rest)), f"{len(rest)} smaller values", *[""] * 6))
    if picture.scratch:
        rows.append((size_text(picture.scratch), "kernel scratch", *[""] * 6))
    return rows


def _occupant_row(o: Occupant) -> tuple[str, ...]:
    shape = "×".join(map(str, o.shape)) or "scalar"
    return (
        size_text(o.bytes),
        o.name,
        o.operator.rpartition(".")[2],
        o.module,
        o.phase,
        o.role,
        f"{o.lower}–{o.upper}",
        shape,
    )


def recomputed_rows(facts: MemoryFacts) -> list[tuple[str, int]]:
    """(operator, evaluations beyond the first)."""
    return list(facts.recomputed.items())


def sweep_rows(swept: Sweep) -> list[tuple[str, ...]]:
    """SWEEP_COLUMNS per budget."""
    rows: list[tuple[str, ...]] = []
    for point in swept.points:
        whole = swept.given.before.peak + swept.given.scratch_bytes
        share = f"{point.budget / whole:.1%}" if whole else ""
        head = (size_text(point.budget), share)
        plan = point.plan
        if plan is None:
            rows.append((*head, "", "", "", "", f"no plan found: {point.reason}"))
            continue
        figures = (size_text(plan.after.peak), size_text(plan.arena.arena_bytes), f"{plan.after.overhead:.2%}")
        rows.append((*head, *figures, str(plan.recomputed), "given order" if plan.solver == "given order" else ""))
    return rows


def facts_json(facts: MemoryFacts) -> dict[str, Any]:
    """The object of ``ortgraph plan --json``."""
    plan = facts.plan
    return {
        "program": plan.program,
        "operations": len(plan.problem.nodes),
        "budget": plan.budget,
        "fixed": {**dataclasses.asdict(facts.fixed), "total": facts.fixed.total},
        "gradients": facts.gradients,
        "peak": {
            "given": plan.before.peak,
            "planned": plan.after.peak,
            "order_bound": facts.order_bound,
            "floor": plan.floor.bytes,
        },
        "arena": {
            "given": plan.arena_before.arena_bytes,
            "planned": plan.arena.arena_bytes,
            "max_load": plan.arena.bound,
        },
        "scratch": plan.scratch_bytes,
        "microseconds": {"given": plan.before.cost, "planned": plan.after.cost},
        "overhead": plan.after.overhead,
        "recomputed": facts.recomputed,
        "top": {
            "given": _occupants_json(facts.given),
            "planned": _occupants_json(facts.planned),
        },
        "measured": None
        if facts.measured is None
        else {name: dataclasses.asdict(m) for name, m in zip(("given", "planned"), facts.measured, strict=True)},
        "solver": plan.solver,
        "seconds": plan.seconds,
    }


def _occupants_json(picture: Timeline) -> list[dict[str, Any]]:
    return [dataclasses.asdict(o) for o in picture.occupants[:SHOWN]]


def sweep_json(swept: Sweep) -> list[dict[str, Any]]:
    """One object per budget; without a plan its figures are None."""
    return [
        {
            "budget": point.budget,
            "peak": plan.after.peak if plan else None,
            "arena": plan.arena.arena_bytes if plan else None,
            "overhead": plan.after.overhead if plan else None,
            "recomputed": plan.recomputed if plan else None,
            "reason": point.reason,
        }
        for point in swept.points
        for plan in (point.plan,)
    ]


def largest_json(found: LargestBatch) -> dict[str, Any]:
    """The answer of ``--max-batch``."""
    following = found.next
    return {
        "dim": found.dim,
        "memory": found.memory,
        "size": found.fit.size,
        "needed": found.fit.needed,
        "next": None if following is None else {"size": following.size, "reason": following.reason},
        "tried": list(found.tried),
    }


def peak_label(picture: Timeline, order: Sequence[int], plan: ProgramPlan) -> str:
    """Text beside the mark of a peak."""
    if not len(order):
        return ""
    name = plan.problem.nodes[order[picture.peak_step]].op_type
    return f"peak {size_text(int(picture.live[picture.peak_step]))} in {name}, step {picture.peak_step}"
