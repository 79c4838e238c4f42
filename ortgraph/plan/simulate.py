"""What a sequence of operations costs: live bytes at every step, peak and time. Independent of all solvers.

Convention (that of the published recompute benchmarks): a value lives from an evaluation to its last use before its next
evaluation; one that nobody uses dies with the step that made it; inputs and outputs of a step live together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ortgraph.errors import PlanError
from ortgraph.plan.operations import OperationGraph


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """One evaluation of a value: live during steps ``lower <= t < upper``."""

    value: int
    lower: int
    upper: int


@dataclasses.dataclass(frozen=True)
class Profile:
    """A simulated sequence.

    Attributes:
        live: int64 [steps]; bytes live at each step, scratch included, in-place results counted once.
        peak: Largest of them.
        cost: Sum of costs of all evaluations.
        overhead: cost / cost of evaluating everything once - 1 (0.05 is 5 %).
    """

    live: np.ndarray
    peak: int
    cost: float
    overhead: float


def lifetimes(graph: OperationGraph, sequence: Sequence[int]) -> list[Lifetime]:
    """Lifetimes of all evaluations, in order of evaluation."""
    born: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {}
    for t, i in enumerate(sequence):
        for v in graph.operations[i].inputs:
            last[v, born[v]] = t
        for v in graph.operations[i].outputs:
            born[v] = t
            last[v, t] = t
    end = len(sequence) - 1
    for v, t in born.items():
        if graph.values[v].kept:
            last[v, t] = end
    return [Lifetime(v, lower, upper + 1) for (v, lower), upper in last.items()]


def simulate(graph: OperationGraph, sequence: Sequence[int]) -> Profile:
    """Live bytes, peak and cost of a sequence.

    Raises:
        PlanError: See ``validate_sequence``.
    """
    validate_sequence(graph, sequence)
    change = np.zeros(len(sequence) + 1, dtype=np.int64)
    dies: dict[tuple[int, int], int] = {}
    for life in lifetimes(graph, sequence):
        change[life.lower] += graph.values[life.value].size
        change[life.upper] -= graph.values[life.value].size
        dies[life.value, life.upper - 1] = life.lower
    live = np.cumsum(change[:-1])
    for t, i in enumerate(sequence):
        operation = graph.operations[i]
        live[t] += operation.scratch
        taken: set[int] = set()
        for source, result in operation.inplace:
            # Dies at t, made before t: its bytes are free for the result.
            if source in taken or result in taken or dies.get((source, t), t) == t:
                continue
            if graph.values[source].kept and t == len(sequence) - 1:
                continue  # Read after the last step.
            taken |= {source, result}
            live[t] -= graph.values[result].size
    cost, once = sum(graph.operations[i].cost for i in sequence), graph.cost
    return Profile(live, int(live.max(initial=0)), cost, (cost - once) / once if once else 0.0)


def validate_sequence(graph: OperationGraph, sequence: Sequence[int]) -> None:
    """Check that a sequence can be executed and computes everything.

    Raises:
        PlanError: An operation is missing, reads a value not made yet, is repeated though it must not be, or follows
            one that overwrote what it reads.
    """
    made = [False] * len(graph.values)
    count = [0] * len(graph.operations)
    forbidden: set[int] = set()
    for t, i in enumerate(sequence):
        if not 0 <= i < len(graph.operations):
            raise PlanError(f"step {t}: there is no operation {i}")
        operation = graph.operations[i]
        count[i] += 1
        if count[i] > 1 and not operation.recompute:
            raise PlanError(f"step {t}: operation {operation.name!r} is repeated, which it must not be")
        if i in forbidden:
            raise PlanError(f"step {t}: operation {operation.name!r} comes after an update of what it reads")
        for v in operation.inputs:
            if not made[v]:
                raise PlanError(f"step {t}: operation {operation.name!r} reads {graph.values[v].name!r}, not made yet")
        for j in operation.after:
            if not count[j]:
                raise PlanError(f"step {t}: operation {operation.name!r} comes before {graph.operations[j].name!r}")
        forbidden.update(operation.after)
        for v in operation.outputs:
            made[v] = True
    missing = [o.name for o, n in zip(graph.operations, count, strict=True) if not n]
    if missing:
        raise PlanError(f"{len(missing)} operations are never evaluated, the first is {missing[0]!r}")
