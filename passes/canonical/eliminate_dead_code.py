"""EliminateDeadCode: drop what nothing reads."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import onnx
import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.ops.spec import spec_of
from ortgraph.passes.canonical.values import BEFORE_PLAN, Edit, is_standard


@dataclasses.dataclass(frozen=True)
class EliminateDeadCode(GraphPass):
    """Remove nodes none of whose outputs is read, unused initializers, and unread optional outputs at a node's end.

    Read means: by a node, by a subgraph, or as a graph output. Counted as ``removed`` (nodes) and ``trimmed``
    (outputs). Unused initializers go uncounted: they are no part of the graph's text.

    Refuses when:
        - the node has no outputs, or its operator is unknown and outside the ONNX standard, or is listed with effects
          (an in-place accumulator): it may work through more than its outputs;
        - the output is not optional, or decides how the operator works (BatchNormalization in training mode).
    Graph inputs stay, used or not: they are the signature's.
    """

    name: ClassVar[str] = "eliminate-dead-code"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        g = graph.graph
        edit = Edit(g)
        pure = []
        for node in g:
            reason = _effect(node)
            if reason is None:
                pure.append(node)
            elif not any(edit.is_read(o) for o in node.outputs):
                changes.refusals.append(Refusal(node.name or "", reason))
        changes.counts["removed"] = edit.prune(pure)
        version = g.opset_imports.get("", 0)
        changes.counts["trimmed"] = sum(_trim(node, version, edit) for node in g)
        for name, value in tuple(g.initializers.items()):
            if not (value.is_graph_input() or edit.is_read(value)):
                del g.initializers[name]
        return changes


def _effect(node: ir.Node) -> str | None:
    """Why a node must stay although nothing reads it, or None."""
    if not node.outputs:
        return f"{node.op_type} has no outputs: it works by an effect"
    spec = spec_of(node)
    if spec.effects:
        return f"{node.op_type} writes over an input"
    if not spec.known and node.domain not in ("", "ai.onnx"):
        return f"{node.domain}.{node.op_type} is unknown and may have effects"
    return None


def _trim(node: ir.Node, version: int, edit: Edit) -> int:
    count = len(node.outputs)
    if count < 2 or edit.is_read(node.outputs[-1]):
        return 0
    optional = spec_of(node).optional_outputs or _schema_optional(node.domain, node.op_type, version)
    if is_standard(node, "BatchNormalization") and (version < 14 or node.attributes.get_int("training_mode", 0) != 0):
        return 0
    keep = count
    while keep > 1 and keep - 1 in optional and not edit.is_read(node.outputs[keep - 1]):
        keep -= 1
    node.resize_outputs(keep)
    return count - keep


@functools.lru_cache(maxsize=512)
def _schema_optional(domain: str, op_type: str, version: int) -> tuple[int, ...]:
    """Indices of the optional outputs of a standard operator."""
    if domain not in ("", "ai.onnx") or not onnx.defs.has(op_type):
        return ()
    try:
        schema = onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:  # newer than this opset
        return ()
    option = onnx.defs.OpSchema.FormalParameterOption.Optional
    return tuple(i for i, output in enumerate(schema.outputs) if output.option == option)
