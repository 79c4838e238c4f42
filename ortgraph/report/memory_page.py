"""The page about a memory plan, and its sections for other pages."""

from __future__ import annotations

from ortgraph import __version__
from ortgraph.graph import TrainingGraph
from ortgraph.plan.budget import size_text, size_unit
from ortgraph.plan.largest_batch import LargestBatch
from ortgraph.plan.program_plan import program_problem
from ortgraph.plan.sweep import Sweep
from ortgraph.plan.timeline import Timeline, find_roles, recomputed_operators, timeline
from ortgraph.report import memory
from ortgraph.report.html import Page
from ortgraph.report.memory import MemoryFacts
from ortgraph.report.svg import curve_chart, stacked_chart


def memory_page(
    source: str, facts: MemoryFacts, swept: Sweep | None = None, largest: LargestBatch | None = None, note: str = ""
) -> str:
    """One HTML file.

    Args:
        source: Where the graph came from, for the title.
        facts: The plan.
        swept: Budgets against time, if they were asked for.
        largest: The largest batch, if it was asked for.
        note: What a reader has to know besides.
    """
    page = Page(f"ortgraph: memory of {source}")
    plan = facts.plan
    page.figures(
        [
            ("activation peak, given order", size_text(plan.before.peak)),
            ("arena", size_text(plan.arena.arena_bytes)),
            ("predicted overhead", f"{plan.after.overhead:.1%}"),
            ("floor", size_text(plan.floor.bytes)),
            *([(f"largest {largest.dim}", str(largest.fit.size))] if largest is not None else []),
        ]
    )
    if note:
        page.text(note)
    _add_figures(page, facts)
    page.section("Live memory, step by step")
    add_timelines(page, facts)
    _add_peaks(page, facts)
    if facts.recomputed:
        page.section("Evaluated again")
        page.table(("operator", "times"), memory.recomputed_rows(facts), right=(1,))
    if swept is not None:
        _add_sweep(page, swept, facts)
    if largest is not None:
        _add_largest(page, largest)
    page.text(f"ortgraph {__version__}", note=True)
    return page.render()


def _add_figures(page: Page, facts: MemoryFacts) -> None:
    page.section("What one step takes")
    plan = facts.plan
    budget = f", budget {size_text(plan.budget)}" if plan.budget is not None else ""
    page.text(f"Program {plan.program}, {len(plan.problem.nodes)} operations{budget}; {plan.solver}.", note=True)
    columns = memory.figure_columns(facts)
    page.table(columns, memory.figure_rows(facts), right=tuple(range(1, len(columns) - 1)))
    page.table(("bound", "bytes", "what it says"), memory.bound_rows(facts), right=(1,))


def add_timelines(page: Page, facts: MemoryFacts) -> None:
    """The pictures of the given order and of the plan, on one scale."""
    page.text(
        "What is alive at each operation, by what it is for. Activations are forward results kept for the backward half; "
        "recomputed ones were dropped and evaluated again; everything else is temporary. The strip below stands for "
        "what is always there and is not drawn to scale.",
        note=True,
    )
    plan = facts.plan
    order = tuple(plan.problem.operations.given_order())
    top = max(plan.before.peak, plan.after.peak)
    page.add_chart(_timeline_chart("Given order", facts, facts.given, order, top))
    if facts.changed:
        title = f"Planned: {plan.after.overhead:.1%} more predicted time"
        page.add_chart(_timeline_chart(title, facts, facts.planned, plan.sequence, top, plan.budget))


def _timeline_chart(
    title: str, facts: MemoryFacts, picture: Timeline, order: tuple[int, ...], top: int, budget: int | None = None
) -> str:
    fixed = facts.fixed
    base = (
        f"parameters {size_text(fixed.parameters)} · states {size_text(fixed.states)} · batch {size_text(fixed.batch)}"
        " · always there, not to scale"
    )
    unit, scale = size_unit(top)
    scratch = facts.plan.scratch_bytes
    return stacked_chart(
        title,
        {role: (band / scale).tolist() for role, band in picture.bands.items()},
        "operation",
        f"{unit} alive",
        top=top / scale,
        peak=(picture.peak_step, memory.peak_label(picture, order, facts.plan)),
        border=None if picture.backward_step is None else (picture.backward_step, "forward", "backward"),
        limit=None if budget is None else ((budget - scratch) / scale, budget_label(budget, scratch)),
        base=base,
    )


def budget_label(budget: int, scratch: int) -> str:
    """Text at the line of a budget; what kernels need as scratch is not left for values."""
    return f"budget {size_text(budget)}" + (f" less {size_text(scratch)} scratch" if scratch else "")


def _add_peaks(page: Page, facts: MemoryFacts) -> None:
    pictures = [("the given order's peak", facts.given)] + ([("the planned peak", facts.planned)] * facts.changed)
    for title, picture in pictures:
        page.section(f"Largest values at {title}")
        page.table(memory.OCCUPANT_COLUMNS, memory.occupant_rows(picture), right=(0,))


def _add_sweep(page: Page, swept: Sweep, facts: MemoryFacts) -> None:
    page.section("Budget against time")
    page.text(
        "Each dot is a plan of its own: what arena and kernel scratch may take, and how much more time is predicted. "
        "Crosses are budgets for which no plan was found.",
        note=True,
    )
    page.add_chart(sweep_chart(swept, facts.order_bound, facts.plan.budget))
    page.table(memory.SWEEP_COLUMNS, memory.sweep_rows(swept), right=(0, 1, 2, 3, 4, 5))


def sweep_chart(swept: Sweep, order_bound: int | None = None, budget: int | None = None) -> str:
    """The trade-off curve: budget against predicted overhead."""
    unit, scale = size_unit(swept.given.before.peak)
    found = [(p.budget / scale, 100 * p.plan.after.overhead, "") for p in reversed(swept.points) if p.plan is not None]
    scratch = swept.given.scratch_bytes
    marks = [
        ((swept.given.floor.bytes + scratch) / scale, "floor"),
        ((swept.given.before.peak + scratch) / scale, "given order"),
        *([((order_bound + scratch) / scale, "order bound")] if order_bound is not None else []),
        *([(budget / scale, "budget")] if budget is not None else []),
    ]
    missing = [p.budget / scale for p in swept.points if p.plan is None]
    return curve_chart("Budget against time", found, f"budget, {unit}", "predicted overhead, %", marks, missing)


def _add_largest(page: Page, largest: LargestBatch) -> None:
    page.section(f"Largest {largest.dim} in {size_text(largest.memory)}")
    page.text(largest_text(largest))
    if largest.next is not None:
        page.text(f"{largest.dim}={largest.next.size} does not fit: {largest.next.reason}.")
    page.text(f"Sizes tried: {', '.join(map(str, largest.tried))}.", note=True)


def largest_text(largest: LargestBatch) -> str:
    """The answer in a sentence."""
    plan = largest.fit.plan
    assert plan is not None
    how = f"{plan.recomputed} recomputations, {plan.after.overhead:.1%} more predicted time" if plan.recomputed else ""
    return (
        f"{largest.dim}={largest.fit.size} fits into {size_text(largest.memory)}: {size_text(largest.fit.needed)}, "
        f"of which {size_text(plan.arena.arena_bytes)} are the arena ({how or 'nothing recomputed'})"
    )


def add_planned(page: Page, graph: TrainingGraph) -> None:
    """Sections about a planned graph for a page of another kind: picture, what fills the peak, what is evaluated again."""
    _, problem = program_problem(graph)
    order = tuple(problem.operations.given_order())
    picture = timeline(find_roles(graph, problem), order)
    again = recomputed_operators(problem, order)
    name = problem.nodes[order[picture.peak_step]].op_type if order else ""
    peak = int(picture.live.max(initial=0))
    unit, scale = size_unit(peak)
    bands = {role: (band / scale).tolist() for role, band in picture.bands.items()}
    page.add_chart(
        stacked_chart(
            "Live memory, step by step",
            bands,
            "operation",
            f"{unit} alive",
            peak=(picture.peak_step, f"peak {size_text(peak)} in {name}") if order else None,
            border=None if picture.backward_step is None else (picture.backward_step, "forward", "backward"),
        )
    )
    page.text("Largest values at the peak:", note=True)
    page.table(memory.OCCUPANT_COLUMNS, memory.occupant_rows(picture), right=(0,))
    if again:
        page.text("Evaluated again to stay within the memory budget:", note=True)
        page.table(("operator", "times"), list(again.items()), right=(1,))
