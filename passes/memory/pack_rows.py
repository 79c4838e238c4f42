"""The nodes that compute packed rows, and what is put back among zeros for attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.graph import Names, TrainingGraph, replace_value, static_shape
from ortgraph.graph.edit import remove_node, take_type
from ortgraph.manager.rewrite import op_key
from ortgraph.ops.builder import Builder
from ortgraph.ops.rows import Rows
from ortgraph.ops.shapes import operand
from ortgraph.passes.memory.labelled_head import Plan
from ortgraph.passes.memory.padded_rows import Padding

_RESHAPED = ("Reshape", "Expand")  # their second input is the shape


class PackRows:
    """Builds packed nodes beside the old ones; what nobody reads any more is removed at the end.

    Args:
        graph: Rewritten in place.
        by: Name of the pass.
        padding: What can be left out.
        kept: Rows of the buffer, fewer than all.
    """

    def __init__(self, graph: TrainingGraph, by: str, padding: Padding, kept: int) -> None:
        self.training, self.graph, self.by, self.padding, self.kept = graph, graph.graph, by, padding, kept
        self.rows = padding.rows
        self.names = Names(graph.graph)
        self.packed: dict[ir.Value, ir.Value] = {}

    def run(self) -> None:
        nodes = list(self.graph)
        plans = self.padding.plans
        b = self._builder(self._labels_first(nodes), None)
        self._positions(b)
        for node in nodes:
            if node in plans:
                self._pack(node, plans[node])
            elif node in self.padding.picks and operand(node, 0) in self.packed:
                self._pick(node, self.padding.picks[node])
        for node in nodes:
            if node in plans:
                for old in node.outputs[: plans[node].rows]:
                    self._restore(node, old)
        self._guard()
        for node in reversed(nodes):
            rewritten = node in plans or node in self.padding.picks or node.outputs[0] in self.padding.pads
            if rewritten and not any(o.uses() or o.is_graph_output() for o in node.outputs):
                remove_node(node)

    def _builder(self, before: ir.Node | None, origin: ir.Node | None) -> Builder:
        origins = () if origin is None else (origin,)
        return Builder(self.graph, self.by, before=before, origins=origins, names=self.names)

    def _labels_first(self, nodes: list[ir.Node]) -> ir.Node:
        """Labels are known before anything else: they are views of data inputs. Returns the node behind them."""
        behind = {n for labels in self.padding.labels.values() for n in labels.nodes}
        first = next(n for n in nodes if n not in behind)
        late = [n for n in nodes[nodes.index(first) :] if n in behind]
        self.graph.remove(late)
        self.graph.insert_before(first, late)
        return first

    # --- which rows ----------------------------------------------------------------------------------------------

    def _positions(self, b: Builder) -> None:
        """Flat indices of the kept rows, ascending, then of others; where each row of a sequence went; both int64."""
        mask, (batch, length) = self.padding.mask, (self.padding.batch, self.padding.length)
        boolean = mask.dtype == ir.DataType.BOOL
        on = mask if boolean else b.op("Equal", mask, b.scalar(1, mask))
        off = b.op("Not", on)
        whole = _any(b, b.op("And", off, self._read(b)))
        if self.padding.empty:
            whole = b.op("Or", whole, b.op("Not", _any(b, on)))
        kept = b.op("Reshape", b.op("Or", on, whole), b.ints([batch * length]))
        count = self.rows.count
        late = b.op("Mul", b.op("Cast", b.op("Not", kept), to=ir.DataType.INT64), b.const(count, np.int64))
        key = b.op("Add", b.const(np.arange(count), np.int64), late)
        # The sorted keys: positions of kept rows, then positions of the others plus the number of rows.
        self.positions = b.multi("TopK", key, b.ints([self.kept]), outputs=2, axis=0, largest=0, sorted=1)[1]
        if self.padding.picks or self.padding.pads:
            nowhere = b.const(np.zeros(count), np.int64)
            self.place = b.op(
                "ScatterElements", nowhere, self.positions, b.const(np.arange(self.kept), np.int64), axis=0
            )
        self.column = b.op("Mod", self.positions, b.const(length, np.int64))
        wanted = b.op("ReduceSum", b.op("Cast", kept, to=ir.DataType.INT64), keepdims=0)
        self.enough = b.op("LessOrEqual", wanted, b.const(self.kept, np.int64))
        if not boolean:
            proper = b.op("Or", on, b.op("Equal", mask, b.scalar(0, mask)))
            least = b.op("ReduceMin", b.op("Cast", proper, to=ir.DataType.INT64), keepdims=0)
            self.enough = b.op("And", self.enough, b.op("Cast", least, to=ir.DataType.BOOL))
        self._seed(b)

    def _read(self, b: Builder) -> ir.Value:
        """The rows that are read whatever the mask says, [batch, length] or [1, length]."""
        fixed = np.zeros((1, self.padding.length), np.bool_)
        fixed[0, sorted(self.padding.positions)] = True
        read = b.const(fixed, np.bool_)
        for labels in self.padding.labels.values():
            counts = b.op("Not", b.op("Equal", labels.value, b.scalar(labels.ignore, labels.value)))
            shaped = b.op("Reshape", counts, b.ints([self.padding.batch, self.padding.length]))
            read = b.op("Or", read, shaped)
        return read

    def _nan(self, b: Builder, value: ir.Value) -> ir.Value:
        """NaN in place of a value when the buffer does not hold all rows, or the mask is none of zeros and ones."""
        return b.op("Where", self.enough, value, b.scalar(float("nan"), value))

    def _seed(self, b: Builder) -> None:
        """Gradients without a number when a row is missing."""
        name = self.training.signature.loss_gradient
        seed = next(v for v in self.graph.inputs if v.name == name)
        readers = tuple(seed.uses())
        guarded = self._nan(b, seed)
        for use in readers:
            use.node.replace_input_with(use.idx, guarded)

    def _guard(self) -> None:
        """The loss likewise."""
        name = self.training.signature.loss
        loss = next(v for v in self.graph.outputs if v.name == name)
        maker = loss.producer()
        assert maker is not None
        following = list(self.graph)
        at = following.index(maker) + 1
        b = self._builder(following[at] if at < len(following) else None, maker)
        readers = tuple(loss.uses())
        guarded = self._nan(b, loss)
        for use in readers:
            use.node.replace_input_with(use.idx, guarded)
        outputs = self.graph.outputs[:]
        for i in [i for i, v in enumerate(outputs) if v is loss]:
            self.graph.outputs[i] = guarded
        loss.name, guarded.name = self.names.fresh(f"{name}.packed"), name
        guarded.shape, guarded.type = loss.shape, loss.type

    # --- packed rows ---------------------------------------------------------------------------------------------

    def _pack(self, node: ir.Node, plan: Plan) -> None:
        b = self._builder(node, node)
        inputs = [self._rows(b, v) if v is not None and i in plan.inputs else v for i, v in enumerate(node.inputs)]
        attributes: dict[str, Any] = dict(node.attributes)
        if op_key(node) in _RESHAPED:
            inputs[1] = b.ints(self.rows.compact(node.outputs[0], self.kept))
            attributes.pop("allowzero", None)
        made = b.multi(node.op_type, *inputs, outputs=len(node.outputs), domain=node.domain, **attributes)
        for i, (old, new) in enumerate(zip(node.outputs, made, strict=True)):
            if not (old.uses() or old.is_graph_output()):
                continue
            take_type(new, old)
            if i < plan.rows or (node in self.padding.labels and i == 1):
                new.shape = ir.Shape(self.rows.compact(old, self.kept))
                self.packed[old] = new
            else:
                replace_value(old, new)

    def _rows(self, b: Builder, value: ir.Value) -> ir.Value:
        """The packed rows of a value: made already, or gathered."""
        known = self.packed.get(value)
        if known is not None:
            return known
        shape, k = static_shape(value), self.rows.axes(value)
        assert shape is not None
        if value in self.padding.pads:
            made = self._packed_pad(b, value, self.padding.pads[value])
        elif k is None:  # one row per position
            lead = len(shape) - next(i for i, d in enumerate((*shape, 0)) if d == self.padding.length)
            flat = b.op("Reshape", value, b.ints((self.padding.length, *shape[len(shape) - lead + 1 :])))
            made = b.op("Gather", flat, self.column, axis=0)
        else:
            flat = value if k == 1 else b.op("Reshape", value, b.ints((self.rows.count, *shape[k:])))
            made = b.op("Gather", flat, self.positions, axis=0)
            if k > 1:
                made = b.op("Reshape", made, b.ints(self.rows.compact(value, self.kept)))
        self.packed[value] = made
        return made

    def _places(self, b: Builder, rows: Rows) -> ir.Value:
        """Where in the buffer some positions of every sequence are."""
        firsts = np.arange(self.padding.batch)[:, None] * self.padding.length
        flat = (firsts + np.arange(rows.start, rows.start + rows.length)).reshape(-1)
        return b.op("Gather", self.place, b.const(flat, np.int64), axis=0)

    def _pick(self, node: ir.Node, rows: Rows) -> None:
        """A slice of one or more positions of every sequence, from the buffer."""
        b = self._builder(node, node)
        old, source = node.outputs[0], operand(node, 0)
        shape, full = static_shape(old), static_shape(source)
        assert shape is not None and full is not None
        flat = b.op("Reshape", self.packed[source], b.ints((self.kept, *full[2:])))
        made = b.op("Reshape", b.op("Gather", flat, self._places(b, rows), axis=0), b.ints(shape))
        replace_value(old, made)

    def _packed_pad(self, b: Builder, value: ir.Value, rows: Rows) -> ir.Value:
        """The gradient of such a slice, in the buffer."""
        maker, shape = value.producer(), static_shape(value)
        assert maker is not None and shape is not None
        given = b.op("Reshape", operand(maker, 0), b.ints((rows.outer * rows.length, *shape[2:])))
        made = self._scattered(b, given, self._places(b, rows), self.kept, shape[2:])
        return b.op("Reshape", made, b.ints(self.rows.compact(value, self.kept)))

    def _scattered(
        self, b: Builder, rows: ir.Value, places: ir.Value, count: int, trailing: tuple[int, ...]
    ) -> ir.Value:
        assert rows.dtype is not None
        zeros = b.op("Expand", b.const(0, rows.dtype), b.ints((count, *trailing)))
        return b.op("ScatterND", zeros, b.op("Unsqueeze", places, b.ints([1])), rows)

    def _restore(self, node: ir.Node, old: ir.Value) -> None:
        """Put the rows back among zeros for what stays whole: attention, and sums of what is zero in padding."""
        new, k, shape = self.packed.get(old), self.rows.axes(old), static_shape(old)
        readers = [u for u in old.uses() if u.node not in self.padding.plans]
        if new is None or not (readers or old.is_graph_output()):
            return
        assert shape is not None and k is not None
        b = self._builder(node, node)
        flat = new if k == 1 else b.op("Reshape", new, b.ints((self.kept, *shape[k:])))
        made = self._scattered(b, flat, self.positions, self.rows.count, shape[k:])
        replace_value(old, made if k == 1 else b.op("Reshape", made, b.ints(shape)))


def _any(b: Builder, flags: ir.Value) -> ir.Value:
    """Whether a flag of each row is set, [rows, 1]."""
    most = b.op("ReduceMax", b.op("Cast", flags, to=ir.DataType.INT64), b.ints([1]), keepdims=1)
    return b.op("Cast", most, to=ir.DataType.BOOL)
