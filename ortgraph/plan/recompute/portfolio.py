"""The solver to call: the best of all within a time limit."""

from __future__ import annotations

import dataclasses
import time

from ortgraph.errors import PlanError
from ortgraph.plan.recompute.floor import check_floor
from ortgraph.plan.recompute.greedy import solve_greedy
from ortgraph.plan.recompute.native import compiled
from ortgraph.plan.recompute.problem import RecomputeProblem
from ortgraph.plan.recompute.search import solve_search
from ortgraph.plan.recompute.solution import RecomputeSolution, make_solution
from ortgraph.plan.schedule import solve_order

_ORDER = 0.15  # share of the time for a start in another order


def solve(problem: RecomputeProblem, seconds: float = 5.0, reorder: bool = True) -> RecomputeSolution:
    """The cheapest sequence found whose peak is at most the budget.

    Args:
        problem: Graph and budget.
        seconds: Wall time; the best so far is returned then.
        reorder: First evaluations may change their order; with False they keep the given one.

    Raises:
        PlanError: The budget is below the memory floor, or no sequence within it was found.
    """
    native = compiled(problem.graph)  # the compiler runs once on a machine; that is no time of the search
    start = time.perf_counter()
    floor = check_floor(problem)
    given = make_solution(problem, problem.graph.given_order(), "given", time.perf_counter() - start)
    if given.met:
        return given
    if native is None:
        solution = solve_greedy(problem, seconds=seconds)
    else:
        starts = [solve_order(problem.graph, _ORDER * seconds).sequence] if reorder else []
        solution = solve_search(problem, seconds - (time.perf_counter() - start), reorder, starts)
    solution = dataclasses.replace(solution, seconds=time.perf_counter() - start)
    if not solution.met:
        raise PlanError(
            f"no sequence within {problem.budget} bytes was found in {seconds:g} s: the lowest peak reached is "
            f"{solution.peak}, the memory floor {floor.bytes}",
            f"give at least {solution.peak} bytes, or more time",
        )
    return solution
