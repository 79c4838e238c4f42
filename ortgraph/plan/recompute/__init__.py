"""Which results to evaluate again so that a graph fits a memory budget: problem, solvers, solution, validator."""

from ortgraph.plan.recompute.floor import MemoryFloor, memory_floor
from ortgraph.plan.recompute.greedy import solve_greedy
from ortgraph.plan.recompute.portfolio import solve
from ortgraph.plan.recompute.problem import RecomputeProblem
from ortgraph.plan.recompute.search import solve_search
from ortgraph.plan.recompute.solution import RecomputeSolution, validate
from ortgraph.plan.recompute.stages import solve_stages

__all__ = [
    "MemoryFloor",
    "RecomputeProblem",
    "RecomputeSolution",
    "memory_floor",
    "solve",
    "solve_greedy",
    "solve_search",
    "solve_stages",
    "validate",
]
