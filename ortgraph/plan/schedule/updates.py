"""The order of a training step: every update after the last reader of what it overwrites."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from ortgraph.analysis.liveness import Liveness, values_read


def order_updates(
    graph: ir.Graph,
    pairs: Iterable[tuple[ir.Value, ir.Value]],
    results: Collection[ir.Value] = (),
    nodes: Sequence[ir.Node] | None = None,
    loss: ir.Value | None = None,
) -> list[ir.Node]:
    """Nodes in the given order, except that updates move.

    A node that writes the new value of an input comes after every reader of the old one. Nodes that serve only
    updates run as early as that allows, so that gradients die early. Where a reader itself needs the new value, no
    order makes overwriting safe; the update then keeps its place and needs memory of its own.

    Args:
        graph: A valid graph.
        pairs: (input, new value) of everything that the step replaces.
        results: Values that are no updates (loss, gradients, outputs): what they need keeps the given order.
        nodes: The nodes to order, in given order; all nodes of the graph when None.
        loss: Nothing is replaced before it is computed (where it does not itself need a new value), so that a batch
            that a forward operator refuses leaves everything as it was.

    Returns:
        The nodes in a valid order; ordering the result again changes nothing.
    """
    nodes = list(graph if nodes is None else nodes)
    given = {node: i for i, node in enumerate(nodes)}
    live = Liveness(graph, order=nodes)
    before = _dependences(nodes, given)
    after: list[list[int]] = [[] for _ in nodes]
    for i, sources in enumerate(before):
        for j in sources:
            after[j].append(i)
    model = _reached([given[p] for v in results if (p := v.producer()) in given], before)
    forward = given.get(loss.producer()) if loss is not None else None  # type: ignore[arg-type]
    _add_overwrites(live, pairs, given, before, after, () if forward is None else (forward,))
    waiting = [len(b) for b in before]
    late = [bool(model) and i not in model for i in range(len(nodes))]
    ready = [(not late[i], i) for i, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(nodes[i])
        for j in after[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready, (not late[j], j))
    assert len(order) == len(nodes), "the graph has a cycle"
    return order


def _dependences(nodes: Sequence[ir.Node], given: dict[ir.Node, int]) -> list[set[int]]:
    before: list[set[int]] = []
    for node in nodes:
        producers = (v.producer() for v in values_read(node))
        before.append({given[p] for p in producers if p is not None and p in given and p is not node})
    return before


def _reached(starts: Iterable[int], edges: Sequence[Collection[int]]) -> set[int]:
    """All nodes on paths from ``starts``, these included."""
    seen: set[int] = set()
    stack = list(starts)
    while stack:
        i = stack.pop()
        if i not in seen:
            seen.add(i)
            stack.extend(edges[i])
    return seen


def _add_overwrites(
    live: Liveness,
    pairs: Iterable[tuple[ir.Value, ir.Value]],
    given: dict[ir.Node, int],
    before: list[set[int]],
    after: list[list[int]],
    first: Collection[int],
) -> None:
    """Let the writer of a new value wait for ``first`` and the readers of the old one, where that closes no cycle."""
    for old, new in pairs:
        producer = live.storage(new).producer()
        if producer is None or producer not in given:
            continue
        writer = given[producer]
        behind = _reached([writer], after)
        readers = {t for t in live.reading_steps(live.storage(old)) if t != writer}
        for waits_for in (readers, set(first)):
            if waits_for & behind:
                continue
            for t in sorted(waits_for - before[writer]):
                after[t].append(writer)
            before[writer] |= waits_for
