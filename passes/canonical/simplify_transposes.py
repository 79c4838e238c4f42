"""SimplifyTransposes: one permutation instead of several."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import stamp
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.passes.canonical.values import BEFORE_PLAN, Edit, behind


@dataclasses.dataclass(frozen=True)
class SimplifyTransposes(GraphPass):
    """Transpose_q(Transpose_p(x)) = Transpose_(p after q)(x), or x when the permutations cancel.

    The second transpose reads x; the first goes when nothing else reads it. Symbolic dimensions do not matter. Counted
    as ``cancelled`` and ``merged``.

    Refuses when:
        - a transpose has no ``perm`` (it reverses) and the rank of its input is not recorded;
        - they cancel, but the result is a graph output and x is a graph input, a constant or another graph output.
    """

    name: ClassVar[str] = "simplify-transposes"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN

    def run(self, graph: TrainingGraph) -> Changes:
        edit = Edit(graph.graph)
        changes = Changes()
        bypassed: list[ir.Node] = []
        for node in graph.graph:
            inner = behind(node, "Transpose")
            if inner is None or not edit.is_read(node.outputs[0]):
                continue
            source, first, second = inner.inputs[0], _perm(inner), _perm(node)
            assert source is not None
            if first is None or second is None:
                changes.refusals.append(Refusal(node.name or "", "a transpose without perm, and its rank is unknown"))
                continue
            perm = tuple(first[axis] for axis in second)
            cancels = perm == tuple(range(len(perm)))
            if cancels and edit.redirect(node.outputs[0], source):
                changes.counts["cancelled"] += 1
                bypassed += [inner, node]
                continue
            if cancels:
                reason = f"graph output %{node.outputs[0].name} equals %{source.name}, which keeps its own name"
                changes.refusals.append(Refusal(node.name or "", reason))
                continue
            node.replace_input_with(0, source)
            node.attributes["perm"] = ir.AttrInt64s("perm", perm)
            stamp(node, self.name)
            changes.counts["merged"] += 1
            bypassed.append(inner)
        edit.prune(bypassed)
        return changes


def _perm(node: ir.Node) -> tuple[int, ...] | None:
    perm = node.attributes.get_ints("perm", None)
    if perm is not None:
        return tuple(perm)
    for value in (node.inputs[0], node.outputs[0]):
        if value is not None and value.shape is not None:
            return tuple(reversed(range(value.shape.rank())))
    return None
