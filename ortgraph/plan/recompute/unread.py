"""Evaluations whose results nobody reads: a search leaves some behind where it dropped what had read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ortgraph.plan.operations import OperationGraph


def without_unread(graph: OperationGraph, sequence: Sequence[int], reorder: bool = True) -> tuple[int, ...]:
    """A valid sequence without evaluations whose results nobody reads before they are made anew.

    At least one evaluation of each operation stays. No step gets more expensive or larger by it.

    Args:
        graph: Operations and values.
        sequence: A valid sequence.
        reorder: First evaluations may go where a later one serves; else they stay, and with them their order.
    """
    count = Counter(sequence)
    wanted = {v for v, value in enumerate(graph.values) if value.kept}
    firsts = {i: t for t, i in reversed(list(enumerate(sequence)))}
    kept = []
    for t in range(len(sequence) - 1, -1, -1):
        i = sequence[t]
        operation = graph.operations[i]
        fixed = count[i] == 1 or (firsts[i] == t and not reorder)
        if not fixed and wanted.isdisjoint(operation.outputs):
            count[i] -= 1
            continue
        kept.append(i)
        wanted.difference_update(operation.outputs)
        wanted.update(operation.inputs)
    return tuple(reversed(kept))
