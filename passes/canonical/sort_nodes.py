"""SortNodes: a valid order and unique names."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from ortgraph.errors import PassError
from ortgraph.graph import Names, TrainingGraph
from ortgraph.manager.base import Changes, GraphPass
from ortgraph.passes.canonical.values import BEFORE_PLAN, bodies


@dataclasses.dataclass(frozen=True)
class SortNodes(GraphPass):
    """Every node after the nodes that it reads, otherwise in the order given; every node name unique and not empty.

    Counted as ``moved``: nodes at another place than before. Names of nodes go uncounted: they are no part of the
    graph's text. Names of values are left alone.

    Raises:
        PassError: The graph has a circle.
    """

    name: ClassVar[str] = "sort-nodes"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        before = list(graph.graph)
        if not _is_sorted(before):
            try:
                graph.graph.sort()
            except ValueError as error:
                raise PassError(f"{self.name}: the graph has a circle", "ortgraph verify names the values") from error
            changes.counts["moved"] = sum(a is not b for a, b in zip(before, graph.graph, strict=True))
        _name(graph.graph)
        return changes


def _is_sorted(nodes: list[ir.Node]) -> bool:
    place = {node: i for i, node in enumerate(nodes)}
    return all(_latest(node, place) < i for i, node in enumerate(nodes))


def _latest(node: ir.Node, place: dict[ir.Node, int]) -> int:
    """Place of the last node that a node or its subgraphs read."""
    inner = [n for body in bodies(node) for n in body.all_nodes()]
    producers = (v.producer() for n in (node, *inner) for v in n.inputs if v is not None)
    return max((place[p] for p in producers if p is not None and p in place), default=-1)


def _name(graph: ir.Graph) -> None:
    """Give nodes without a name of their own a fresh one; the first of several keeps the name."""
    seen: set[str] = set()
    wanting = []
    for node in graph.all_nodes():
        if not node.name or node.name in seen:
            wanting.append(node)
        seen.add(node.name or "")
    names = Names(graph) if wanting else None
    for node in wanting:
        assert names is not None
        node.name = names.fresh_node(node.name or node.op_type.lower())
