"""LegalizePrecision: casts around operators that the target cannot run on low values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import Names, TrainingGraph, replace_value
from ortgraph.graph.edit import take_type
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import LOW, sees_low
from ortgraph.ops.targets import TRAINING, low_reason, target_of

_FLOAT = ir.DataType.FLOAT


@dataclasses.dataclass(frozen=True)
class LegalizePrecision(GraphPass):
    """Y = f(X) on low X becomes Y = Cast(f(Cast(X))): f computes in float32, and its results are rounded as before.

    ``lower`` does this by itself; the pass is for what later passes make.

    Refuses when:
        the target's provider takes low values there, or the node is one of ours, which takes them.

    Attributes:
        target: As for ``lower``.
    """

    name: ClassVar[str] = "legalize-precision"
    stages: ClassVar[tuple[str, ...]] = ("lowered",)

    target: str = TRAINING

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        target = target_of(self.target, "legalize-precision: ").text
        legalize(graph, functools.partial(low_reason, target=target), changes, self.name)
        return changes


def legalize(
    graph: TrainingGraph, reason: Callable[[ir.Node], str | None], changes: Changes, by: str, names: Names | None = None
) -> None:
    """Put casts around every node that cannot run on the low types that it sees.

    Args:
        graph: Rewritten in place.
        reason: Why a node cannot; None when it can.
        changes: Counted as ``widened``, with the reasons.
        by: Name of the pass, stamped on new nodes.
        names: Name authority of the graph.
    """
    nodes = [node for node in graph.graph if sees_low(node)]
    for node in nodes:
        why = reason(node)
        if why is None:
            continue
        names = names or Names(graph.graph)
        widen(node, names, by)
        changes.counts["widened"] += 1
        changes.refusals.append(Refusal(node.name or "", f"runs in float32 between casts: {why}"))


def widen(node: ir.Node, names: Names, by: str) -> ir.Node:
    """Replace a node by itself on float32 values, between casts. Returns the new node."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    build = Builder(graph, by, before=node, origins=[node], names=names)
    wide: dict[ir.Value, ir.Value] = {}
    for value in node.inputs:
        if value is not None and value.dtype in LOW and value not in wide:
            wide[value] = build.op("Cast", value, to=_FLOAT, name=f"{value.name}.float")
    inputs = [None if v is None else wide.get(v, v) for v in node.inputs]
    attributes = {k: a.value for k, a in node.attributes.items()}
    made = build.multi(
        node.op_type, *inputs, outputs=len(node.outputs), domain=node.domain, name=node.name or "", **attributes
    )
    new = made[0].producer()
    assert new is not None
    new.metadata_props.update({k: v for k, v in node.metadata_props.items() if k not in new.metadata_props})
    for old, value in zip(node.outputs, made, strict=True):
        if not old.name:
            value.name = ""
            continue
        take_type(value, old)
        if old.dtype not in LOW:
            replace_value(old, value)
            continue
        value.type = ir.TensorType(_FLOAT)
        if old.uses() or old.is_graph_output():
            replace_value(old, build.op("Cast", value, to=old.dtype, name=old.name))
    graph.remove(node, safe=True)
    return new
