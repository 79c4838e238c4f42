"""Lower bounds on the peak of every order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ortgraph.plan.operations import OperationGraph
from ortgraph.plan.schedule.compiled import compiled


def order_bound(graph: OperationGraph, seconds: float | None = None, orders: Iterable[Sequence[int]] = ()) -> int:
    """Min-cut lower bound on the peak of every order in which each operation runs once.

    When v runs, the set X of operations executed before it is closed under predecessors (``after`` included), holds all
    ancestors of v and neither v nor a descendant. The step costs cut(X) + outputs(v) + scratch(v) - in place(v, X), where
    cut(X) is the size of all values made in X that are kept or have a reader outside X, so

        peak >= max over v of [outputs(v) + scratch(v) + min over X of (cut(X) - in place(v, X))].

    A value pays once however many readers are outside, a kept value pays when its producer is in X: both are edges of an
    s-t network, and the inner minimum is one max-flow per v. In place(v, X) is largest when every input dies that is not
    kept and has no reader behind v: that much is taken off as a constant; where a pair shares neither value with another
    one it is size * [all other readers in X], so one more edge makes it exact. All kept values live together after the
    last step, so their sum bounds the peak too. Each term bounds by itself: a deadline only makes the maximum smaller.

    Operations are tried in the order of what their term can be at most, which any known order and any cut found before
    give: the bytes of a step at which the operation runs, or could run.

    Args:
        graph: Operations and values.
        seconds: Wall-clock limit; no limit when None.
        orders: Valid orders. The search for the bound ends when it meets the least of their peaks.

    Returns:
        Bytes. Without a compiler a weaker bound: inputs and outputs of one operation, and the kept values.
    """
    solver = compiled(graph)
    if solver is None:
        return floor_bound(graph)
    known = [range(len(graph.operations)), *orders]
    return solver.bound(known, seconds)[0]


def floor_bound(graph: OperationGraph) -> int:
    """Largest sum of what one operation reads, makes and needs as scratch, less what it may write in place; and the sum
    of all kept values.
    """
    values = graph.values
    best = sum(v.size for v in values if v.kept)
    for o in graph.operations:
        results = {result for source, result in o.inplace if not values[source].kept}
        touched = sum(values[v].size for v in (*o.inputs, *o.outputs))
        best = max(best, touched + o.scratch - sum(values[v].size for v in results))
    return best
