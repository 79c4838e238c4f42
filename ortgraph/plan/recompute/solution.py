"""A sequence with recomputations, how good it is, and its check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ortgraph.errors import PlanError
from ortgraph.plan.recompute.problem import RecomputeProblem
from ortgraph.plan.simulate import simulate


@dataclasses.dataclass(frozen=True)
class RecomputeSolution:
    """A sequence in which an operation that appears again is recomputed.

    Attributes:
        sequence: Indices of operations.
        peak: Largest sum of live bytes.
        budget: Bytes asked for; a solver that could not meet it returns the lowest peak that it found.
        cost: Sum of costs of all evaluations.
        once: Cost of evaluating every operation once.
        bound: Lower bound on the cost (``once`` where nothing better is known).
        solver: Which solver made it.
        seconds: How long that took (wall).
    """

    sequence: tuple[int, ...]
    peak: int
    budget: int
    cost: float
    once: float
    bound: float
    solver: str
    seconds: float

    @property
    def met(self) -> bool:
        return self.peak <= self.budget

    @property
    def overhead(self) -> float:
        """Added cost as a share of evaluating everything once (0.05 is 5 %)."""
        return (self.cost - self.once) / self.once if self.once else 0.0

    @property
    def bound_overhead(self) -> float:
        """The bound in the unit of ``overhead``."""
        return (self.bound - self.once) / self.once if self.once else 0.0

    @property
    def gap(self) -> float:
        """Cost over the bound, as a share of the bound; 0.0 is proven optimal."""
        return (self.cost - self.bound) / self.bound if self.bound else 0.0


def make_solution(
    problem: RecomputeProblem, sequence: Sequence[int], solver: str, seconds: float, bound: float | None = None
) -> RecomputeSolution:
    """Simulate a sequence and wrap it.

    Raises:
        PlanError: The sequence is not valid.
    """
    profile = simulate(problem.graph, sequence)
    once = problem.graph.cost
    bound = once if bound is None else min(bound, profile.cost)
    return RecomputeSolution(tuple(sequence), profile.peak, problem.budget, profile.cost, once, bound, solver, seconds)


def validate(problem: RecomputeProblem, solution: RecomputeSolution) -> None:
    """Check a solution with the simulator, which knows nothing of solvers.

    Raises:
        PlanError: The sequence is not valid, a figure is not what simulation gives, or the budget is not met.
    """
    profile = simulate(problem.graph, solution.sequence)
    if profile.peak != solution.peak or abs(profile.cost - solution.cost) > 1e-9 * max(1.0, abs(profile.cost)):
        raise PlanError(
            f"the solution claims {solution.peak} bytes at cost {solution.cost}, simulation gives {profile.peak} "
            f"bytes at cost {profile.cost}"
        )
    if profile.peak > problem.budget:
        raise PlanError(f"the peak of {profile.peak} bytes is over the budget of {problem.budget}")
