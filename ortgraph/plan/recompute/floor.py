"""Bytes below which no sequence goes, and the operations that set them."""

from __future__ import annotations

import dataclasses

import numpy as np

from ortgraph.errors import PlanError
from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.recompute.problem import RecomputeProblem

_NAMED = 5  # operations named in a message


@dataclasses.dataclass(frozen=True)
class MemoryFloor:
    """A lower bound on the peak of every sequence.

    Attributes:
        bytes: The bound.
        operations: Operations that need so many by themselves, ascending; empty where the kept values set it.
    """

    bytes: int
    operations: tuple[int, ...]


def memory_floor(graph: OperationGraph) -> MemoryFloor:
    """The largest need of one operation: what it reads, what it makes, scratch, and values that must live beside it.

    A value must live beside operation i when its producer may not be evaluated again and comes before i in every
    sequence, and the value is kept or has a reader that comes after i in every sequence. An in-place result counts once
    where the value read may die there. All kept values live together at the end.
    """
    sizes = np.array([v.size for v in graph.values], dtype=np.int64)
    held = _held(graph)
    needs = np.zeros(len(graph.operations), dtype=np.int64)
    for i, operation in enumerate(graph.operations):
        values = {*operation.inputs, *operation.outputs, *held[i]}
        needs[i] = sizes[sorted(values)].sum() + operation.scratch
        taken: set[int] = set()
        for source, result in operation.inplace:
            if source not in held[i] and source not in taken and result not in taken:
                taken |= {source, result}
                needs[i] -= sizes[result]
    kept = int(sum(v.size for v in graph.values if v.kept))
    largest = int(needs.max(initial=0))
    if kept > largest:
        return MemoryFloor(kept, ())
    return MemoryFloor(largest, tuple(int(i) for i in np.flatnonzero(needs == largest)))


def _held(graph: OperationGraph) -> list[set[int]]:
    """Per operation, values that live through its first evaluation in every sequence and past it."""
    n = len(graph.operations)
    held: list[set[int]] = [set() for _ in range(n)]
    fixed = [v for v, made in enumerate(graph.producer) if not graph.operations[made].recompute]
    if not fixed:
        return held
    before = [0] * n  # bit sets of ancestors
    for i, operation in enumerate(graph.operations):
        for j in (*graph.predecessors(i), *operation.after):
            before[i] |= before[j] | 1 << j
    descend = [0] * n
    for i in range(n - 1, -1, -1):
        for j in (*graph.predecessors(i), *graph.operations[i].after):
            descend[j] |= descend[i] | 1 << i
    for v in fixed:
        # Strictly between the producer and some reader; everything after the producer for a kept value.
        through = (1 << n) - 1 if graph.values[v].kept else 0
        for reader in graph.readers[v]:
            through |= before[reader]
        through &= descend[graph.producer[v]]
        while through:
            low = through & -through
            held[low.bit_length() - 1].add(v)
            through ^= low
    return held


def check_floor(problem: RecomputeProblem) -> MemoryFloor:
    """The floor of the problem's graph.

    Raises:
        PlanError: The budget is below it.
    """
    floor = memory_floor(problem.graph)
    if problem.budget >= floor.bytes:
        return floor
    names = [repr(problem.graph.operations[i].name) for i in floor.operations]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        cause = f"{', '.join(names[:_NAMED])}{more} need {floor.bytes} bytes for inputs, results and scratch"
    else:
        cause = f"the values kept after the last step take {floor.bytes} bytes"
    raise PlanError(f"a budget of {problem.budget} bytes is infeasible: {cause}", f"give at least {floor.bytes} bytes")
