"""Where low precision is: an analysis of one graph under a policy, which changes nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.ops.spec import spec_of
from ortgraph.passes.precision.policy import FOLLOW, KEEP, MOVE, RUN, Policy, Treatment

_UNKNOWN = 64  # a symbolic dimension counts as this many
_FLOAT = ir.DataType.FLOAT


@dataclasses.dataclass(eq=False)
class Facts:
    """What is known about one float32 value.

    Attributes:
        source: Computed from low values only: rounding it loses nothing that its inputs had.
        wanted: A reader takes it in low precision, or makes something from it that is wanted low.
        exact: A reader needs float32: a graph output, an operator that stays in float32.
        wide: A reader computes a large float32 result from it that nobody wants low (a residual sum).
        summed: A reader reduces it; it takes either type.
        unsafe: May hold numbers beyond the low type (a constant mask was put in).
        low: It is stored in the low type from the start.
    """

    source: bool = False
    wanted: bool = False
    exact: bool = False
    wide: bool = False
    summed: bool = False
    unsafe: bool = False
    low: bool = False


class Assignment:
    """Treatments of all nodes and facts of all values of a graph's main body.

    Args:
        graph: Not changed.
        policy: Which operators run low.
    """

    def __init__(self, graph: TrainingGraph, policy: Policy) -> None:
        self.policy = policy
        self.nodes = list(graph.graph)
        self.backward = _backward(graph, self.nodes)
        self.treatments: dict[ir.Node, Treatment] = {node: policy.treatment(node) for node in self.nodes}
        self._facts: dict[ir.Value, Facts] = {}
        # Why here: a rewrite changes the types that these are told from.
        self._moved = {node: moved_inputs(node) for node in self.nodes}
        self.main = {node: main_output(node) for node in self.nodes}
        self._large = {node: main_inputs(node) for node in self.nodes}
        for node in self.nodes:
            self._from_inputs(node)
        for node in reversed(self.nodes):
            for value in node.outputs:
                self._from_readers(value)
        for value in graph.graph.inputs:
            self._from_readers(value)
        for node in self.nodes:
            self._store(node)
        self.saved_low = {v: None for node in self.nodes for v in node.outputs if self._is_saved_low(v)}

    def facts(self, value: ir.Value) -> Facts:
        return self._facts.setdefault(value, Facts())

    def low_nodes(self) -> list[ir.Node]:
        """Nodes that run in the low type."""
        return [node for node in self.nodes if self.treatments[node].kind == RUN]

    # -- which inputs and outputs of a node count ---------------------------------------------------------------

    def takes_low(self, node: ir.Node, index: int) -> bool:
        """Whether input ``index`` is read in the low type."""
        kind = self.treatments[node].kind
        if kind == RUN:
            return index in spec_of(node).low_inputs
        return kind == MOVE and index in self._moved[node] and self.facts(node.outputs[0]).low

    # -- the three sweeps ---------------------------------------------------------------------------------------

    def _from_inputs(self, node: ir.Node) -> None:
        """``source`` and ``unsafe``, in node order."""
        treatment = self.treatments[node]
        unsafe = "is beyond" in treatment.reason
        if treatment.kind in (FOLLOW, MOVE) and spec_of(node).precision != "accumulate":
            unsafe = unsafe or any(self.facts(v).unsafe for v in node.inputs if v is not None and v.dtype == _FLOAT)
        if treatment.kind == RUN and any(self.facts(v).unsafe for v in low_operands(node)):
            treatment = Treatment(KEEP, "an operand may hold a mask beyond the low type's range")
            self.treatments[node] = treatment
        for index, value in enumerate(node.outputs):
            if value.dtype != _FLOAT:
                continue
            facts = self.facts(value)
            facts.unsafe = unsafe
            if unsafe:
                continue
            if treatment.kind == RUN:
                facts.source = index in spec_of(node).low_outputs
            elif treatment.kind == MOVE:
                inputs = [node.inputs[i] for i in self._moved[node]]
                facts.source = bool(inputs) and all(v is not None and self.facts(v).source for v in inputs)
            elif treatment.kind == FOLLOW and value is self.main[node]:
                mains = self._large[node]
                facts.source = treatment.forced or (bool(mains) and all(self.facts(v).source for v in mains))
                facts.wanted = treatment.forced

    def _from_readers(self, value: ir.Value) -> None:
        """``wanted``, ``exact``, ``wide`` and ``summed``, readers first."""
        if value.dtype != _FLOAT:
            return
        facts = self.facts(value)
        facts.exact = value.is_graph_output()
        for use in value.uses():
            treatment = self.treatments.get(use.node)
            if treatment is None:  # a subgraph reads it
                facts.exact = True
            elif treatment.kind == RUN:
                low = use.idx in spec_of(use.node).low_inputs
                facts.wanted |= low
                facts.exact |= not low
            elif treatment.kind == MOVE:
                self._through_movement(facts, use.node, use.idx)
            elif treatment.kind == KEEP:
                facts.exact = True
            else:
                self._through_follower(facts, value, use.node)

    def _through_movement(self, facts: Facts, node: ir.Node, index: int) -> None:
        if index not in self._moved[node]:
            facts.exact = True
            return
        for made in (self.facts(o) for o in node.outputs if o.dtype == _FLOAT):
            facts.wanted |= made.wanted
            facts.exact |= made.exact
            facts.wide |= made.wide
            facts.summed |= made.summed

    def _through_follower(self, facts: Facts, value: ir.Value, node: ir.Node) -> None:
        main = self.main[node]
        if main is None or value not in self._large[node]:
            facts.summed = True
        elif self.facts(main).source and self.facts(main).wanted:
            facts.wanted = True
            facts.summed = True
        else:
            facts.wide = True

    def _store(self, node: ir.Node) -> None:
        """``low``, in node order."""
        treatment = self.treatments[node]
        if treatment.kind == RUN:
            for index, value in enumerate(node.outputs):
                facts = self.facts(value)
                if index in spec_of(node).low_outputs and value.dtype == _FLOAT:
                    fixed = node.op_type not in PRODUCTS  # others have no float32 output on low inputs
                    facts.low = fixed or (facts.wanted and not facts.exact and not facts.wide)
        elif treatment.kind == MOVE and self._moved[node]:
            self._store_moved(node)
        elif treatment.forced and (main := self.main[node]) is not None:
            self.facts(main).low = not self.facts(main).exact

    def _store_moved(self, node: ir.Node) -> None:
        inputs = [v for i in self._moved[node] if (v := node.inputs[i]) is not None]
        outputs = [o for o in node.outputs if o.dtype == _FLOAT]
        if all(self.facts(v).low for v in inputs):
            low = True
        else:
            made = [self.facts(o) for o in outputs]
            only_wanted = all(f.wanted and not (f.exact or f.wide or f.summed) for f in made)
            cheap = sum(map(count, inputs)) <= sum(map(count, outputs)) or all(map(self._low_elsewhere, inputs))
            low = only_wanted and cheap
        for output in outputs:
            self.facts(output).low = low

    def _low_elsewhere(self, value: ir.Value) -> bool:
        """Whether a cast of the value is there anyway."""
        return self.facts(value).low or any(
            (t := self.treatments.get(use.node)) is not None and t.kind == RUN and self.takes_low(use.node, use.idx)
            for use in value.uses()
        )

    # -- what the rewrite asks ----------------------------------------------------------------------------------

    def replaced(self, old: ir.Value, new: ir.Value) -> None:
        """``new`` stands for ``old`` in the rewritten graph."""
        self._facts[new] = self.facts(old)
        if old in self.saved_low:
            self.saved_low[new] = None
        before, after = old.producer(), new.producer()
        if before in self.backward and after is not None:
            self.backward[after] = None

    def _is_saved_low(self, value: ir.Value) -> bool:
        """Whether the backward half reads a float32 value of the forward half in the low type only.

        That is so when each of its readers there takes the low type, or computes from it and values that are low
        something that is wanted low, or stands beside a reader that takes the low type.
        """
        readers = [use for use in value.uses() if use.node in self.backward]
        producer = value.producer()
        if not readers or producer is None or producer in self.backward or self.facts(value).low:
            return False
        taken = any(self.takes_low(use.node, use.idx) for use in readers)
        return not value.is_graph_output() and all(
            self.takes_low(use.node, use.idx) or self._yields(value, use.node, taken) for use in readers
        )

    def _yields(self, value: ir.Value, node: ir.Node, taken: bool) -> bool:
        """Whether a reader takes the value widened again: large values only, statistics of a norm stay exact."""
        if node not in self.treatments or self.treatments[node].kind != FOLLOW or value not in self._large[node]:
            return False
        main = self.main[node]
        return taken or (main is not None and self.facts(main).source and self.facts(main).wanted)


def main_inputs(node: ir.Node) -> list[ir.Value]:
    """The largest float32 inputs."""
    floats = [v for v in node.inputs if v is not None and v.dtype == _FLOAT]
    large = max(map(count, floats), default=0)
    return [v for v in floats if count(v) == large]


def main_output(node: ir.Node) -> ir.Value | None:
    """The output that is as large as what a ``follow`` operator reads; None for reductions."""
    value = node.outputs[0] if node.outputs else None
    large = max((count(v) for v in main_inputs(node)), default=0)
    return value if value is not None and value.dtype == _FLOAT and count(value) >= large > 0 else None


PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "TransposeMatMul"})  # they become Product, which has ``to``


def low_operands(node: ir.Node) -> Iterator[ir.Value]:
    """The inputs of a ``low`` operator that are taken in low precision."""
    for index in spec_of(node).low_inputs:
        if index < len(node.inputs) and (value := node.inputs[index]) is not None:
            yield value


def moved_inputs(node: ir.Node) -> tuple[int, ...]:
    """Inputs whose elements a movement operator passes on; none when they are not float32."""
    floats = tuple(i for i, v in enumerate(node.inputs) if v is not None and v.dtype == _FLOAT)
    return floats if node.op_type == "Concat" else floats[:1]


def count(value: ir.Value) -> int:
    """Elements of a value; an unknown dimension counts as 64, an unknown shape as one element."""
    if value.shape is None:
        return 1
    return math.prod(d if isinstance(d, int) else _UNKNOWN for d in value.shape)


def _backward(graph: TrainingGraph, nodes: list[ir.Node]) -> dict[ir.Node | None, None]:
    """Nodes of the backward half: those that depend on a seed, else those from the recorded cut on."""
    signature = graph.signature
    seeds = {signature.loss_gradient, *signature.tangents.values()} - {None}
    reached = {v for v in graph.graph.inputs if v.name in seeds}
    found: dict[ir.Node | None, None] = {}
    cut = not reached and signature.first_backward is not None
    for node in nodes:
        started = cut and (bool(found) or node.name == signature.first_backward)
        if started or any(v in reached for v in node.inputs if v is not None):
            found[node] = None
            reached.update(node.outputs)
    return found
