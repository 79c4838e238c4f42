"""Executing operations one after the other: live bytes, and what each ready operation would add."""

from __future__ import annotations

from ortgraph.plan.operations import OperationGraph


def direct_predecessors(graph: OperationGraph) -> list[tuple[int, ...]]:
    """By operation: whose results it reads and whom it must follow, ascending, each once."""
    return [tuple(sorted({*graph.predecessors(i), *o.after})) for i, o in enumerate(graph.operations)]


class Walk:
    """A set of executed operations that grows.

    Attributes:
        live: Bytes that live between two steps.
        peak: Largest step so far.
        ready: Operations whose predecessors have all run, in the order in which they became ready.
    """

    def __init__(self, graph: OperationGraph) -> None:
        self.graph = graph
        before = direct_predecessors(graph)
        self._behind: list[list[int]] = [[] for _ in before]
        for i, sources in enumerate(before):
            for j in sources:
                self._behind[j].append(i)
        self._waiting = [len(b) for b in before]
        self._left = [len(r) for r in graph.readers]
        self.ready: dict[int, None] = {i: None for i, n in enumerate(self._waiting) if n == 0}
        self.live = self.peak = 0

    def step(self, i: int) -> int:
        """Bytes that live while operation i runs."""
        operation, values = self.graph.operations[i], self.graph.values
        taken: set[int] = set()
        saved = 0
        for source, result in operation.inplace:
            if source in taken or result in taken or values[source].kept or self._left[source] > 1:
                continue
            taken |= {source, result}
            saved += values[result].size
        return self.live + sum(values[v].size for v in operation.outputs) + operation.scratch - saved

    def change(self, i: int) -> int:
        """Bytes that more live after operation i than before it."""
        values, readers = self.graph.values, self.graph.readers
        made = sum(values[v].size for v in self.graph.operations[i].outputs if readers[v] or values[v].kept)
        inputs = self.graph.operations[i].inputs
        return made - sum(values[v].size for v in inputs if self._left[v] == 1 and not values[v].kept)

    def execute(self, i: int) -> list[int]:
        """Run a ready operation; returns those that it made ready and the ready ones whose change fell."""
        self.peak = max(self.peak, self.step(i))
        self.live += self.change(i)
        del self.ready[i]
        touched = []
        for v in self.graph.operations[i].inputs:
            self._left[v] -= 1
            if self._left[v] == 1:
                touched += [r for r in self.graph.readers[v] if r in self.ready]
        for j in self._behind[i]:
            self._waiting[j] -= 1
            if self._waiting[j] == 0:
                self.ready[j] = None
                touched.append(j)
        return touched
