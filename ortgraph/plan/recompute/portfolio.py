"""The solver to call: the best of all within a time limit."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

from ortgraph.errors import PlanError, RuntimeSetupError
from ortgraph.plan.recompute.bound import overhead_bounds
from ortgraph.plan.recompute.floor import check_floor
from ortgraph.plan.recompute.greedy import solve_greedy
from ortgraph.plan.recompute.native import compiled
from ortgraph.plan.recompute.problem import RecomputeProblem
from ortgraph.plan.recompute.search import solve_search
from ortgraph.plan.recompute.solution import RecomputeSolution, make_solution
from ortgraph.plan.recompute.stages import solve_stages
from ortgraph.plan.recompute.unread import without_unread
from ortgraph.plan.schedule import solve_order

logger = logging.getLogger(__name__)
# Shares of the time. The stage program is exact for one order and often done at once; the search changes the order too.
_ORDER = 0.1
_PROGRAM = 0.15
_LAST_PROGRAM = 0.15  # on the order that the search found
_PROVEN = 1e-5  # gap that counts as none: the program's own tolerance
_BOUND = 0.1  # for the bound over all orders, which may end the search before it begins
_BOUNDED = 2000  # operations: above it the bound takes longer than its share


def solve(
    problem: RecomputeProblem, seconds: float = 5.0, reorder: bool = True, tolerance: float = 0.0
) -> RecomputeSolution:
    """The cheapest sequence found whose peak is at most the budget.

    In turn: the given order; another order (``solve_order``); the stage program on both, where SciPy is installed; eviction
    passes, greedy drops and annealing (``solve_search``); the stage program on the order that annealing found.

    Args:
        problem: Graph and budget.
        seconds: Wall time; the best so far is returned then.
        reorder: First evaluations may change their order; with False they keep the given one.
        tolerance: Gap that is good enough (0.001 is 0.1 % of the cost): a sequence so near its bound ends the search.

    Returns:
        The best sequence. Its bound holds for the given order where ``reorder`` is False, else for all orders.

    Raises:
        PlanError: The budget is below the memory floor, or no sequence within it was found.
    """
    compiled(problem.graph)  # the compiler runs once on a machine; that is no time of the search
    start = time.perf_counter()
    floor = check_floor(problem)
    given = make_solution(problem, problem.graph.given_order(), "given", time.perf_counter() - start)
    if given.met:
        return given
    found = _Portfolio(problem, reorder, given, start, seconds, tolerance).solve()
    found = dataclasses.replace(found, seconds=time.perf_counter() - start)
    if not found.met:
        raise PlanError(
            f"no sequence within {problem.budget} bytes was found in {seconds:.3g} s: the lowest peak reached is "
            f"{found.peak}, the memory floor {floor.bytes}",
            f"give at least {found.peak} bytes, or more time",
        )
    return found


class _Portfolio:
    def __init__(
        self,
        problem: RecomputeProblem,
        reorder: bool,
        given: RecomputeSolution,
        start: float,
        seconds: float,
        tolerance: float,
    ) -> None:
        self.problem = problem
        self.reorder = reorder
        self.best = given
        self.until = start + seconds
        self.seconds = seconds
        self.tolerance = max(tolerance, _PROVEN)
        self.bound = problem.graph.cost  # over all orders
        self.programs = True  # until SciPy turns out to be absent

    def solve(self) -> RecomputeSolution:
        graph = self.problem.graph
        starts: list[Sequence[int]] = []
        if self.reorder:
            order = solve_order(graph, _ORDER * self.seconds)
            self.offer(make_solution(self.problem, order.sequence, "order", order.seconds))
            if order.sequence != tuple(graph.given_order()):
                starts.append(order.sequence)
        if self.done():
            return self.best
        for sequence in (tuple(graph.given_order()), *starts):
            program = self.program(sequence, _PROGRAM * self.seconds / (1 + len(starts)))
            if program is not None:
                starts.append(program.sequence)
        if self.programs and self.reorder and self.best.met and len(graph.operations) <= _BOUNDED:
            (least,) = overhead_bounds(graph, [self.problem.budget], _BOUND * self.seconds)
            self.bound = graph.cost * (1.0 + least)
            self.offer(self.best)
        if self.done():
            return self.best
        if compiled(graph) is None:
            self.offer(solve_greedy(self.problem, seconds=self.left()))
            return self.best
        last = _LAST_PROGRAM * self.seconds if self.reorder else 0.0
        self.offer(solve_search(self.problem, self.left() - last, self.reorder, starts))
        if self.reorder and not self.done():
            self.program(list(dict.fromkeys(self.best.sequence)), min(last, self.left()))
        return self.best

    def left(self) -> float:
        return self.until - time.perf_counter()

    def done(self) -> bool:
        return self.best.met and self.best.gap <= self.tolerance or self.left() <= 0

    def offer(self, found: RecomputeSolution) -> None:
        """Keeps the better one, and the larger bound where it holds for every sequence that is allowed."""
        read = without_unread(self.problem.graph, found.sequence, self.reorder)
        if len(read) < len(found.sequence):
            found = make_solution(self.problem, read, found.solver, found.seconds, found.bound)
        bound = max(self.best.bound, found.bound) if not self.reorder else self.bound
        if _key(found) < _key(self.best):
            self.best = found
        self.best = dataclasses.replace(self.best, bound=min(bound, self.best.cost))

    def program(self, order: Sequence[int], seconds: float) -> RecomputeSolution | None:
        try:
            found = solve_stages(self.problem, seconds, order)
        except RuntimeSetupError as error:
            logger.info("no stage program: %s", error)
            self.programs = False
            return None
        self.offer(found)
        return found


def _key(found: RecomputeSolution) -> tuple[int, float, int]:
    return max(found.peak - found.budget, 0), found.cost, len(found.sequence)
