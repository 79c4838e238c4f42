"""An order and how good it is."""

from __future__ import annotations

import dataclasses

from ortgraph.errors import PlanError
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.simulate import simulate


@dataclasses.dataclass(frozen=True)
class OrderSolution:
    """An order in which every operation of a graph runs once.

    Attributes:
        sequence: Indices of operations.
        peak: Largest sum of live bytes over the steps (see ``ortgraph.plan.simulate``).
        bound: No order has a smaller peak; 0 when unknown.
        solver: Which solver made it.
        seconds: How long that took.
    """

    sequence: tuple[int, ...]
    peak: int
    bound: int
    solver: str
    seconds: float

    @property
    def gap(self) -> float:
        """Bytes over the bound, as a share of the bound; 0.0 is proven optimal."""
        return (self.peak - self.bound) / self.bound if self.bound else 0.0


def validate_order(graph: OperationGraph, solution: OrderSolution) -> None:
    """Check an order without knowing how it was made.

    Raises:
        PlanError: It cannot be executed, repeats or omits an operation, or its peak or bound is not what it says.
    """
    if len(solution.sequence) != len(graph.operations):
        raise PlanError(f"the order has {len(solution.sequence)} steps, the graph {len(graph.operations)} operations")
    peak = simulate(graph, solution.sequence).peak
    if peak != solution.peak:
        raise PlanError(f"the order's peak is {peak} bytes, not {solution.peak}")
    if solution.bound > peak:
        raise PlanError(f"the bound, {solution.bound} bytes, exceeds the peak of a valid order, {peak}")
