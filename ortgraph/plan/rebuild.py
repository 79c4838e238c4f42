"""From a sequence back to a graph: nodes in the order of the sequence, and a copy of a node for each further evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.graph.edit import Names, stamp
from ortgraph.plan.graph_problem import GraphProblem
from ortgraph.plan.simulate import validate_sequence

RECOMPUTE_KEY = "ortgraph.recompute"  # on a copy: name of the node that it evaluates again


def apply_sequence(graph: ir.Graph, problem: GraphProblem, sequence: Sequence[int], by: str) -> int:
    """Rewrite a graph so that its file order is the sequence; every evaluation but the first of an operation is a copy.

    Nodes of the graph that are no part of the problem keep their place behind what they read.

    Args:
        graph: The graph that the problem was made from; rewritten in place.
        problem: See ``graph_problem``.
        sequence: Operation indices; validated.
        by: Name of the pass, for provenance.

    Returns:
        The number of copies.

    Raises:
        PlanError: The sequence is not valid.
    """
    validate_sequence(problem.operations, sequence)
    planned = {*problem.nodes, *problem.views}
    others = [node for node in graph if node not in planned]
    rebuild = _Rebuild(graph, problem, by)
    for i in sequence:
        rebuild.evaluate(problem.nodes[i])
    for node in problem.views:
        rebuild.complete(node)
    order = _with_others(rebuild.order, others)
    graph.remove([node for node in order if node.graph is graph])
    graph.extend(order)
    return rebuild.copies


class _Rebuild:
    """The nodes emitted so far, and the values that stand for the originals at this point."""

    def __init__(self, graph: ir.Graph, problem: GraphProblem, by: str) -> None:
        self._by = by
        self._names = Names(graph)
        self._views = {o: node for node in problem.views for o in node.outputs if o.name}
        # As given: a node emitted behind a copy of what it reads is changed to read that, and copied once more later on.
        nodes = (*problem.nodes, *problem.views)
        self._inputs = {node: tuple(node.inputs) for node in nodes}
        self._reads = {node: tuple(values_read(node)) for node in nodes}
        self._current: dict[ir.Value, ir.Value] = {}
        self._viewed: dict[ir.Value, list[ir.Value]] = {}  # views emitted of a value: stale once it is made anew
        self._emitted: set[ir.Node] = set()
        self.order: list[ir.Node] = []
        self.copies = 0

    def evaluate(self, node: ir.Node) -> None:
        """Emit a node, or a copy if it has been emitted before; its inputs are the latest evaluations."""
        for value in self._reads[node]:
            self._view(value)
        made = self._emit(node)
        for old, new in zip(node.outputs, made.outputs, strict=True):
            self._forget_views(old)
            self._current[old] = new

    def complete(self, view: ir.Node) -> None:
        """Emit a view that no operation has asked for: a graph output."""
        if view not in self._emitted:
            for value in view.outputs:
                self._view(value)

    def _view(self, value: ir.Value) -> None:
        node = self._views.get(value)
        if node is None or value in self._current:
            return
        for source in self._reads[node]:
            self._view(source)
        made = self._emit(node)
        self._current.update(zip(node.outputs, made.outputs, strict=True))
        for source in self._reads[node]:
            self._viewed.setdefault(source, []).extend(node.outputs)

    def _forget_views(self, value: ir.Value) -> None:
        for view in self._viewed.pop(value, ()):
            self._current.pop(view, None)
            self._forget_views(view)

    def _emit(self, node: ir.Node) -> ir.Node:
        inputs = [None if v is None else self._current.get(v, v) for v in self._inputs[node]]
        if node in self._emitted:
            made = self._copy(node, inputs)
        else:
            self._emitted.add(node)
            made = node
            for i, value in enumerate(inputs):
                if node.inputs[i] is not value:
                    node.replace_input_with(i, value)
        self.order.append(made)
        return made

    def _copy(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
        outputs = [
            ir.Value(name=self._names.fresh(o.name) if o.name else o.name, shape=o.shape, type=o.type)
            for o in node.outputs
        ]
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            node.attributes.values(),
            overload=node.overload,
            outputs=outputs,
            version=node.version,
            name=self._names.fresh_node(node.name or node.op_type),
        )
        stamp(copy, self._by, [node])
        copy.metadata_props[RECOMPUTE_KEY] = node.name or ""
        self.copies += 1
        return copy


def _with_others(order: Sequence[ir.Node], others: Sequence[ir.Node]) -> list[ir.Node]:
    """The order with further nodes put in, each behind all that it reads."""
    at = {node: i for i, node in enumerate(order)}
    behind: list[list[ir.Node]] = [[] for _ in range(len(order) + 1)]
    for node in others:
        producers = (v.producer() for v in values_read(node))
        at[node] = max((at[p] for p in producers if p is not None and p in at), default=-1)
        behind[at[node] + 1].append(node)
    result = list(behind[0])
    for i, node in enumerate(order):
        result.append(node)
        result.extend(behind[i + 1])
    return result
