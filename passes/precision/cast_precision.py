"""CastPrecision: matrix products, convolutions and attention in bfloat16 or float16, the rest in float32."""

from __future__ import annotations

import dataclasses
import logging
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import Names, TrainingGraph, replace_value
from ortgraph.graph.edit import stamp, take_type
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import operator
from ortgraph.ops.spec import spec_of
from ortgraph.passes.precision.assign import PRODUCTS, Assignment, low_operands
from ortgraph.passes.precision.policy import FOLLOW, KEEP, MOVE, RUN, Policy, matching
from ortgraph.passes.precision.products import build_product
from ortgraph.runtime.inference_export import keep_evaluation_form

logger = logging.getLogger(__name__)
_FLOAT = ir.DataType.FLOAT


@dataclasses.dataclass(frozen=True)
class CastPrecision(GraphPass):
    """Y = A B in float32 becomes Y = Product(round(A), round(B)), summed in float32; likewise convolution and attention.

    Parameters stay float32; each is cast once, for both halves. Weight gradients are float32. A value is stored in the
    low type where its readers take it so: casts stand above data movement, are shared, and no value is rounded and
    widened again within a half. What is saved for the backward half is saved once, in the low type if its readers
    there agree. Everything else computes in float32 between casts.

    Counts ``products``, ``low`` (other operators in low precision), ``casts``, and ``casts-unshared``: how many casts
    putting them around each operator would take.

    Refuses when:
        - the policy keeps the operator in float32: softmax, loss, exponentials, sums over the whole batch, and what
          ``keep`` names;
        - a constant is beyond the range of the low type, or would be rounded to zero, or an operand may hold such a mask;
        - the product is not of matrices in float32.

    Raises an error when:
        the precision is unknown.

    Attributes:
        precision: ``bf16`` or ``fp16``.
        keep: Operators (``Softmax``), modules or tails of module paths (``layer.3.*``) that stay in float32.
        low: Operators or modules whose results are stored in the low type although the table says float32.
    """

    name: ClassVar[str] = "cast-precision"
    stages: ClassVar[tuple[str, ...]] = ("optimized",)
    sets_stage: ClassVar[str | None] = "cast"

    precision: str = "bf16"
    keep: tuple[str, ...] = ()
    low: tuple[str, ...] = ()

    def run(self, graph: TrainingGraph) -> Changes:
        policy = Policy.of(self.precision, self.keep, self.low)
        keep_evaluation_form(graph)  # why here: evaluation and exported models are float32
        assignment = Assignment(graph, policy)
        changes = Changes(refusals=[*self._unmatched(graph), *_kept(assignment)])
        rewrite = _Rewrite(graph, assignment, changes)
        changes.counts["casts-unshared"] = sum(map(_around, assignment.low_nodes()))
        for node in assignment.nodes:
            rewrite.node(node)
        metadata = {**graph.signature.metadata, "precision": self.precision}
        graph.signature = graph.signature.replace(metadata=metadata)
        return changes

    def _unmatched(self, graph: TrainingGraph) -> list[Refusal]:
        """Overrides that change nothing, which are typing errors, or operators that a fusion has taken in."""
        found = []
        for key, pattern in (*(("keep", p) for p in self.keep), *(("low", p) for p in self.low)):
            if all(matching(node, (pattern,)) is None for node in graph.graph):
                why = f"{key}={pattern} names no operator and no module of the graph"
                logger.warning("cast-precision: %s", why)
                found.append(Refusal("", why))
        return found


def _around(node: ir.Node) -> int:
    """Casts around one operator: of each low operand, and of each low result for each reader."""
    made = [node.outputs[i] for i in spec_of(node).low_outputs if i < len(node.outputs)]
    return len(list(low_operands(node))) + sum(len(value.uses()) + value.is_graph_output() for value in made)


def _kept(assignment: Assignment) -> list[Refusal]:
    """Operators on float32 tensors that stay in float32, and why."""
    found = []
    for node in assignment.nodes:
        treatment = assignment.treatments[node]
        large = any(v is not None and v.dtype == _FLOAT and v.shape != () for v in node.inputs)
        if treatment.kind == KEEP and large:
            found.append(Refusal(node.name or "", f"{operator(node)} stays in float32: {treatment.reason}"))
    return found


class _Rewrite:
    """One rewrite of a graph by an assignment, node by node in order."""

    def __init__(self, graph: TrainingGraph, assignment: Assignment, changes: Changes) -> None:
        self.graph, self.at, self.changes = graph.graph, assignment, changes
        self.low = assignment.policy.dtype
        self._names = Names(graph.graph)
        self._down: dict[tuple[ir.Value, bool], ir.Value] = {}
        self._up: dict[tuple[ir.Value, ir.Node], ir.Value] = {}

    def node(self, node: ir.Node) -> None:
        kind = self.at.treatments[node].kind
        inputs = [self._input(node, i) for i in range(len(node.inputs))]
        if kind == RUN:
            self._run(node, inputs)
            return
        for index, value in enumerate(inputs):
            if value is not node.inputs[index]:
                node.replace_input_with(index, value)
        if kind == MOVE and self.at.facts(node.outputs[0]).low:
            for output in node.outputs:
                _retype(output, self.low)
        elif kind == FOLLOW and (main := self.at.main[node]) is not None and self.at.facts(main).low:
            self._round(node, main)

    def _input(self, node: ir.Node, index: int) -> ir.Value | None:
        """What the node shall read: the value itself, a cast of it, or a cast back."""
        value = node.inputs[index]
        if value is None or value.dtype not in (_FLOAT, self.low):
            return value
        if self.at.takes_low(node, index):
            return value if value.dtype == self.low else self._rounded(value, node)
        if value.dtype == self.low:
            return self._widened(value, node)
        crossing = node in self.at.backward and value in self.at.saved_low
        return self._widened(self._rounded(value, node), node) if crossing else value

    def _rounded(self, value: ir.Value, reader: ir.Node) -> ir.Value:
        """The cast of a float32 value: one for all readers, or one per half where float32 is saved anyway."""
        late = self._late(value, reader)
        found = self._down.get((value, late))
        if found is None and (view := self._view(value)) is not None:
            found = self._low_view(view, reader)
            self._down[value, late] = found
        elif found is None:
            producer = value.producer()
            found = self._cast(value, self.low, reader, producer or reader)
            made = found.producer()
            if producer is not None and not late and reader in self.at.backward and producer not in self.at.backward:
                assert made is not None
                self.graph.remove(made)  # why: float32 need not wait for the backward half
                self.graph.insert_after(producer, made)
            self._down[value, late] = found
        return found

    def _view(self, value: ir.Value) -> ir.Node | None:
        """The node that made the value as a view of another computed one: a cast stands above it, beside what computes."""
        node = value.producer()
        if node is None or self.at.treatments.get(node) is None or self.at.treatments[node].kind != MOVE:
            return None
        source = node.inputs[0]
        viewed = (0, 0) in spec_of(node).alias and source is not None and source.producer() is not None
        return node if viewed and source.dtype == _FLOAT else None  # type: ignore[union-attr]

    def _low_view(self, view: ir.Node, reader: ir.Node) -> ir.Value:
        source = view.inputs[0]
        assert source is not None
        rounded = self._rounded(source, reader)
        build = Builder(self.graph, CastPrecision.name, before=reader, origins=[view], names=self._names)
        attributes = {k: a.value for k, a in view.attributes.items()}
        made = build.op(view.op_type, rounded, *view.inputs[1:], name=f"{view.outputs[0].name}.low", **attributes)
        take_type(made, view.outputs[0])
        _retype(made, self.low)
        return made

    def _late(self, value: ir.Value, reader: ir.Node) -> bool:
        producer = value.producer()
        if reader not in self.at.backward or producer is None or producer in self.at.backward:
            return False
        return value not in self.at.saved_low

    def _widened(self, value: ir.Value, reader: ir.Node) -> ir.Value:
        """Float32 again, for one reader: what it is fused with absorbs the cast."""
        if (value, reader) not in self._up:
            self._up[value, reader] = self._cast(value, _FLOAT, reader, reader)
        return self._up[value, reader]

    def _cast(self, value: ir.Value, to: ir.DataType, before: ir.Node, origin: ir.Node) -> ir.Value:
        build = Builder(self.graph, CastPrecision.name, before=before, origins=[origin], names=self._names)
        made = build.op("Cast", value, to=to, name=f"{value.name}.{'low' if to == self.low else 'float'}")
        made.shape = None if value.shape is None else value.shape.copy()
        self.changes.counts["casts"] += 1
        return made

    def _run(self, node: ir.Node, inputs: list[ir.Value | None]) -> None:
        if node.op_type in PRODUCTS:
            self._product(node, inputs)
            return
        for index, value in enumerate(inputs):
            if value is not node.inputs[index]:
                node.replace_input_with(index, value)
        for index in spec_of(node).low_outputs:
            if index < len(node.outputs):
                _retype(node.outputs[index], self.low)
        stamp(node, CastPrecision.name)
        self.changes.counts["low"] += 1

    def _product(self, node: ir.Node, inputs: list[ir.Value | None]) -> None:
        output = node.outputs[0]
        to = self.low if self.at.facts(output).low else _FLOAT
        build = Builder(self.graph, CastPrecision.name, before=node, origins=[node], names=self._names)
        a, b = inputs[:2]
        assert a is not None and b is not None
        made = build_product(build, node, a, b, self.low, to)
        take_type(made, output)
        _retype(made, to)
        self.at.replaced(output, made)
        replace_value(output, made)
        self.graph.remove(node, safe=True)
        self.changes.counts["products"] += 1

    def _round(self, node: ir.Node, value: ir.Value) -> None:
        """A forced low result: everyone reads the cast."""
        readers = tuple(value.uses())
        made = self._cast(value, self.low, node, node)
        cast = made.producer()
        assert cast is not None
        self.graph.remove(cast)
        self.graph.insert_after(node, cast)
        self.at.replaced(value, made)
        for use in readers:
            use.node.replace_input_with(use.idx, made)


def _retype(value: ir.Value, dtype: ir.DataType) -> None:
    """Give the value a type object of its own: clones of a graph share them, and setting ``dtype`` writes into it."""
    value.type = ir.TensorType(dtype)
