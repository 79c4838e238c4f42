"""Search over sets of executed operations: a beam, and the dynamic programming that proves optimality."""

from __future__ import annotations

import time

from ortgraph.errors import PlanError
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.schedule.bounds import order_bound
from ortgraph.plan.schedule.compiled import compiled
from ortgraph.plan.schedule.solution import OrderSolution
from ortgraph.plan.schedule.walk import direct_predecessors
from ortgraph.plan.simulate import simulate

_MEMORY = 400 << 20  # Bytes of states.


def solve_beam(graph: OperationGraph, width: int = 20, seconds: float | None = None) -> OrderSolution:
    """Executes one operation after the other and keeps, for each number of executed operations, ``width`` sets: those with
    the least sum of live bytes and peak so far.

    Orders that execute the same set merge. An operation that frees at least what it makes, at no more than the peak so far
    (or the bound), runs at once: that never makes an order worse.

    Args:
        graph: Operations and values.
        width: Sets kept.
        seconds: Wall-clock limit; past it the given order is the answer.
    """
    start = time.monotonic()
    bound = order_bound(graph, None if seconds is None else 0.2 * seconds)
    left = None if seconds is None else seconds - (time.monotonic() - start)
    order, _ = search_sets(graph, left, width, bound, 1 << 62)
    order = list(range(len(graph.operations))) if order is None else order
    peak = simulate(graph, order).peak
    return OrderSolution(tuple(order), peak, min(bound, peak), "beam", time.monotonic() - start)


def solve_exact(graph: OperationGraph, seconds: float = 60.0, memory: int = _MEMORY) -> OrderSolution:
    """The smallest peak of all orders, by dynamic programming over the sets of executed operations.

    A beam gives a first order; then every order with a smaller peak is ruled out or found. Orders of the same set merge,
    steps at or above the best peak are not taken, and operations that free at least what they make run at once.

    Args:
        graph: Operations and values.
        seconds: Wall-clock limit.
        memory: Bytes that the sets may take.

    Returns:
        An order whose bound is its peak.

    Raises:
        PlanError: Time or memory is not enough.
    """
    start = time.monotonic()
    best = solve_beam(graph, seconds=0.5 * seconds)
    order, peak, bound = best.sequence, best.peak, best.bound
    while peak > bound:
        found, proved = search_sets(graph, seconds - (time.monotonic() - start), 0, peak - 1, peak, memory)
        if found is not None:
            order, peak = tuple(found), simulate(graph, found).peak
        elif proved:
            bound = peak
        else:
            raise PlanError(
                f"the best order of {len(graph.operations)} operations could not be proved within {seconds} s and {memory} bytes",
                "use solve_order",
            )
    return OrderSolution(order, peak, peak, "exact", time.monotonic() - start)


def search_sets(
    graph: OperationGraph, seconds: float | None, width: int, level: int, above: int, memory: int = _MEMORY
) -> tuple[list[int] | None, int]:
    """See ``CompiledOrder.sets``; in Python where there is no compiler."""
    solver = compiled(graph)
    if solver is not None and graph.operations:
        return solver.sets(seconds, width, level, above, memory)
    return _search(graph, seconds, width, level, above)


def _search(
    graph: OperationGraph, seconds: float | None, width: int, level: int, above: int
) -> tuple[list[int] | None, int]:
    """The same search on integers as bit sets; without the closure."""
    end = None if seconds is None else time.monotonic() + seconds
    values, operations = graph.values, graph.operations
    before = [sum(1 << j for j in p) for p in direct_predecessors(graph)]
    readers = [sum(1 << r for r in rs) for rs in graph.readers]
    made = [sum(values[v].size for v in o.outputs if readers[v] or values[v].kept) for o in operations]
    weight = [sum(values[v].size for v in o.outputs) + o.scratch for o in operations]
    # Executed set -> (peak, live, order as a linked list).
    states: dict[int, tuple[int, int, tuple | None]] = {0: (0, 0, None)}
    cut, lowest = False, 1 << 62
    for _ in operations:
        if width and len(states) > width:
            kept = sorted(states.items(), key=lambda s: (s[1][1] + max(level, s[1][0]), s[0]))[:width]
            states, cut = dict(kept), True
        following: dict[int, tuple[int, int, tuple | None]] = {}
        for done, (peak, live, order) in states.items():
            if end is not None and time.monotonic() > end:
                return None, 0
            for i, o in enumerate(operations):
                if done >> i & 1 or before[i] & ~done:
                    continue
                dying = {v for v in o.inputs if not values[v].kept and not readers[v] & ~done & ~(1 << i)}
                taken: set[int] = set()
                step = live + weight[i]
                for source, result in o.inplace:
                    if source in dying and source not in taken and result not in taken:
                        taken |= {source, result}
                        step -= values[result].size
                if step >= above:
                    lowest = min(lowest, step)
                    continue
                after = live + made[i] - sum(values[v].size for v in dying)
                known = following.get(done | 1 << i)
                if known is None or known[0] > max(peak, step):
                    following[done | 1 << i] = (max(peak, step), after, (order, i))
        states = following
    if not states:
        return None, 0 if cut else lowest
    order, sequence = next(iter(states.values()))[2], []
    while order is not None:
        order, i = order
        sequence.append(i)
    return sequence[::-1], 0
