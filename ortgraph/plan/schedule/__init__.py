"""Order of operations: constructors, searches and a bound for peak memory, and the rule that makes in-place updates safe."""

from ortgraph.plan.schedule.bounds import order_bound
from ortgraph.plan.schedule.constructors import depth_first_order, given_order, least_peak_order, list_order
from ortgraph.plan.schedule.portfolio import solve_order
from ortgraph.plan.schedule.sets import solve_beam, solve_exact
from ortgraph.plan.schedule.solution import OrderSolution, validate_order
from ortgraph.plan.schedule.updates import order_updates

__all__ = [
    "OrderSolution",
    "depth_first_order",
    "given_order",
    "least_peak_order",
    "list_order",
    "order_bound",
    "order_updates",
    "solve_beam",
    "solve_exact",
    "solve_order",
    "validate_order",
]
