"""The trade-off of a program: predicted time for budgets from all the memory down to the floor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ortgraph.errors import InputError, PlanError
from ortgraph.graph import TrainingGraph
from ortgraph.plan.program_plan import ProgramPlan, plan_program, replan


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One budget.

    Attributes:
        budget: Bytes.
        plan: The plan within it; None when none was found.
        reason: Why there is none.
    """

    budget: int
    plan: ProgramPlan | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Points in descending order of budget.

    Attributes:
        given: The plan without a budget.
        points: From the given order's own need down to the floor.
    """

    given: ProgramPlan
    points: tuple[SweepPoint, ...]

    @property
    def lowest(self) -> SweepPoint | None:
        """The smallest budget that a plan was found for."""
        return next((p for p in reversed(self.points) if p.plan is not None), None)


def sweep(
    graph: TrainingGraph,
    points: int = 12,
    seconds: float = 2.0,
    reorder: bool = True,
    program: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """Plan a program under evenly spaced budgets.

    A plan within a smaller budget serves a larger one too, so the overhead never grows with the budget.

    Args:
        graph: Lowered, with static shapes.
        points: Number of budgets, at least 2: the first is what the given order needs, the last the floor.
        seconds: Time for the search at each of them.
        reorder: First evaluations may change their order.
        program: See ``plan_program``.
        tell: Called with a text before each point.

    Raises:
        InputError: Fewer than 2 points, no time, or no such program.
        PlanError: A shape is symbolic.
    """
    if points < 2 or seconds <= 0:
        raise InputError(
            f"a sweep of {points} points at {seconds:g} s each is impossible", "at least 2 points, some time"
        )
    return sweep_plan(plan_program(graph, program=program), points, seconds, reorder, tell)


def sweep_plan(
    given: ProgramPlan,
    points: int,
    seconds: float,
    reorder: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """``sweep`` from a plan that exists."""
    scratch = given.scratch_bytes
    top, floor = given.arena_before.arena_bytes + scratch, given.floor.bytes + scratch
    given = replan(given, top)
    budgets = [top - (top - floor) * k // (points - 1) for k in range(points)]
    found = []
    for budget in dict.fromkeys(budgets):
        tell(f"{budget:,} bytes")
        found.append(_point(given, budget, seconds, reorder))
    return Sweep(given, tuple(_without_detours(found)))


def _point(given: ProgramPlan, budget: int, seconds: float, reorder: bool) -> SweepPoint:
    try:
        return SweepPoint(budget, replan(given, budget, seconds, reorder))
    except PlanError as error:
        return SweepPoint(budget, None, error.what)


def _without_detours(points: list[SweepPoint]) -> list[SweepPoint]:
    """Each point with the cheapest plan found for its budget or a smaller one."""
    best: ProgramPlan | None = None
    result = []
    for point in reversed(points):
        plan = point.plan
        if best is not None and (plan is None or best.after.cost < plan.after.cost):
            plan = dataclasses.replace(best, budget=point.budget)
        best = plan if plan is not None else best
        result.append(SweepPoint(point.budget, plan, "" if plan is not None else point.reason))
    return result[::-1]
