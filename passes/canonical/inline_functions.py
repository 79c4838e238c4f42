"""InlineFunctions: model-local functions become their bodies."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ortgraph.errors import PassError
from ortgraph.graph import TrainingGraph, stamp
from ortgraph.manager.base import Changes, GraphPass
from ortgraph.passes.canonical.values import BEFORE_PLAN


@dataclasses.dataclass(frozen=True)
class InlineFunctions(GraphPass):
    """Calls of model-local functions are replaced by the functions' nodes, nested calls included.

    Uses onnx_ir's inliner. New nodes carry module, source line and phase of the call when all calls agree on them.
    Counted as ``inlined`` (calls of the main graph).

    Raises:
        PassError: The functions call each other in a circle.
    """

    name: ClassVar[str] = "inline-functions"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN

    def run(self, graph: TrainingGraph) -> Changes:
        model = graph.model
        changes = Changes()
        if not model.functions:
            return changes
        calls = [n for n in model.graph.all_nodes() if n.op_identifier() in model.functions]
        old = set(model.graph)
        try:
            InlinePass()(model)
        except ir.passes.PreconditionError as error:
            raise PassError(f"{self.name}: {error}", "remove the circle among the model's functions") from error
        shared = _agreed(calls)
        for node in model.graph:
            if node not in old:
                stamp(node, self.name, [shared] if shared is not None else [])
        changes.counts["inlined"] = len(calls)
        return changes


def _agreed(calls: list[ir.Node]) -> ir.Node | None:
    """A call whose provenance speaks for all calls, or None."""
    if not calls or any(c.metadata_props != calls[0].metadata_props for c in calls):
        return None
    return calls[0]
