"""The order that users get: constructors, bound, searches."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.schedule.bounds import floor_bound
from ortgraph.plan.schedule.compiled import CompiledOrder, compiled
from ortgraph.plan.schedule.constructors import depth_first_order, given_order, least_peak_order, list_order
from ortgraph.plan.schedule.solution import OrderSolution
from ortgraph.plan.simulate import simulate

_CONSTRUCTORS = (("depth-first", depth_first_order), ("list", list_order), ("least-peak", least_peak_order))
# (width, level over the bound up to which peaks are not told apart); wider beams are slower and often no better.
_BEAMS = ((1, 1.0), (2, 1.0), (5, 1.0), (20, 1.0), (20, 1.05))
_PATIENCE = 4  # Times that annealing starts again without finding a better order,
_NEAR = 0.002  # once where the gap is at most this: a proof is likelier then than a better order.
_MEMORY = 200 << 20  # Bytes of sets in the attempts at a proof.
_PROBES = 12  # Such attempts.
_SHARE, _SHARE_NEAR = 0.1, 0.4  # Of the time, for proofs: by default, and with a small gap.


def solve_order(graph: OperationGraph, seconds: float = 10.0, tolerance: float = 0.0) -> OrderSolution:
    """A small peak within a time, with a bound that says how small it is.

    In turn: the given order, the min-cut bound, constructors, beams, attempts to prove that nothing is better (which
    raise the bound), annealing from several starts. Ends as soon as the peak meets the bound.

    Args:
        graph: Operations and values.
        seconds: Wall-clock limit.
        tolerance: Ends when the peak exceeds the bound by this share at most.

    Returns:
        The best order found, the given one where nothing beats it. The same each time, unless time cut a search short.
    """
    return _Portfolio(graph, seconds, tolerance).solve()


class _Portfolio:
    def __init__(self, graph: OperationGraph, seconds: float, tolerance: float) -> None:
        self.graph = graph
        self.start = time.monotonic()
        self.seconds = seconds
        self.tolerance = tolerance
        self.order: Sequence[int] = given_order(graph)
        self.peak = simulate(graph, self.order).peak
        self.solver = "given"
        self.orders: list[Sequence[int]] = [self.order]
        self.bound = floor_bound(graph)

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    def done(self) -> bool:
        return self.peak <= self.bound * (1 + self.tolerance) or self.left() <= 0

    def near(self) -> bool:
        return self.peak <= (1 + _NEAR) * self.bound

    def solution(self) -> OrderSolution:
        bound, seconds = min(self.bound, self.peak), time.monotonic() - self.start
        return OrderSolution(tuple(self.order), self.peak, bound, self.solver, seconds)

    def offer(self, order: Sequence[int] | None, solver: str) -> None:
        """Take an order as a start of the search, and as the answer when it is the best one."""
        if order is None:
            return
        self.orders.append(order)
        peak = simulate(self.graph, order).peak
        if peak < self.peak:
            self.order, self.peak, self.solver = order, peak, solver

    def solve(self) -> OrderSolution:
        if self.done():
            return self.solution()
        search = self._compiled()
        if search is not None:
            self.bound = max(self.bound, search.bound(self.orders, 0.1 * self.left())[0])
        for name, construct in _CONSTRUCTORS:
            if self.done():
                return self.solution()
            self.offer(construct(self.graph), name)
        if search is None:
            return self.solution()
        end = 0.75 * self.left()
        for width, loose in _BEAMS:
            if not self.done() and self.left() > end:
                found, _ = search.sets(self.left() - end, width, int(loose * self.bound), 1 << 62, _MEMORY)
                self.offer(found, "beam")
        self._prove(search)
        if not self.done():
            # Equal starts once; and time to check the answer.
            starts = list({tuple(o): None for o in self.orders})
            limit = 0.98 * self.left() - 4e-5 * len(self.graph.operations)
            patience = 1 if self.near() else _PATIENCE
            found, _ = search.anneal(starts, limit, self.bound, patience, seed=1)
            self.offer(found, "anneal")
        return self.solution()

    def _compiled(self) -> CompiledOrder | None:
        begin = time.monotonic()
        search = compiled(self.graph)
        self.start += time.monotonic() - begin  # The compiler runs once on a machine; that is no time of the search.
        return search

    def _prove(self, search: CompiledOrder) -> None:
        """Raise the bound by bisection: with all steps below a level either an order exists or the level is a bound."""
        total, begin = self.left(), time.monotonic()
        limit = self.peak + 1  # At this level the sets were too many for the time of a probe.

        def time_left() -> float:
            return (_SHARE_NEAR if self.near() else _SHARE) * total - (time.monotonic() - begin)

        def probe(above: int, seconds: float) -> bool:
            found, proved = search.sets(seconds, 0, above - 1, above, _MEMORY)
            self.offer(found, "sets")
            self.bound = max(self.bound, min(proved, self.peak))
            return found is not None or proved > 0

        for _ in range(_PROBES):
            if self.done() or self.bound + 1 >= limit or time_left() <= 0:
                break
            # All the way at first: the proof that nothing is better.
            above = self.peak if limit > self.peak else (self.bound + limit + 1) // 2
            if not probe(above, min(0.3 * _SHARE * total, time_left())):
                limit = above
        if not self.done() and self.near() and time_left() > 0:
            probe(self.peak, time_left())
