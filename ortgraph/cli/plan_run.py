"""What ``ortgraph plan`` does between reading and writing."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

from ortgraph.cli import options
from ortgraph.cli.output import Output
from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_POINTS, _DIM = 12, "batch"


@dataclasses.dataclass(frozen=True)
class Request:
    """What the options asked for, parsed and checked before any work."""

    budget: str | None
    pipeline: str | None
    optimizer: Any
    target: str
    sizes: dict[str, int]
    program: str | None
    seconds: float
    reorder: bool
    bound: bool
    points: int | None
    memory: int | None
    dim: str
    overhead: float | None
    measure: bool
    threads: int | None


@dataclasses.dataclass(frozen=True)
class Views:
    """All that is shown: the graph that was planned, its facts, and what else was asked for."""

    graph: TrainingGraph  # as it was before the plan
    facts: Any
    swept: Any
    largest: Any
    earlier: int  # recomputations that the graph came with


def make_request(
    *,
    budget: str | None,
    level: int | None,
    optimizer: str | None,
    target: str,
    shapes: str | None,
    program: str | None,
    seconds: float,
    reorder: bool,
    bound: bool,
    sweep: bool,
    points: int | None,
    max_batch: bool,
    memory: str | None,
    dim: str | None,
    overhead: str | None,
    measure: bool,
    threads: int | None,
) -> Request:
    """Parse every option.

    Raises:
        InputError, PipelineSyntaxError: One of them cannot be used, or goes with another one only.
    """
    from ortgraph.ops.targets import target_of
    from ortgraph.plan.budget import check_budget
    from ortgraph.plan.largest_batch import memory_bytes

    target = target_of(target, "--target: ").text
    if not 0 < seconds < float("inf"):
        raise InputError(f"--seconds: {seconds:g} is no time to search in", "--seconds 5")
    if points is not None and (not sweep or points < 2):
        raise InputError("--points: goes with --sweep, and is at least 2", "--sweep --points 12")
    if max_batch and memory is None:
        raise InputError("--max-batch: no memory is given that the batch must fit into", "--max-batch --memory 4GB")
    if not max_batch and any(o is not None for o in (memory, dim, overhead)):
        raise InputError("--memory, --dim and --overhead go with --max-batch", "--max-batch --memory 4GB")
    if max_batch and budget is not None:
        raise InputError("--max-batch finds the budget itself", "leave --memory-budget out")
    if threads is not None and not measure:
        raise InputError("--threads: goes with --measure", "--measure --threads 2")
    return Request(
        None if budget is None else check_budget(budget),
        None if level is None else options.pipeline_of(level, None),
        options.parse_optimizer(optimizer),
        target,
        options.parse_sizes(shapes),
        program,
        seconds,
        reorder,
        bound,
        (points or _POINTS) if sweep else None,
        None if memory is None else memory_bytes(memory),
        dim or _DIM,
        None if overhead is None else parse_share(overhead),
        measure,
        threads,
    )


def parse_share(text: str) -> float:
    """``10%`` to 0.1.

    Raises:
        InputError: Anything else.
    """
    found = _SHARE.fullmatch(text)
    if found is None:
        raise InputError(f"--overhead: {text!r} is no percentage", "--overhead 10%")
    return float(found[1]) / 100


def make_views(out: Output, graph: TrainingGraph, request: Request) -> Views:
    """Prepare the graph and plan it.

    Raises:
        InputError: A dimension has no size, or an option does not fit the graph.
        PlanError: The budget cannot be met, or no batch fits.
    """
    from ortgraph.plan.program_plan import plan_program, replan
    from ortgraph.plan.ready import ready_graph
    from ortgraph.plan.rebuild import RECOMPUTE_KEY
    from ortgraph.plan.sweep import sweep_plan
    from ortgraph.report.memory import memory_facts

    largest = None
    if request.memory is not None:
        largest = _largest(out, graph, request)
        ready, plan = largest.fit.graph, largest.fit.plan
    else:
        with out.progress("preparing the graph"):
            ready = ready_graph(
                graph, request.sizes, request.pipeline, request.optimizer, request.target, verify="signature"
            )
        with out.progress("planning"):
            plan = plan_program(ready, program=request.program)
            if request.budget is not None:
                plan = replan(plan, request.budget, request.seconds, request.reorder)
    order_bound = None
    if request.bound:
        with out.progress("bounding every order"):
            order_bound = _order_bound(plan, request.seconds)
    swept = None
    if request.points is not None:
        with out.progress("sweeping over budgets", total=request.points) as tell:
            swept = sweep_plan(plan, request.points, request.seconds, request.reorder, lambda t: tell(t, advance=1))
    earlier = sum(RECOMPUTE_KEY in node.metadata_props for node in ready.graph)
    facts = memory_facts(ready, plan, order_bound)
    if request.measure:
        facts = dataclasses.replace(facts, measured=_measured(out, ready, facts, request.threads))
    return Views(ready, facts, swept, largest, earlier)


def _measured(out: Output, graph: TrainingGraph, facts: Any, threads: int | None) -> tuple[Any, Any]:
    """What a fresh process measures for the given order and for the plan."""
    from ortgraph.manager.example_batch import example_batch
    from ortgraph.runtime.measure_memory import measure_step

    batch, program = example_batch(graph), facts.plan.program
    with out.progress("measuring"):
        given = measure_step(graph, batch, program, threads)
        if not facts.changed:
            return given, given
        return given, measure_step(planned_graph(graph, facts.plan), batch, program, threads)


def _largest(out: Output, graph: TrainingGraph, request: Request) -> Any:
    from ortgraph.plan.largest_batch import largest_batch

    assert request.memory is not None  # checked with the options
    with out.progress("finding the largest batch") as tell:
        return largest_batch(
            graph, request.memory, request.dim, sizes=request.sizes, max_overhead=request.overhead, pipeline=request.pipeline,
            optimizer=request.optimizer, target=request.target, seconds=request.seconds, reorder=request.reorder,
            program=request.program, tell=tell,
        )  # fmt: skip


def _order_bound(plan: Any, seconds: float) -> int:
    from ortgraph.plan.schedule import order_bound

    return order_bound(plan.problem.operations, seconds)


def show(out: Output, path: pathlib.Path, views: Views) -> None:
    """Tables of the plan."""
    from ortgraph.plan.budget import size_text
    from ortgraph.report import memory
    from ortgraph.report.memory_page import largest_text

    facts = views.facts
    plan = facts.plan
    budget = f", budget {size_text(plan.budget)}" if plan.budget is not None else ""
    out.say(f"{path}: program {plan.program}, {len(plan.problem.nodes)} operations{budget}")
    if views.earlier:
        out.say(earlier_text(views.earlier))
    columns = memory.figure_columns(facts)
    out.table("One step", columns, memory.figure_rows(facts), right=tuple(range(1, len(columns) - 1)))
    out.table("Bounds", ("bound", "bytes", "what it says"), memory.bound_rows(facts), right=(1,))
    out.table("Evaluated again", ("operator", "times"), memory.recomputed_rows(facts), right=(1,))
    title = "Largest values at the peak"
    name = f"{title} of the given order" if facts.changed else title
    columns = memory.OCCUPANT_COLUMNS[:-1]  # a terminal has no room for shapes beside module paths
    out.table(name, columns, [row[:-1] for row in memory.occupant_rows(facts.given)], right=(0,))
    if facts.changed:
        rows = [row[:-1] for row in memory.occupant_rows(facts.planned)]
        out.table(f"{title} as planned", columns, rows, right=(0,))
    if views.swept is not None:
        rows = memory.sweep_rows(views.swept)
        out.table("Budget against time", memory.SWEEP_COLUMNS, rows, right=(0, 1, 2, 3, 4, 5))
    if views.largest is not None:
        out.say(largest_text(views.largest))
        following = views.largest.next
        if following is not None:
            out.say(f"{views.largest.dim}={following.size} does not fit: {following.reason}")


def earlier_text(count: int) -> str:
    """A remark about a graph that was planned under a budget before."""
    return f"the graph comes with {count} recomputations of an earlier plan: they are part of its given order"


def result_of(path: pathlib.Path, views: Views) -> dict[str, Any]:
    """The object of ``--json``."""
    from ortgraph.report import memory

    data = {"path": str(path), **memory.facts_json(views.facts)}
    if views.swept is not None:
        data["sweep"] = memory.sweep_json(views.swept)
    if views.largest is not None:
        data["max_batch"] = memory.largest_json(views.largest)
    return data


def page(path: pathlib.Path, views: Views) -> str:
    """The HTML report."""
    from ortgraph.report.memory_page import memory_page

    note = earlier_text(views.earlier) + "." if views.earlier else ""
    return memory_page(str(path), views.facts, views.swept, views.largest, note)


def planned_graph(graph: TrainingGraph, plan: Any) -> TrainingGraph:
    """A copy of a graph in planned order, recomputations as copies of nodes, with a place for every value.

    Raises:
        InputError: The plan is of a program that a stored plan is not made for.
        VerificationError: The rewritten graph breaks an invariant.
    """
    from ortgraph.manager import PassManager, parse_pipeline
    from ortgraph.plan.program_plan import program_problem, programs_of
    from ortgraph.plan.rebuild import apply_sequence
    from ortgraph.plan.stored_budget import store_budget

    usual = programs_of(graph)[0]
    if plan.program != usual:
        raise InputError(f"a plan of program {plan.program} is not stored in a graph", f"--program {usual}")
    copy = graph.clone()
    _, problem = program_problem(copy)  # the same operations, of the copy's nodes
    apply_sequence(copy.graph, problem, plan.sequence, "select-recompute")
    if plan.budget is not None:
        store_budget(copy, plan.program, plan.budget - plan.scratch_bytes)
    PassManager(parse_pipeline("plan-memory{keep_order=true}"), "types").run(copy)
    return copy


def write_planned(out: Output, views: Views, path: pathlib.Path) -> str:
    """Write the planned graph; returns its stage.

    Raises:
        InputError, VerificationError: See ``planned_graph``.
    """
    with out.progress("writing"):
        graph = planned_graph(views.graph, views.facts.plan)
        options.save_graph(graph, path)
    return graph.stage
