"""Placing values in one arena: problem, solvers, solution and an independent validator."""

from ortgraph.plan.memory.best_fit import solve_best_fit
from ortgraph.plan.memory.problem import ALIGNMENT, Buffer, MemoryProblem
from ortgraph.plan.memory.solution import MemorySolution
from ortgraph.plan.memory.validate import validate

__all__ = ["ALIGNMENT", "Buffer", "MemoryProblem", "MemorySolution", "solve_best_fit", "validate"]
