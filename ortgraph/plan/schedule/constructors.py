"""Orders made in one sweep: baselines, and where a search starts."""

from __future__ import annotations

import heapq

from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.schedule.walk import Walk


def given_order(graph: OperationGraph) -> list[int]:
    """The order in which the graph lists its operations."""
    return list(range(len(graph.operations)))


def depth_first_order(graph: OperationGraph) -> list[int]:
    """Always the operation that became ready last; of those that became ready together, the first given."""
    walk = Walk(graph)
    stack = list(reversed(walk.ready))
    seen = set(stack)
    order = []
    while stack:
        i = stack.pop()
        order.append(i)
        fresh = [j for j in walk.execute(i) if j not in seen]
        seen.update(fresh)
        stack += reversed(fresh)
    return order


def list_order(graph: OperationGraph) -> list[int]:
    """Always the ready operation that leaves the fewest bytes behind; ties by position."""
    walk = Walk(graph)
    heap = [(walk.change(i), i) for i in walk.ready]
    heapq.heapify(heap)
    order = []
    while heap:
        change, i = heapq.heappop(heap)
        if i not in walk.ready or change != walk.change(i):
            continue  # Entered again when its change fell.
        order.append(i)
        for j in walk.execute(i):
            heapq.heappush(heap, (walk.change(j), j))
    return order


def least_peak_order(graph: OperationGraph) -> list[int]:
    """Least peak memory first: of the ready operations that do not raise the peak the one that leaves the fewest bytes,
    else the one that raises it least; ties by position.
    """
    walk = Walk(graph)
    by_change = [(walk.change(i), i) for i in walk.ready]
    heapq.heapify(by_change)
    order = []
    while walk.ready:
        aside = []
        chosen = None
        while by_change and chosen is None:
            entry = heapq.heappop(by_change)
            change, i = entry
            if i not in walk.ready or change != walk.change(i):
                continue
            if walk.step(i) <= walk.peak:
                chosen = i
            else:
                aside.append(entry)
        for entry in aside:
            heapq.heappush(by_change, entry)
        if chosen is None:
            chosen = min(walk.ready, key=lambda i: (walk.step(i), i))
        order.append(chosen)
        for j in walk.execute(chosen):
            heapq.heappush(by_change, (walk.change(j), j))
    return order
