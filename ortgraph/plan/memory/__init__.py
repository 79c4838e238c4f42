"""Placing values in one arena: problem, solvers, solution and an independent validator."""

from ortgraph.plan.memory.arrays import Outcome
from ortgraph.plan.memory.best_fit import solve_best_fit, solve_by_size
from ortgraph.plan.memory.canonical import Feasibility, solve_canonical
from ortgraph.plan.memory.problem import ALIGNMENT, Buffer, MemoryProblem
from ortgraph.plan.memory.solution import MemorySolution
from ortgraph.plan.memory.solve import solve
from ortgraph.plan.memory.validate import validate

__all__ = [
    "ALIGNMENT", "Buffer", "Feasibility", "MemoryProblem", "MemorySolution", "Outcome",
    "solve", "solve_best_fit", "solve_by_size", "solve_canonical", "validate",
]  # fmt: skip
