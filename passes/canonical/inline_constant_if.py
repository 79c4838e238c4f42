"""InlineConstantIf: an If with a constant condition becomes its branch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import Names, TrainingGraph, replace_value, stamp
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.passes.canonical.values import BEFORE_PLAN, Edit, constant_array, is_standard


@dataclasses.dataclass(frozen=True)
class InlineConstantIf(GraphPass):
    """If(constant): the nodes of the branch that is taken move to the place of the If, under fresh names.

    A branch may hold further constant Ifs. Counted as ``inlined``.

    Refuses when:
        - the condition is computed or a graph input;
        - the branch returns a value of the outer graph by name only, which no ONNX runtime accepts.
    """

    name: ClassVar[str] = "inline-constant-if"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN

    def run(self, graph: TrainingGraph) -> Changes:
        g = graph.graph
        changes = Changes()
        work = [n for n in g if is_standard(n, "If")][::-1]
        if not work:
            return changes
        edit, names = Edit(g), Names(g)
        while work:
            node = work.pop()
            branch = _taken(node)
            if branch is None:
                continue
            if not _is_closed(branch) or any(o.name in edit.pinned for o in node.outputs):
                changes.refusals.append(Refusal(node.name or "", "a branch returns an outer value by name"))
                continue
            moved = _inline(g, node, branch, names)
            edit.remove([node])
            work += [n for n in moved if is_standard(n, "If")][::-1]
            changes.counts["inlined"] += 1
        return changes


def _taken(node: ir.Node) -> ir.Graph | None:
    condition = constant_array(node.inputs[0])
    if condition is None or condition.size != 1:
        return None
    return node.attributes["then_branch" if condition.reshape(()).item() else "else_branch"].as_graph()


def _is_closed(branch: ir.Graph) -> bool:
    """Whether each output of the branch is made in it: by a node, or as an initializer."""
    return all(o.producer() is not None or o.is_initializer() for o in branch.outputs)


def _inline(graph: ir.Graph, node: ir.Node, branch: ir.Graph, names: Names) -> list[ir.Node]:
    results = tuple(branch.outputs)
    branch.outputs.clear()
    for name, value in tuple(branch.initializers.items()):
        del branch.initializers[name]
        value.name = names.fresh(name)
        graph.register_initializer(value)
    moved = list(branch)
    branch.remove(moved)
    for inner in moved:
        inner.name = names.fresh_node(inner.name or inner.op_type.lower())
        for output in inner.outputs:
            if output.name:
                output.name = names.fresh(output.name)
        stamp(inner, InlineConstantIf.name, [node])
    graph.insert_before(node, moved)
    for old, new in zip(node.outputs, results, strict=True):
        replace_value(old, new)
    return moved
