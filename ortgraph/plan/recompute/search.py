"""The strong solver: eviction passes and greedy drops as starts, annealing over sequences on top."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from ortgraph.errors import PlanError
from ortgraph.plan.recompute.floor import check_floor
from ortgraph.plan.recompute.native import Effort, NativeSearch, compiled
from ortgraph.plan.recompute.problem import RecomputeProblem
from ortgraph.plan.recompute.solution import RecomputeSolution, make_solution
from ortgraph.plan.simulate import simulate

_PATIENCE = (0.0, 0.25, 0.5, 1.0)
_PASS = 0.15  # share of the time left for one eviction pass
_STAGES = (1, 8)
_RATE, _SLOWER = 2e6, 700.0  # moves per second on a slow machine: 2e6 / (1 + operations / 700)
_MARGIN = 0.05  # seconds kept back for the last copies and the simulation of the result
# Share of the moves, first and last temperature in mean costs of an operation, and whether it starts from the best so far
# (else from the best start). Hot rounds find another arrangement, cool ones finish it: which pays differs by graph.
_ROUNDS = (
    (0.25, 1.0, 0.01, True),
    (0.20, 0.3, 0.005, True),
    (0.25, 3.0, 0.01, False),
    (0.15, 0.3, 0.003, True),
    (0.15, 0.1, 0.003, True),
)
# Where no start is within the budget, one long round from the best order has to find what is.
_TIGHT_ROUNDS = ((0.7, 2.0, 0.01, False), (0.2, 0.3, 0.005, True), (0.1, 0.1, 0.003, True))
_REPAIR = 0.1  # seconds past the time for greedy drops where annealing ended over the budget
_LARGE = 1500  # operations: above it moves are too few for hot rounds
_LARGE_ROUNDS = ((0.6, 0.1, 0.005, True), (0.4, 0.03, 0.003, True))


def solve_search(
    problem: RecomputeProblem,
    seconds: float = 5.0,
    reorder: bool = True,
    starts: Sequence[Sequence[int]] = (),
    seed: int = 1,
) -> RecomputeSolution:
    """The cheapest sequence found; over the budget where none within it was found.

    The number of moves follows from the time and the size of the graph, so that the answer is the same each time unless
    the machine is too slow for them.

    Args:
        problem: Graph and budget.
        seconds: Wall time.
        reorder: First evaluations may change their order.
        starts: Valid sequences to start from besides the given order, with or without repeats; when the order may not
            change, their first evaluations keep the given one.
        seed: Of the random moves.

    Raises:
        PlanError: The budget is below the memory floor, or there is no compiler (see ``solve_greedy``).
    """
    start = time.perf_counter()
    check_floor(problem)
    native = compiled(problem.graph)
    if native is None:
        raise PlanError("the recompute search needs a C++ compiler", "use solve_greedy, or install g++")
    run = _Run(problem, native, reorder, start + seconds - _MARGIN)
    given = list(problem.graph.given_order())
    for sequence in (given, *map(list, starts)):
        if len(sequence) == len(given):
            run.construct(sequence)
        else:
            run.offer(sequence, "start")
    moves = max(seconds, 0.0) * _RATE / (1.0 + len(given) / _SLOWER)
    # A sequence with repeats that is still over the budget is a worse start than the order without them.
    orders = [run.measure(list(o), "order") for o in (given, *starts) if len(o) == len(given)]
    first = min(orders, key=lambda o: o.key) if run.best.key[0] else run.best
    rounds = _TIGHT_ROUNDS if run.best.key[0] else _ROUNDS if len(given) <= _LARGE else _LARGE_ROUNDS
    for k, (share, hot, cold, best) in enumerate(rounds):
        if run.left() <= 0 or run.best.key <= (0, problem.graph.cost):
            break
        run.anneal((run.best if best else first).sequence, share * moves, hot, cold, seed + k)
    if run.best.key[0]:
        repaired = native.greedy(run.best.sequence, problem.budget, reorder, _REPAIR)
        run.offer(repaired.steps, "search")
    return make_solution(problem, run.best.sequence, run.best.solver, time.perf_counter() - start)


@dataclasses.dataclass(frozen=True)
class _Found:
    key: tuple[int, float]  # bytes over the budget, cost
    sequence: list[int]
    solver: str


class _Run:
    """One solve: offers sequences, keeps the best."""

    def __init__(self, problem: RecomputeProblem, native: NativeSearch, reorder: bool, until: float) -> None:
        self.problem = problem
        self.native = native
        self.reorder = reorder
        self.until = until
        self.best = self.measure(list(problem.graph.given_order()), "given")

    def left(self) -> float:
        return self.until - time.perf_counter()

    def measure(self, sequence: list[int], solver: str) -> _Found:
        profile = simulate(self.problem.graph, sequence)
        return _Found((max(profile.peak - self.problem.budget, 0), profile.cost), sequence, solver)

    def offer(self, sequence: list[int], solver: str) -> None:
        found = self.measure(sequence, solver)
        if found.key < self.best.key:
            self.best = found

    def construct(self, order: list[int]) -> None:
        """Offers an order, eviction passes over it, and greedy drops in it."""
        self.offer(order, "order")
        patiences = _PATIENCE if len(order) <= _LARGE else _PATIENCE[1:2]
        for patience in patiences:
            if self.left() <= 0 or self.best.key <= (0, self.problem.graph.cost):
                return
            evicted = self.native.evict(order, self.problem.budget, patience, _PASS * self.left())
            if evicted is None:
                break
            self.offer(evicted, "evict")
        for stages in _STAGES:
            if self.left() <= 0:
                return
            self.offer(
                self.native.greedy(order, self.problem.budget, self.reorder, self.left(), stages).steps, "greedy"
            )

    def anneal(self, sequence: list[int], moves: float, hot: float, cold: float, seed: int) -> None:
        effort = Effort(moves, hot, cold, seed, self.left())
        self.offer(self.native.anneal(sequence, self.problem.budget, self.reorder, effort).steps, "search")
