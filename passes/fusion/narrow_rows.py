"""NarrowRows: compute only the rows that are read, forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import onnx_ir as ir

from ortgraph.graph import Names, TrainingGraph, replace_value, static_shape
from ortgraph.graph.edit import take_type
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.manager.rewrite import op_key
from ortgraph.ops.builder import Builder
from ortgraph.ops.rows import Needs, Rows, kept_zero, needs, pads_rows, reads_rows, sums_rows
from ortgraph.ops.shapes import operand

_PRODUCTS = frozenset({"MatMul", "Gemm"})
Demand = dict[ir.Value, "Rows | None"]  # None: the whole value


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What to do with one node.

    Attributes:
        rows: Rows of the outputs that are computed; None for an operator that sums the rows away.
        inputs: Rows read per input index.
        narrow: How many of the outputs hold rows; the others are whole (sums over rows).
    """

    rows: Rows | None
    inputs: Needs
    narrow: int


@dataclasses.dataclass(frozen=True)
class NarrowRows(GraphPass):
    """f(X)[rows] = f(X[rows]) and its gradient, for chains of row-wise operators.

    A classifier that reads only the first token needs one row per sequence after the last attention: its feed-forward
    block, norms and projections, and all their gradients, are computed for that row alone. Demand flows up from a
    Gather or Slice; zero rows of gradients flow down from the Pad that is its gradient.

    Attributes:
        max_share: Rows are narrowed when they are at most this share of the axis.

    Refuses when:
        - somebody reads the other rows (a reader that is not row-wise, a graph output, a random operator);
        - no matrix product gets smaller.
    """

    name: ClassVar[str] = "narrow-rows"
    stages: ClassVar[tuple[str, ...]] = ("captured", "optimized")
    max_share: float = 0.5

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        nodes = list(graph.graph)
        zero, sources = self._zero_rows(nodes)
        reading = {n: r for n in nodes if (r := reads_rows(n)) is not None and r.length <= self.max_share * r.n}
        if not reading and not sources:
            return changes
        plans = _plans(nodes, zero, reading)
        products = sum(1 for n in plans if n.op_type in _PRODUCTS and plans[n].rows is not None)
        if not products:
            for node in reading:
                changes.refusals.append(Refusal(node.name or "", "no matrix product would get smaller"))
            return changes
        _Rewrite(graph, self.name, plans, sources, reading).run(nodes)
        changes.counts["narrowed"] = len(plans)
        changes.counts["products"] = products
        return changes

    def _zero_rows(self, nodes: list[ir.Node]) -> tuple[dict[ir.Value, Rows], dict[ir.Value, Rows]]:
        """Values that are zero outside some rows, and those among them that come from a Pad."""
        zero: dict[ir.Value, Rows] = {}
        sources: dict[ir.Value, Rows] = {}
        for node in nodes:
            rows = pads_rows(node)
            if rows is not None and rows.length <= self.max_share * rows.n:
                sources[node.outputs[0]] = zero[node.outputs[0]] = rows
            elif node.outputs and static_shape(node.outputs[0]) is not None:
                rows = kept_zero(node, lambda v: zero.get(v) if v is not None else None)
                if rows is not None:
                    zero[node.outputs[0]] = rows
        return zero, sources


def _plans(nodes: list[ir.Node], zero: dict[ir.Value, Rows], reading: dict[ir.Node, Rows]) -> dict[ir.Node, _Plan]:
    """Plans per node that can be narrowed, found from the outputs to the inputs."""
    plans: dict[ir.Node, _Plan] = {}
    demand: Demand = {}
    for node in reversed(nodes):
        plan = _plan(node, zero, demand, reading)
        if plan is not None:
            plans[node] = plan
        wanted = plan.inputs if plan is not None else ({0: reading[node]} if node in reading else {})
        for i, value in enumerate(node.inputs):
            if value is None:
                continue
            rows = wanted.get(i)
            demand[value] = rows if demand.get(value, rows) == rows else None
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                for inner in attribute.as_graph().all_nodes():
                    demand.update(dict.fromkeys((v for v in inner.inputs if v is not None), None))
    return plans


def _plan(node: ir.Node, zero: dict[ir.Value, Rows], demand: Demand, reading: dict[ir.Node, Rows]) -> _Plan | None:
    if node in reading or pads_rows(node) is not None or not node.outputs:
        return None
    rows = zero.get(node.outputs[0])
    if rows is not None:
        inputs = needs(node, rows)
        sums = len(node.outputs) > 1
        return _Plan(rows, inputs, 1 if sums else len(node.outputs)) if inputs is not None else None
    summed = sums_rows(node, lambda v: zero.get(v) if v is not None else None)
    if summed is not None:
        return _Plan(None, summed, 0)
    wanted = {demand.get(o, "dead") for o in node.outputs if o.uses() or o.is_graph_output()}
    if any(o.is_graph_output() for o in node.outputs) or len(wanted) != 1:
        return None
    (only,) = wanted
    if not isinstance(only, Rows):
        return None
    inputs = needs(node, only)
    return None if inputs is None else _Plan(only, inputs, len(node.outputs))


class _Rewrite:
    """Builds the narrow nodes beside the old ones; what nobody reads any more is removed at the end."""

    def __init__(
        self,
        graph: TrainingGraph,
        by: str,
        plans: dict[ir.Node, _Plan],
        sources: dict[ir.Value, Rows],
        reading: dict[ir.Node, Rows],
    ) -> None:
        self.graph, self.by, self.plans, self.sources, self.reading = graph.graph, by, plans, sources, reading
        self.names = Names(graph.graph)
        self.narrow: dict[tuple[ir.Value, Rows], ir.Value] = {}
        self.rows_of: dict[ir.Value, Rows] = {}

    def run(self, nodes: list[ir.Node]) -> None:
        for node in nodes:
            build = Builder(self.graph, self.by, before=node, origins=(node,), names=self.names)
            plan = self.plans.get(node)
            if plan is not None:
                self._narrow(build, node, plan)
            elif node in self.reading and self._known(operand(node, 0), self.reading[node]):
                value = self._rows(build, operand(node, 0), self.reading[node])
                replace_value(node.outputs[0], self._shaped(build, value, _dims(node.outputs[0])))
        for node in nodes:
            plan = self.plans.get(node)
            if plan is not None and plan.rows is not None:
                self._restore(node, plan)
        for node in reversed(nodes):
            rewritten = node in self.plans or node in self.reading or node.outputs[0] in self.sources
            if rewritten and not any(o.uses() or o.is_graph_output() for o in node.outputs):
                self.graph.remove(node, safe=True)

    def _known(self, value: ir.Value, rows: Rows) -> bool:
        return (value, rows) in self.narrow

    def _narrow(self, build: Builder, node: ir.Node, plan: _Plan) -> None:
        inputs = [
            self._rows(build, v, plan.inputs[i]) if v is not None and i in plan.inputs else v
            for i, v in enumerate(node.inputs)
        ]
        attributes: dict[str, Any] = dict(node.attributes)
        if op_key(node) == "Reshape":
            assert plan.rows is not None
            inputs[1] = build.ints(plan.rows.compact(_dims(node.outputs[0])))
            attributes.pop("allowzero", None)
        made = build.multi(node.op_type, *inputs, outputs=len(node.outputs), domain=node.domain, **attributes)
        for i, (old, new) in enumerate(zip(node.outputs, made, strict=True)):
            if not (old.uses() or old.is_graph_output()):
                continue
            take_type(new, old)
            if i < plan.narrow:
                assert plan.rows is not None
                new.shape = ir.Shape(plan.rows.compact(_dims(old)))
                self.narrow[old, plan.rows] = new
            else:
                replace_value(old, new)

    def _rows(self, build: Builder, value: ir.Value, rows: Rows) -> ir.Value:
        """The given rows of a value: made already, the input of its Pad, or sliced."""
        known = self.narrow.get((value, rows))
        if known is not None:
            return known
        shape, producer = _dims(value), value.producer()
        if self.sources.get(value) == rows:
            assert producer is not None
            made = operand(producer, 0)
        elif rows.swapped:
            assert producer is not None
            plain = dataclasses.replace(rows, swapped=False)
            made = build.op("Transpose", self._rows(build, operand(producer, 0), plain), perm=[1, 0])
        else:
            made = _slice(build, value, rows)
        self.narrow[value, rows] = made = self._shaped(build, made, rows.compact(shape))
        return made

    def _shaped(self, build: Builder, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
        return value if static_shape(value) == shape else build.op("Reshape", value, build.ints(shape))

    def _restore(self, node: ir.Node, plan: _Plan) -> None:
        """Pad the rows again where somebody still reads the whole value (which is zero outside the rows)."""
        rows = plan.rows
        assert rows is not None
        for old in node.outputs[: plan.narrow]:
            new = self.narrow.get((old, rows))
            readers = [u for u in old.uses() if u.node not in self.plans]
            if new is None or not (readers or old.is_graph_output()):
                continue
            build = Builder(self.graph, self.by, before=node, origins=(node,), names=self.names)
            shape = _dims(old)
            replace_value(old, self._shaped(build, _pad(build, new, shape, rows), shape))


def _dims(value: ir.Value) -> tuple[int, ...]:
    """The shape of a value in a plan, which is static."""
    shape = static_shape(value)
    assert shape is not None
    return shape


def _blocks(shape: tuple[int, ...], rows: Rows, length: int) -> tuple[tuple[int, ...], int]:
    """A shape in which the rows have an axis of their own, of ``length``, and that axis."""
    found = rows.axis(shape)
    assert found is not None
    k, whole = found
    if whole:
        return (*shape[:k], length, *shape[k + 1 :]), k
    return (*shape[:k], shape[k] // rows.n, length, *shape[k + 1 :]), k + 1


def _slice(build: Builder, value: ir.Value, rows: Rows) -> ir.Value:
    shape = _dims(value)
    view, axis = _blocks(shape, rows, rows.n)
    seen = value if view == shape else build.op("Reshape", value, build.ints(view))
    low, high = build.ints([rows.start]), build.ints([rows.start + rows.length])
    return build.op("Slice", seen, low, high, build.ints([axis]))


def _pad(build: Builder, value: ir.Value, shape: tuple[int, ...], rows: Rows) -> ir.Value:
    view, axis = _blocks(shape, rows, rows.length)
    seen = value if static_shape(value) == view else build.op("Reshape", value, build.ints(view))
    pads = [0] * (2 * len(view))
    pads[axis], pads[axis + len(view)] = rows.start, rows.n - rows.start - rows.length
    return build.op("Pad", seen, build.ints(pads))
