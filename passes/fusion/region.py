"""Regions of a graph behind a root: how pointwise and row-wise recognition walk it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir

Operands = Callable[[ir.Node], Iterable[ir.Value]]


def nodes_behind(root: ir.Node, operands: Operands, takes: Callable[[ir.Node], bool], limit: int) -> list[ir.Node]:
    """The root and the nodes behind it that ``takes`` accepts, nearest first up to ``limit``, in topological order.

    Args:
        root: Taken in any case.
        operands: The inputs through which the region grows.
        takes: Whether a node may belong to it.
        limit: Nodes at most.
    """
    chosen: set[ir.Node] = set()
    wave, seen = [root], {root}
    while wave and len(chosen) < limit:
        node = wave.pop(0)
        chosen.add(node)
        for value in operands(node):
            producer = value.producer()
            if producer is not None and producer not in seen and takes(producer):
                seen.add(producer)
                wave.append(producer)
    ordered: list[ir.Node] = []
    done: set[ir.Node] = set()
    stack = [(root, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            ordered.append(node)
        elif node not in done:
            done.add(node)
            stack.append((node, True))
            producers = (v.producer() for v in operands(node))
            stack += [(p, False) for p in producers if p is not None and p in chosen and p not in done]
    return ordered


def nodes_between(
    cut: Sequence[ir.Value], root: ir.Value, order: Mapping[ir.Value, int], operands: Operands
) -> tuple[ir.Node, ...]:
    """Nodes of a region between a cut and its root, in the region's order."""
    wanted: dict[ir.Node, int] = {}
    stack = [root]
    while stack:
        value = stack.pop()
        node = value.producer()
        if value in cut or node is None or node in wanted or value not in order:
            continue
        wanted[node] = order[value]
        stack += operands(node)
    return tuple(sorted(wanted, key=wanted.__getitem__))
