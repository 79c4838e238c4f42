"""The recompute problem: a graph, and the bytes that its evaluation may need at once."""

from __future__ import annotations

import dataclasses

from ortgraph.errors import PlanError
from ortgraph.plan.operations import OperationGraph


@dataclasses.dataclass(frozen=True)
class RecomputeProblem:
    """Find a sequence of least cost whose peak is at most the budget.

    Attributes:
        graph: Operations and values, in a valid order.
        budget: Bytes.

    Raises:
        PlanError: The budget is negative.
    """

    graph: OperationGraph
    budget: int

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise PlanError(f"a budget of {self.budget} bytes is impossible")
