"""Which nodes of a graph can run without the rows of padding, and what that rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.manager.rewrite import op_key
from ortgraph.ops.attention import is_rows_first
from ortgraph.ops.leading_rows import LeadingRows, kept_zero, read_by_rows, summed_by_rows
from ortgraph.ops.loss import DEFAULT_IGNORE
from ortgraph.ops.rows import Rows, pads_rows, reads_rows
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import COMPOSITE, spec_of
from ortgraph.passes.memory.label_source import label_source, needed_for
from ortgraph.passes.memory.labelled_head import Plan
from ortgraph.passes.memory.loss_head import NotAHead
from ortgraph.passes.memory.mask_bits import MaskBits, hides_padding, read_mask, zero_where_off

_ATTENTION, _ATTENTION_GRADIENT = f"{COMPOSITE}.Attention", f"{COMPOSITE}.AttentionGrad"
_LOSS, _LOSS_GRADIENT = f"{COMPOSITE}.CrossEntropy", f"{COMPOSITE}.CrossEntropyGrad"
_DROPOUT, _NORM_GRADIENT = f"{COMPOSITE}.Dropout", f"{COMPOSITE}.LayerNormGrad"
_TURN = (0, 2, 1, 3)
_QUERY, _RESULT = 0, 3
_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Cast"})
PRODUCTS = frozenset({"MatMul", "Gemm", "Product"})


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of a loss over all rows: those that are not ``ignore`` are read, whatever the mask says."""

    value: ir.Value
    source: ir.Value
    ignore: int
    nodes: tuple[ir.Node, ...]


@dataclasses.dataclass
class Padding:
    """What can be left out, for a mask [batch, length].

    Kept are the rows where the mask is 1, and whole sequences in which another row is read: by a label that counts, or
    at a fixed position (the first token). Everything else is zero in the backward half or of no effect.

    Attributes:
        mask: The data input.
        batch, length: Its shape.
        empty: Sequences that are padding entirely are kept whole, too: other queries see them.
        positions: Positions that are read in every sequence.
        labels: Labels of losses over all rows, by loss.
        plans: Nodes that run over packed rows.
        picks: Slices that read a row of every sequence.
        pads: Their gradients.
    """

    mask: ir.Value
    batch: int
    length: int
    empty: bool = False
    positions: set[int] = dataclasses.field(default_factory=set)
    labels: dict[ir.Node, Labels] = dataclasses.field(default_factory=dict)
    plans: dict[ir.Node, Plan] = dataclasses.field(default_factory=dict)
    picks: dict[ir.Node, Rows] = dataclasses.field(default_factory=dict)
    pads: dict[ir.Value, Rows] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> LeadingRows:
        return LeadingRows(self.batch * self.length)

    @property
    def products(self) -> int:
        return sum(1 for n in self.plans if n.op_type in PRODUCTS)

    def along(self, value: ir.Value | None, of: ir.Value) -> bool:
        """Whether a value holds one row per position, which all sequences of ``of``, [batch, length, ...], share."""
        shape, out = (static_shape(v) if v is not None else None for v in (value, of))
        if shape is None or out is None or out[:2] != (self.batch, self.length) or len(out) < 3:
            return False
        return ((1,) * (len(out) - len(shape)) + shape)[:2] == (1, self.length)

    def is_turned(self, value: ir.Value | None) -> bool:
        """Whether a value may lie as [batch, heads, length, width]."""
        shape = static_shape(value) if value is not None else None
        return shape is not None and len(shape) == 4 and (shape[0], shape[2]) == (self.batch, self.length)

    def is_plain(self, value: ir.Value | None) -> bool:
        """Whether a value lies as [batch, length, ...]."""
        shape = static_shape(value) if value is not None else None
        return shape is not None and shape[:2] == (self.batch, self.length)


def find_padding(graph: TrainingGraph, name: str = "") -> Padding:
    """The plan for the data input ``name``, or for the one that most attentions are masked by.

    Raises:
        NotAHead: With the reason why nothing can be left out.
    """
    signature = graph.signature
    if signature.loss_gradient is None or signature.tangents:
        raise NotAHead("the backward half does not start from the loss alone")
    found: list[tuple[ir.Value, dict[ir.Value, MaskBits], _Masked]] = []
    for value in graph.graph.inputs:
        if value.name not in signature.inputs or (name and value.name != name) or not _may_mask(value):
            continue
        bits = read_mask(graph, value)
        masked = _Masked(graph, bits, value)
        if len(masked):
            found.append((value, bits, masked))
    if not found:
        who = f"%{name}" if name else "an integer input [batch, sequence]"
        raise NotAHead(f"no attention is masked by {who} in a way that gives keys of padding probability 0")
    return _Search(graph, *max(found, key=lambda f: len(f[2]))).run()


def _may_mask(value: ir.Value) -> bool:
    shape = static_shape(value)
    kinds = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
    return value.dtype in kinds and shape is not None and len(shape) == 2


class _Masked:
    """Attentions, and gradients of theirs, whose keys of padding are hidden: over the sequences of the mask themselves
    (``own``), or of other queries over them (``other``)."""

    def __init__(self, graph: TrainingGraph, bits: Mapping[ir.Value, MaskBits], mask: ir.Value) -> None:
        self.own: set[ir.Node] = set()
        self.other: set[ir.Node] = set()
        shape = static_shape(mask)
        assert shape is not None
        for node in graph.graph:
            first = {_ATTENTION: 0, _ATTENTION_GRADIENT: 1}.get(op_key(node))
            bias = None if first is None else given(node, 3 if first == 0 else 6)
            if first is None or bias is None or bias not in bits:
                continue
            q, k, v = (_sequences(node, node.inputs[first + i], i) for i in range(3))
            if q is None or (k, v) != (shape, shape) or q[0] != shape[0]:
                continue
            own = q == shape
            if hides_padding(bits[bias], shape[0], shape[1], queries=None if own else q[1]):
                (self.own if own else self.other).add(node)

    def __len__(self) -> int:
        return len(self.own) + len(self.other)


def _sequences(node: ir.Node, value: ir.Value | None, tensor: int) -> tuple[int, int] | None:
    """(batch, length) of Q, K or V."""
    shape = static_shape(value) if value is not None else None
    if shape is None or len(shape) != 4:
        return None
    return shape[0], shape[1 if is_rows_first(node, tensor) else 2]


class _Search:
    """Zero rows flow down, demand flows up, as in ``select-labelled-rows``; attention passes both on."""

    def __init__(
        self, graph: TrainingGraph, mask: ir.Value, bits: Mapping[ir.Value, MaskBits], masked: _Masked
    ) -> None:
        shape = static_shape(mask)
        assert shape is not None
        self.graph, self.bits, self.own, self.other = graph, bits, masked.own, masked.other
        self.found = Padding(mask, shape[0], shape[1], bool(masked.other))
        self.rows = self.found.rows
        self.zero: set[ir.Value] = set()  # rows of padding are zero
        self.turned: set[ir.Value] = set()  # the same for [batch, heads, length, width]
        self.whole: set[ir.Value] = set()  # rows of padding are read
        self.reader: ir.Node | None = None  # the first node of the backward search that reads rows of padding

    def run(self) -> Padding:
        nodes = list(self.graph.graph)
        self._labels(nodes)
        self.zero.update(v for v, b in self.bits.items() if self._is_zero(v, b))
        for node in nodes:
            self._zeros(node)
        aside = {n for labels in self.found.labels.values() for n in labels.nodes}
        aside |= {v.producer() for v in self.bits if v.producer() is not None}  # type: ignore[misc]
        for node in reversed(nodes):
            if node not in aside:
                self._demand(node)
        if not self.found.products:
            by = "" if self.reader is None else f": they are read by {self.reader.op_type} {self.reader.name!r}"
            raise NotAHead(f"no matrix product can leave out rows of padding{by}")
        return self.found

    def _is_zero(self, value: ir.Value, bits: MaskBits) -> bool:
        plain = self.rows.axes(value) is not None and value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        return plain and zero_where_off(bits, self.rows.count)

    def _labels(self, nodes: list[ir.Node]) -> None:
        """Losses over all rows of which the labels are a data input in the order of the rows."""
        for node in nodes:
            shape = static_shape(node.inputs[0]) if op_key(node) == _LOSS and node.inputs[0] is not None else None
            if shape is None or len(shape) != 2 or shape[0] != self.rows.count or node.inputs[1] is None:
                continue
            ignore = int(attribute(node, "ignore_index", DEFAULT_IGNORE))
            if attribute(node, "reduction", "mean") in ("none", b"none"):
                continue
            try:
                source = label_source(node.inputs[1], ignore, self.graph)
                behind = needed_for(node.inputs[1])
            except NotAHead:
                continue
            if static_shape(source) in (static_shape(self.found.mask), (self.rows.count,)) and all(
                n.op_type in _VIEWS for n in behind
            ):
                self.found.labels[node] = Labels(node.inputs[1], source, ignore, tuple(behind))

    def _loss_of(self, node: ir.Node) -> ir.Node | None:
        """The loss of which a node is the gradient, by the same labels."""
        log_prob = given(node, 1) if op_key(node) == _LOSS_GRADIENT else None
        loss = log_prob.producer() if log_prob is not None else None
        if loss not in self.found.labels or log_prob is not loss.outputs[1] or node.inputs[2] is not loss.inputs[1]:
            return None
        same = ("reduction", "mean"), ("ignore_index", DEFAULT_IGNORE)
        return loss if all(attribute(node, k, d) == attribute(loss, k, d) for k, d in same) else None

    def _picked(self, rows: Rows | None, value: ir.Value | None) -> bool:
        """Whether rows are a few positions of every sequence of a value."""
        return (
            rows is not None and rows.n == self.found.length and 2 * rows.length <= rows.n and self._holds(rows, value)
        )

    def _holds(self, rows: Rows, value: ir.Value | None) -> bool:
        return self.found.is_plain(value) and (rows.outer, rows.swapped) == (self.found.batch, False)

    # --- zero rows -----------------------------------------------------------------------------------------------

    def _zeros(self, node: ir.Node) -> None:
        if not node.outputs or node.outputs[0] in self.bits:
            return
        out, key = node.outputs[0], op_key(node)
        if self._loss_of(node) is not None:
            self.zero.add(out)
        elif key == "Pad":
            self._pad(node)
        elif key == "Transpose":
            self._transpose(node)
        elif key == _ATTENTION_GRADIENT and (node in self.own or node in self.other):
            source = self.zero if is_rows_first(node, _RESULT) else self.turned
            for i, gradient in enumerate(node.outputs):
                # Gradients of keys and values are zero where nothing sees them, that of a query where its result's is.
                if node.inputs[0] in source if node in self.own else i > 0:
                    (self.zero if is_rows_first(node, i) else self.turned).add(gradient)
        elif kept_zero(node, self.zero.__contains__, self.rows):
            self.zero.add(out)

    def _pad(self, node: ir.Node) -> None:
        rows, out = pads_rows(node), node.outputs[0]
        if rows is None:
            return
        if self._picked(rows, out):
            self.zero.add(out)
            self.found.pads[out] = rows
        elif self._heads(rows, out):
            self.turned.add(out)
        else:
            return
        self.found.positions.update(range(rows.start, rows.start + rows.length))

    def _heads(self, rows: Rows, value: ir.Value) -> bool:
        """The same for [batch, heads, length, width]."""
        shape = static_shape(value)
        if shape is None or not self.found.is_turned(value) or rows.swapped or 2 * rows.length > rows.n:
            return False
        return (rows.outer, rows.n) == (shape[0] * shape[1], self.found.length)

    def _transpose(self, node: ir.Node) -> None:
        if tuple(attribute(node, "perm", ())) != _TURN:
            return
        value, out = node.inputs[0], node.outputs[0]
        if value in self.zero and self.found.is_plain(value):
            self.turned.add(out)
        if value in self.turned:
            self.zero.add(out)

    # --- demand --------------------------------------------------------------------------------------------------

    def _demand(self, node: ir.Node) -> None:
        """Note what a node reads whole, and its plan where it can run over packed rows."""
        by_rows = self._bridged(node)
        if by_rows is None:
            plan = self._plan(node)
            if plan is not None:
                self.found.plans[node] = plan
            by_rows = plan.inputs if plan is not None else frozenset()
        for i, value in enumerate(node.inputs):
            if value is None or i in by_rows:
                continue
            whole = self.rows.axes(value) is not None and value not in self.zero
            if whole and self.reader is None and value.producer() is not None:
                self.reader = node
            self.whole.add(value)
        self.whole.update(set(values_read(node)) - set(node.inputs))

    def _unread(self, values: Iterable[ir.Value]) -> bool:
        """Whether nobody reads rows of padding of values."""
        return not any(v in self.whole or v.is_graph_output() for v in values)

    def _bridged(self, node: ir.Node) -> frozenset[int] | None:
        """Inputs of which rows of padding are not read, of a node that itself stays whole; None for other nodes."""
        key = op_key(node)
        if node in self.other:
            return frozenset({1, 2} if key == _ATTENTION else {2, 3})
        if node in self.own and key == _ATTENTION:
            return frozenset({0, 1, 2}) if self._unread(node.outputs) else None
        if node in self.own and node.outputs[0] in self.zero | self.turned:
            return frozenset({1, 2, 3, 4, 5})
        if key == "Transpose" and tuple(attribute(node, "perm", ())) == _TURN and self._unread(node.outputs):
            maker = node.inputs[0].producer() if node.inputs[0] is not None else None
            result = maker in self.own and not is_rows_first(maker, _RESULT) and node.inputs[0] is maker.outputs[0]
            return frozenset({0}) if result or self._turns_for_attention(node) else None
        rows = reads_rows(node)
        if rows is not None and self._picked(rows, node.inputs[0]):
            self.found.picks[node] = rows
            self.found.positions.update(range(rows.start, rows.start + rows.length))
            return frozenset({0})
        return None

    def _turns_for_attention(self, node: ir.Node) -> bool:
        """Whether [batch, length, heads, width] is turned for attention alone."""
        if not self.found.is_plain(node.inputs[0]) or not self.found.is_turned(node.outputs[0]):
            return False
        return all(u.node in self.own or u.node in self.other for u in node.outputs[0].uses())

    def _plan(self, node: ir.Node) -> Plan | None:
        if not node.outputs or node.outputs[0] in self.found.pads or node in self.own or node in self.other:
            return None
        if node in self.found.labels:
            log_prob = node.outputs[1:2]
            return Plan(frozenset({0, 1}), 0) if self._unread(log_prob) else None
        if self._loss_of(node) is not None:
            return Plan(frozenset({1, 2}), 1, zero=True)
        sums = op_key(node) == _NORM_GRADIENT
        if node.outputs[0] in self.zero:
            inputs = self._read(node) if sums or self._unread(node.outputs[1:]) else None
            return None if inputs is None else Plan(inputs, 1 if sums else len(node.outputs), zero=True)
        summed = summed_by_rows(node, self.zero.__contains__, self.rows)
        if summed is not None:
            return Plan(summed, 0)
        if sums or not self._unread(node.outputs):
            return None
        if any(self.rows.axes(o) is None for o in node.outputs if o.name and o.uses()):
            return None
        inputs = self._read(node)
        return None if not inputs else Plan(inputs, len(node.outputs))

    def _read(self, node: ir.Node) -> frozenset[int] | None:
        """The inputs that are read row by row; None when rows are joined."""
        key, out = op_key(node), node.outputs[0]
        if key == _DROPOUT:
            return frozenset({0}) if self.rows.axes(node.inputs[0]) is not None else None
        if key == "Gather":
            index, table = (static_shape(v) if v is not None else None for v in node.inputs)
            ids = index in ((self.found.batch, self.found.length), (self.rows.count,)) and table is not None
            return frozenset({1}) if ids and attribute(node, "axis", 0) == 0 else None
        found = read_by_rows(node, self.rows)
        if found is not None or not spec_of(node).elementwise or "node" in node.attributes:
            return found
        along = {i for i, v in enumerate(node.inputs) if self.found.along(v, out)}
        others = [v for i, v in enumerate(node.inputs) if v is not None and i not in along]
        plain = {i for i, v in enumerate(node.inputs) if i not in along and self.found.is_plain(v)}
        alike = all(_trailing(v, out) or self.found.is_plain(v) for v in others)
        return frozenset(along | plain) if along and plain and alike else None


def _trailing(value: ir.Value, out: ir.Value) -> bool:
    """Whether a value is broadcast along batch and length."""
    shape, full = static_shape(value), static_shape(out)
    return shape is not None and full is not None and ((1,) * (len(full) - len(shape)) + shape)[:2] == (1, 1)
