"""The order that users get: constructors, bound, search."""

from __future__ import annotations

import time

from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.schedule.bounds import floor_bound
from ortgraph.plan.schedule.compiled import compiled
from ortgraph.plan.schedule.constructors import depth_first_order, given_order, least_peak_order, list_order
from ortgraph.plan.schedule.solution import OrderSolution
from ortgraph.plan.simulate import simulate

_CONSTRUCTORS = (("depth-first", depth_first_order), ("list", list_order), ("least-peak", least_peak_order))


def solve_order(graph: OperationGraph, seconds: float = 10.0) -> OrderSolution:
    """A small peak within a time: the given order, constructors, then search, until the peak meets the bound.

    Args:
        graph: Operations and values.
        seconds: Wall-clock limit.

    Returns:
        The best order found, with the min-cut bound; the given order where nothing beats it.
    """
    start = time.monotonic()

    def left() -> float:
        return seconds - (time.monotonic() - start)

    def solution() -> OrderSolution:
        return OrderSolution(tuple(order), peak, min(bound, peak), solver, time.monotonic() - start)

    order, solver = given_order(graph), "given"
    peak = simulate(graph, order).peak
    bound = floor_bound(graph)
    search = compiled(graph) if peak > bound else None
    orders = [order]
    if search is not None:
        bound = max(bound, search.bound(orders, 0.1 * left())[0])
    for name, construct in _CONSTRUCTORS:
        if peak <= bound or left() <= 0:
            return solution()
        candidate = construct(graph)
        orders.append(candidate)
        reached = simulate(graph, candidate).peak
        if reached < peak:
            order, peak, solver = candidate, reached, name
    if search is None or peak <= bound:
        return solution()
    found, reached = search.anneal(order, left(), bound, rounds=1000, seed=1)
    if reached < peak:
        order, peak, solver = found, reached, "anneal"
    return solution()
