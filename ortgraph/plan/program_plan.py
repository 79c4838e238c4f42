"""The memory plan of one program of a training graph: order and recomputation under a budget, checked by placing it."""

from __future__ import annotations

import dataclasses
import logging
import re
import time

import onnx_ir as ir

from ortgraph.analysis.bind_shapes import is_dynamic
from ortgraph.errors import InputError, PlanError
from ortgraph.graph import TrainingGraph
from ortgraph.plan.budget import budget_bytes
from ortgraph.plan.buffers import sequence_buffers
from ortgraph.plan.graph_problem import GraphProblem, graph_problem
from ortgraph.plan.memory import MemorySolution
from ortgraph.plan.memory import solve as place
from ortgraph.plan.memory.placement import stored_plan
from ortgraph.plan.recompute import MemoryFloor, RecomputeProblem, memory_floor, solve
from ortgraph.plan.schedule import order_updates
from ortgraph.plan.simulate import Profile, simulate
from ortgraph.runtime.program import loss_value, needed_nodes, results_of
from ortgraph.runtime.selection import wanted_outputs

logger = logging.getLogger(__name__)
_TOLERANCE = 1e-3  # of the step's time over the bound: below what can be measured
_PLACING, _ROUNDS = 2.0, 3  # effort on the given order: what a session takes, too
_PLACEMENTS = 4  # tries to bring the placed arena under the budget


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """What a program needs as it is given, and under a budget.

    Attributes:
        program: ``step`` or ``gradients``.
        problem: Operations, values and their nodes; the given order has updates moved (``order_updates``).
        budget: Bytes for the arena and the largest kernel scratch; None without a budget.
        sequence: Operations in the planned order, recomputations included.
        before: Profile of the given order.
        after: Profile of the sequence.
        arena_before: Placement of the given order.
        arena: Placement of the sequence.
        floor: Bytes below which no sequence goes.
        solver: Solver of the sequence.
        seconds: Planning time.
    """

    program: str
    problem: GraphProblem
    budget: int | None
    sequence: tuple[int, ...]
    before: Profile
    after: Profile
    arena_before: MemorySolution
    arena: MemorySolution
    floor: MemoryFloor
    solver: str
    seconds: float

    @property
    def recomputed(self) -> int:
        """Evaluations beyond the first of each operation."""
        return len(self.sequence) - len(self.problem.nodes)

    @property
    def scratch_bytes(self) -> int:
        """The largest scratch of one operation: kernel temporaries, outside the arena."""
        return max(self.problem.scratch, default=0)


def programs_of(graph: TrainingGraph) -> tuple[str, ...]:
    """Programs that can be planned, the one that trains first."""
    signature = graph.signature
    if signature.reduces:
        return ("backward", "update", "gradients", "loss", "evaluate", "results")
    stepped = ("step",) if any(p.update is not None for p in signature.parameters) else ()
    accumulates = ("accumulate",) if any(s.kind == "accumulator" for s in signature.states) else ()
    inputs = ("input_gradients",) if signature.input_gradients else ()
    return (*stepped, *accumulates, "gradients", *inputs, "loss", "evaluate", "results")


def program_problem(graph: TrainingGraph, program: str | None = None) -> tuple[str, GraphProblem]:
    """The planning problem of a program of a lowered graph in its order of execution.

    Args:
        graph: With static shapes.
        program: ``step``, ``gradients``, ...; None means ``step`` when an optimizer is attached, else ``gradients``.

    Raises:
        PlanError: A shape is symbolic.
        InputError: The graph has no such program.
    """
    if is_dynamic(graph):
        raise PlanError("a memory plan needs numbers for all dimensions", "bind them: shapes={...}, --shapes batch=8")
    known = programs_of(graph)
    program = program or known[0]
    if program not in known:
        raise InputError(f"the graph has no program {program!r}", f"one of {', '.join(known)}")
    names, name_pairs = wanted_outputs(graph.signature, program)
    values = {v.name: v for v in (*graph.graph.inputs, *graph.graph.outputs)}
    wanted = [values[n] for n in names]
    pairs = [(values[i], values[o]) for i, o in name_pairs]
    order = planned_order(graph, wanted, pairs)
    return program, graph_problem(graph.graph, order, wanted, pairs, loss_value(graph))


def planned_order(
    graph: TrainingGraph, wanted: list[ir.Value], pairs: list[tuple[ir.Value, ir.Value]]
) -> list[ir.Node]:
    """The nodes that the wanted values need, in file order when the graph is planned, else with updates moved."""
    g = graph.graph
    if graph.stage == "planned":
        return needed_nodes(g, wanted)
    order = order_updates(g, pairs, results_of(graph, pairs), loss=loss_value(graph))
    needed = set(needed_nodes(g, wanted))
    return [node for node in order if node in needed]


def plan_program(
    graph: TrainingGraph,
    budget: str | int | None = None,
    seconds: float = 5.0,
    reorder: bool = True,
    program: str | None = None,
) -> ProgramPlan:
    """Plan a program's memory. The graph is not changed.

    Args:
        graph: Lowered, with static shapes.
        budget: See ``ortgraph.plan.budget``; None plans the given order.
        seconds: Time for the recompute search.
        reorder: First evaluations may change their order.
        program: See ``program_problem``.

    Raises:
        PlanError: A shape is symbolic, or the budget cannot be met; the message names the operations that set the floor.
        InputError: The budget is not understood.
    """
    start = time.perf_counter()
    name, problem = program_problem(graph, program)
    operations = problem.operations
    given = tuple(operations.given_order())
    profile = simulate(operations, given)
    stored = stored_plan(graph.model)
    known = stored["arena_bytes"] if stored and stored["program"] == name else None
    rounds = _ROUNDS if known is None else None
    arena = place(sequence_buffers(operations, given), _PLACING, capacity=known, max_rounds=rounds)
    floor = memory_floor(operations)
    took = time.perf_counter() - start
    plan = ProgramPlan(name, problem, None, given, profile, profile, arena, arena, floor, "given order", took)
    return plan if budget is None else replan(plan, budget, seconds, reorder)


def replan(plan: ProgramPlan, budget: str | int, seconds: float = 5.0, reorder: bool = True) -> ProgramPlan:
    """The same program under another budget; what does not depend on the budget is taken over.

    Args:
        plan: Any plan of the program.
        budget: See ``ortgraph.plan.budget``.
        seconds: Time for the recompute search.
        reorder: First evaluations may change their order.

    Raises:
        PlanError: The budget cannot be met.
        InputError: It is not understood.
    """
    start = time.perf_counter()
    scratch = plan.scratch_bytes
    limit = budget_bytes(budget, plan.before.peak + scratch)
    sequence, after = tuple(plan.problem.operations.given_order()), plan.before
    arena, solver = plan.arena_before, "given order"
    if arena.arena_bytes + scratch > limit:
        sequence, after, arena, solver = _fit(plan.problem, limit - scratch, seconds, reorder, scratch)
    return dataclasses.replace(
        plan, budget=limit, sequence=sequence, after=after, arena=arena, solver=solver,
        seconds=plan.seconds + time.perf_counter() - start,
    )  # fmt: skip


def _fit(
    problem: GraphProblem, limit: int, seconds: float, reorder: bool, scratch: int
) -> tuple[tuple[int, ...], Profile, MemorySolution, str]:
    """A sequence whose placed arena is within the limit; the solver's target goes down by what placement adds."""
    if limit <= 0:
        raise PlanError(
            f"a budget of {limit + scratch} bytes is infeasible: one kernel alone needs {scratch} as scratch",
            f"give at least {memory_floor(problem.operations).bytes + scratch} bytes",
        )
    end = time.perf_counter() + seconds
    target, smallest = limit, 0
    reached: int | None = None  # the lowest target that a sequence was found for
    for _ in range(_PLACEMENTS):
        left = max(end - time.perf_counter(), seconds / _PLACEMENTS)
        try:
            found = solve(RecomputeProblem(problem.operations, target), left, reorder, _TOLERANCE)
        except PlanError as error:
            if reached is None:
                raise _with_scratch(error, limit, scratch) from error
            target = (target + reached) // 2  # too low: nearer to what a sequence was found for
            continue
        arena = place(sequence_buffers(problem.operations, found.sequence), seconds / _PLACEMENTS, capacity=limit)
        if arena.arena_bytes <= limit:
            return found.sequence, simulate(problem.operations, found.sequence), arena, found.solver
        logger.info("an arena of %d bytes is over the budget of %d: aiming lower", arena.arena_bytes, limit)
        smallest = min(smallest or arena.arena_bytes, arena.arena_bytes)
        reached, target = target, target - (arena.arena_bytes - limit)
    raise PlanError(
        f"the live values meet a budget of {limit + scratch} bytes ({scratch} of it kernel scratch), but no placement of "
        f"them was found within it",
        f"give {smallest + scratch} bytes, or more time",
    )


def _with_scratch(error: PlanError, limit: int, scratch: int) -> PlanError:
    """The error, in terms of the budget: the solver knows of the arena only, the budget is for kernel scratch as well."""
    if not scratch:
        return error
    what = f"{error.what}; {limit + scratch} bytes leave {limit} for the arena, {scratch} are kernel scratch"
    return PlanError(what, re.sub(r"\d+", lambda found: str(int(found[0]) + scratch), error.hint))
