"""What depends on labelled rows alone, and the nodes that compute it for a buffer of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.graph import Names, TrainingGraph, replace_value, static_shape
from ortgraph.graph.edit import remove_node, take_type
from ortgraph.manager.rewrite import op_key
from ortgraph.ops.builder import Builder
from ortgraph.ops.leading_rows import Inputs, LeadingRows, kept_zero, read_by_rows, summed_by_rows
from ortgraph.ops.loss import DEFAULT_IGNORE
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import COMPOSITE

_SUMS_BESIDE_ROWS = frozenset({f"{COMPOSITE}.LayerNormGrad"})  # further outputs are sums over rows
_RESHAPED = ("Reshape", "Expand")  # their second input is the shape


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do with one node.

    Attributes:
        inputs: Indices of the inputs that are read row by row.
        rows: How many of the outputs hold rows; the others are whole (the loss, sums over rows).
        zero: Rows outside the buffer are zero: they can be put back.
    """

    inputs: Inputs
    rows: int
    zero: bool = False


def only_for_outputs(graph: TrainingGraph) -> set[ir.Node]:
    """Nodes that only model outputs depend on: programs that train do not run them."""
    outputs = set(graph.signature.outputs) - {graph.signature.loss}
    found: set[ir.Node] = set()
    for node in reversed(list(graph.graph)):
        uses = [u.node for o in node.outputs for u in o.uses()]
        given = [o.name for o in node.outputs if o.is_graph_output()]
        if (uses or given) and all(u in found for u in uses) and all(n in outputs for n in given):
            found.add(node)
    return found


def find_plans(
    graph: TrainingGraph, loss: ir.Node, gradient: ir.Node, rows: LeadingRows, labels: Iterable[ir.Node]
) -> dict[ir.Node, Plan]:
    """The nodes that can run over labelled rows alone, found from the outputs to the inputs.

    ``labels`` are the nodes that make the labels: all of them are read, to find the rows.
    """
    nodes = list(graph.graph)
    zero: set[ir.Value] = set()
    for node in nodes:
        if node is gradient or kept_zero(node, zero.__contains__, rows):
            zero.add(node.outputs[0])
    plans: dict[ir.Node, Plan] = {}
    whole: set[ir.Value] = set()  # values of which a row without a label is read
    harmless, outputs = only_for_outputs(graph), set(graph.signature.outputs) - {graph.signature.loss}
    left = harmless | set(labels)
    for node in reversed(nodes):
        if node in left:
            continue
        if node is loss:
            plan: Plan | None = Plan(frozenset({0, 1}), 0)
        elif node is gradient:
            plan = Plan(frozenset({1, 2}), 1, zero=True)
        else:
            plan = _plan(node, zero, whole, outputs, rows)
        if plan is not None:
            plans[node] = plan
        by_rows = plan.inputs if plan is not None else ()
        whole.update(v for i, v in enumerate(node.inputs) if v is not None and i not in by_rows)
        whole.update(set(values_read(node)) - set(node.inputs))
    return plans


def _plan(
    node: ir.Node, zero: set[ir.Value], whole: set[ir.Value], outputs: set[str], rows: LeadingRows
) -> Plan | None:
    if not node.outputs:
        return None
    sums = op_key(node) in _SUMS_BESIDE_ROWS
    if node.outputs[0] in zero:
        inputs = read_by_rows(node, rows)
        return (
            None
            if inputs is None
            else Plan(inputs, 1 if sums else len(node.outputs), zero=not node.outputs[1:] or sums)
        )
    summed = summed_by_rows(node, zero.__contains__, rows)
    if summed is not None:
        return Plan(summed, 0)
    if sums or any(o in whole for o in node.outputs):
        return None
    if any(o.is_graph_output() and o.name not in outputs for o in node.outputs):
        return None
    if any(rows.axes(o) is None for o in node.outputs if o.name and (o.uses() or o.is_graph_output())):
        return None
    inputs = read_by_rows(node, rows)
    return None if not inputs else Plan(inputs, len(node.outputs))


class Rewrite:
    """Builds the nodes for the buffer beside the old ones; what nobody reads any more is removed at the end.

    Args:
        graph: Rewritten in place.
        by: Name of the pass.
        rows: All rows.
        kept: Rows of the buffer, fewer than all.
        loss, gradient: CrossEntropy and its gradient.
        plans: What becomes narrow.
        labels: The nodes that make the labels, in graph order.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        by: str,
        rows: LeadingRows,
        kept: int,
        loss: ir.Node,
        gradient: ir.Node,
        plans: dict[ir.Node, Plan],
        labels: list[ir.Node],
    ) -> None:
        self.graph, self.by, self.rows, self.kept, self.plans = graph.graph, by, rows, kept, plans
        self.loss, self.gradient, self.labels = loss, gradient, labels
        self.names = Names(graph.graph)
        self.narrow: dict[ir.Value, ir.Value] = {}

    def run(self) -> None:
        nodes = list(self.graph)
        first = next(n for n in nodes if n in self.plans)
        self._labels_first(nodes, first)
        positions, enough = self._positions(self._builder(first, self.loss))
        self.positions = positions
        for node in nodes:
            if node in self.plans:
                self._narrow(node, self.plans[node], enough)
        for node in nodes:
            if node in self.plans and self.plans[node].zero:
                self._restore(node)
        for node in reversed(nodes):
            if node in self.plans and not any(o.uses() or o.is_graph_output() for o in node.outputs):
                remove_node(node)

    def _builder(self, before: ir.Node, origin: ir.Node) -> Builder:
        return Builder(self.graph, self.by, before=before, origins=(origin,), names=self.names)

    def _labels_first(self, nodes: list[ir.Node], first: ir.Node) -> None:
        """Labels are known before the first narrow node: they depend on data inputs alone."""
        at = {node: i for i, node in enumerate(nodes)}
        late = [node for node in self.labels if at[node] > at[first]]
        for node in late:
            self.graph.remove(node)
        self.graph.insert_before(first, late)

    def _positions(self, b: Builder) -> tuple[ir.Value, ir.Value]:
        """(positions of the buffer's rows, int64, ascending within labelled and other ones; whether it holds all)."""
        labels = self.loss.inputs[1]
        assert labels is not None
        ignored = b.op("Equal", labels, b.scalar(attribute(self.loss, "ignore_index", DEFAULT_IGNORE), labels))
        late = b.op("Mul", b.op("Cast", ignored, to=ir.DataType.INT64), b.const(self.rows.count, np.int64))
        key = b.op("Add", b.const(np.arange(self.rows.count), np.int64), late)
        # The sorted keys: positions of labelled rows, then positions of ignored ones plus the number of rows.
        smallest, positions = b.multi("TopK", key, b.ints([self.kept]), outputs=2, axis=0, largest=0, sorted=1)
        del smallest
        labelled = b.op("Sub", b.const(self.rows.count, np.int64), _count(b, ignored))
        return positions, b.op("LessOrEqual", labelled, b.const(self.kept, np.int64))

    def _narrow(self, node: ir.Node, plan: Plan, enough: ir.Value) -> None:
        b = self._builder(node, node)
        inputs = [self._rows(b, v) if v is not None and i in plan.inputs else v for i, v in enumerate(node.inputs)]
        attributes: dict[str, Any] = dict(node.attributes)
        if op_key(node) in _RESHAPED:
            inputs[1] = b.ints(self.rows.compact(node.outputs[0], self.kept))
            attributes.pop("allowzero", None)
        if node is self.gradient:
            seed = inputs[0]
            assert seed is not None
            inputs[0] = b.op("Where", enough, seed, b.scalar(float("nan"), seed))
        made = b.multi(node.op_type, *inputs, outputs=len(node.outputs), domain=node.domain, **attributes)
        for i, (old, new) in enumerate(zip(node.outputs, made, strict=True)):
            if not (old.uses() or old.is_graph_output()):
                continue
            take_type(new, old)
            if node is self.loss and i == 1 or i < plan.rows:
                new.shape = ir.Shape(self.rows.compact(old, self.kept))
                self.narrow[old] = new
            elif node is self.loss and i == 0:
                replace_value(old, b.op("Where", enough, new, b.scalar(float("nan"), new)))
            else:
                replace_value(old, new)

    def _rows(self, b: Builder, value: ir.Value) -> ir.Value:
        """The buffer's rows of a value: made already, or gathered."""
        known = self.narrow.get(value)
        if known is not None:
            return known
        shape, k = static_shape(value), self.rows.axes(value)
        assert shape is not None and k is not None
        flat = value if k == 1 else b.op("Reshape", value, b.ints((self.rows.count, *shape[k:])))
        made = b.op("Gather", flat, self.positions, axis=0)
        if k > 1:
            made = b.op("Reshape", made, b.ints(self.rows.compact(value, self.kept)))
        self.narrow[value] = made
        return made

    def _restore(self, node: ir.Node) -> None:
        """Put the rows back among zeros where somebody still reads the whole gradient."""
        old = node.outputs[0]
        new = self.narrow.get(old)
        readers = [u for u in old.uses() if u.node not in self.plans]
        shape, k = static_shape(old), self.rows.axes(old)
        if new is None or not (readers or old.is_graph_output()):
            return
        assert shape is not None and k is not None and old.dtype is not None
        b = self._builder(node, node)
        whole, part = (self.rows.count, *shape[k:]), (self.kept, *shape[k:])
        flat = new if k == 1 else b.op("Reshape", new, b.ints(part))
        zeros = b.op("Expand", b.const(0, old.dtype), b.ints(whole))
        index = b.op("Unsqueeze", self.positions, b.ints([1]))
        made = b.op("ScatterND", zeros, index, flat)
        replace_value(old, made if k == 1 else b.op("Reshape", made, b.ints(shape)))


def _count(b: Builder, mask: ir.Value) -> ir.Value:
    return b.op("ReduceSum", b.op("Cast", mask, to=ir.DataType.INT64), keepdims=0)
