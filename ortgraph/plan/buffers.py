"""From a sequence to the placement problem: one buffer per evaluation, in-place results merged into what they overwrite."""

from __future__ import annotations

from collections.abc import Sequence

from ortgraph.plan.memory import Buffer, MemoryProblem
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.simulate import lifetimes


def sequence_buffers(graph: OperationGraph, sequence: Sequence[int]) -> MemoryProblem:
    """Buffers of a valid sequence, named ``value@step`` of their first evaluation; scratch is not among them.

    The max-load of the result is the peak of the sequence without scratch.
    """
    lives = {(life.value, life.lower): life.upper for life in lifetimes(graph, sequence)}
    dies = {(value, upper - 1): lower for (value, lower), upper in lives.items()}
    head: dict[tuple[int, int], tuple[int, int]] = {}
    for t, i in enumerate(sequence):
        taken: set[int] = set()
        for source, result in graph.operations[i].inplace:
            made = dies.get((source, t), t)
            if source in taken or result in taken or made == t:
                continue
            taken |= {source, result}
            head[result, t] = head.get((source, made), (source, made))
    last: dict[tuple[int, int], int] = {}
    for key, upper in lives.items():
        root = head.get(key, key)
        last[root] = max(last.get(root, 0), upper)
    return MemoryProblem(
        tuple(
            Buffer(f"{graph.values[value].name}@{lower}", lower, upper, graph.values[value].size)
            for (value, lower), upper in last.items()
        )
    )
