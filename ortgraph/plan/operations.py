"""The planning view of a graph: operations in a valid order, and the values (blocks of memory) that they make and read.

Ordering and recompute selection share this problem. A schedule is a *sequence* of operation indices in which every
operation appears at least once; an operation that appears again is recomputed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ortgraph.errors import PlanError

_MOST = 2**62  # bytes of all values and scratch: sums of them are int64


@dataclasses.dataclass(frozen=True)
class PlanValue:
    """One block of memory.

    Attributes:
        name: For reports; unique.
        size: Bytes.
        kept: Read after the last step: its last evaluation lives to the end.
    """

    name: str
    size: int
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        name: For reports; unique.
        cost: Time of one evaluation, in any unit (microseconds when made from a TrainingGraph).
        inputs: Indices of the values read, each once. Memory that is no part of the plan (parameters, batch) is not listed.
        outputs: Indices of the values made; a value is made by one operation.
        recompute: May be evaluated again.
        scratch: Bytes that live during the step only.
        inplace: (value read, value made) pairs: the result may take over the bytes of the value read, if that one dies
            with the step. At most one pair counts per value read and per value made; sizes are equal.
        after: Operations whose every evaluation precedes every evaluation of this one (an update overwrites what they read).
    """

    name: str
    cost: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recompute: bool = True
    scratch: int = 0
    inplace: tuple[tuple[int, int], ...] = ()
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class OperationGraph:
    """Operations in a valid order (the *given order*), and values.

    Raises:
        PlanError: An index is out of range, a value has no producer or two, the given order is not valid, or a number is
            impossible: negative bytes or costs, costs that are not finite, bytes that do not fit into 62 bits together.
    """

    operations: tuple[Operation, ...]
    values: tuple[PlanValue, ...]
    producer: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    readers: tuple[tuple[int, ...], ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_numbers(self.operations, self.values)
        producer = [-1] * len(self.values)
        readers: list[list[int]] = [[] for _ in self.values]
        for i, operation in enumerate(self.operations):
            for v in operation.inputs:
                if not 0 <= v < len(self.values) or producer[v] < 0:
                    raise PlanError(f"operation {operation.name!r} reads value {v} before it is made")
                readers[v].append(i)
            for v in operation.outputs:
                if not 0 <= v < len(self.values) or producer[v] >= 0:
                    raise PlanError(f"operation {operation.name!r} makes value {v}, which is unknown or made already")
                producer[v] = i
            if len(set(operation.inputs)) != len(operation.inputs):
                raise PlanError(f"operation {operation.name!r} lists a value twice", "name each value read once")
            for source, result in operation.inplace:
                _check_pair(self, operation, source, result)
            if not all(0 <= j < i for j in operation.after):
                raise PlanError(f"operation {operation.name!r} comes before one that it must follow")
        if -1 in producer:
            raise PlanError(f"value {self.values[producer.index(-1)].name!r} is made by no operation")
        object.__setattr__(self, "producer", tuple(producer))
        object.__setattr__(self, "readers", tuple(map(tuple, readers)))

    @property
    def cost(self) -> float:
        """Cost of evaluating every operation once."""
        return sum(o.cost for o in self.operations)

    def predecessors(self, i: int) -> tuple[int, ...]:
        """Operations whose results operation i reads, ascending, each once."""
        return tuple(sorted({self.producer[v] for v in self.operations[i].inputs}))

    def given_order(self) -> Sequence[int]:
        return range(len(self.operations))


def _check_numbers(operations: Sequence[Operation], values: Sequence[PlanValue]) -> None:
    for value in values:
        if value.size < 0:
            raise PlanError(f"value {value.name!r} has a size of {value.size} bytes")
    for operation in operations:
        if operation.scratch < 0 or not (math.isfinite(operation.cost) and operation.cost >= 0):
            raise PlanError(
                f"operation {operation.name!r} has cost {operation.cost} and {operation.scratch} bytes of scratch"
            )
    total = sum(v.size for v in values) + sum(o.scratch for o in operations)
    if total >= _MOST:
        raise PlanError(f"values and scratch of {total} bytes together are more than a plan can hold")


def _check_pair(graph: OperationGraph, operation: Operation, source: int, result: int) -> None:
    if source not in operation.inputs or result not in operation.outputs:
        raise PlanError(f"operation {operation.name!r}: in-place pair ({source}, {result}) is no value read and made")
    if graph.values[source].size != graph.values[result].size:
        raise PlanError(f"operation {operation.name!r}: in-place pair ({source}, {result}) is of two sizes")
