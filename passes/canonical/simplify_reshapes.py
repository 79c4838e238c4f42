"""SimplifyReshapes: one reshape instead of a chain."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortgraph.graph import Names, TrainingGraph
from ortgraph.graph.edit import stamp
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.passes.canonical.shape_values import target_of
from ortgraph.passes.canonical.values import BEFORE_PLAN, Edit, dims, is_standard, same_shape

_KINDS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")


def reshape_target(source: ir.Value, output: ir.Value) -> tuple[int, ...] | None:
    """A constant Reshape shape that turns ``source`` into ``output``, from the recorded shapes; None if there is none.

    A single symbolic dimension is written as -1; of several, those in their old place as 0 (copy) and at most one
    other as -1. A dimension that is 0 would be read as "copy": such shapes have no target.
    """
    wanted = dims(output)
    if wanted is None or 0 in wanted:
        return None
    return target_of(wanted, dims(source) or ())


@dataclasses.dataclass(frozen=True)
class SimplifyReshapes(GraphPass):
    """Chains of Reshape, Squeeze, Unsqueeze and Flatten become one Reshape with a constant shape, or vanish.

    The last node of a chain reads the chain's source; what nothing else reads goes. Counted as ``cancelled`` (the last
    shape is the source's) and ``merged``.

    Refuses when:
        - the shape of the result has an unknown dimension, a 0, or several symbolic dimensions that moved: no constant
          shape says it;
        - the opset is below 5, where Reshape takes its shape as an attribute;
        - the chain cancels, but its end is a graph output and its source a graph input, a constant or another output.
    """

    name: ClassVar[str] = "simplify-reshapes"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN

    def run(self, graph: TrainingGraph) -> Changes:
        run = _Run(graph.graph)
        if graph.graph.opset_imports.get("", 18) < 5:
            return run.changes
        for node in graph.graph:
            inner = _inner(node)
            if inner is not None and run.edit.is_read(node.outputs[0]):
                run.simplify(node, inner)
        run.edit.prune(run.bypassed)
        return run.changes


class _Run:
    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.edit = Edit(graph)
        self.changes = Changes()
        self.bypassed: list[ir.Node] = []
        self.shapes: dict[tuple[int, ...], ir.Value] = {}
        self.names: Names | None = None

    def simplify(self, node: ir.Node, inner: ir.Node) -> None:
        source, output = inner.inputs[0], node.outputs[0]
        assert source is not None
        self.bypassed.append(inner)
        if same_shape(source, output):
            if self.edit.redirect(output, source):
                self.bypassed.append(node)
                self.changes.counts["cancelled"] += 1
                return
            self._refuse(node, f"graph output %{output.name} equals %{source.name}, which keeps its own name")
            return
        target = reshape_target(source, output)
        if target is None:
            self._refuse(node, f"no constant shape describes %{output.name}")
            return
        node.op_type = "Reshape"
        node.attributes.clear()
        node.resize_inputs(2)
        node.replace_input_with(0, source)
        node.replace_input_with(1, self._shape(target))
        stamp(node, SimplifyReshapes.name)
        self.changes.counts["merged"] += 1

    def _refuse(self, node: ir.Node, reason: str) -> None:
        self.changes.refusals.append(Refusal(node.name or "", reason))

    def _shape(self, target: tuple[int, ...]) -> ir.Value:
        if target not in self.shapes:
            self.names = self.names or Names(self.graph)
            self.shapes[target] = self.edit.constant(np.array(target, np.int64), self.names.fresh("shape"))
        return self.shapes[target]


def _inner(node: ir.Node) -> ir.Node | None:
    """The reshape that feeds this one."""
    if not is_standard(node, *_KINDS) or not node.inputs or node.inputs[0] is None:
        return None
    inner = node.inputs[0].producer()
    if inner is None or inner.graph is not node.graph or not is_standard(inner, *_KINDS):
        return None
    return inner if inner.inputs and inner.inputs[0] is not None else None
