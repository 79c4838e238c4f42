"""GroupUpdates: updates that wait for the same norm run in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, Refusal
from ortgraph.manager.rewrite import Match, Sweep, op_key
from ortgraph.ops.builder import Builder
from ortgraph.ops.kernels.table import MULTI
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite

_STATES = {"AdamW": 2, "LAMB": 2, "SGD": 1}  # inputs of states, between the gradient and GradScale


@dataclasses.dataclass(frozen=True)
class GroupUpdates(KernelRewrite):
    """(W', states') = AdamW(rate, step, W, G, states, scale, skip) of several parameters = one MultiAdamW; LAMB, SGD.

    One node for each parameter group: same rate, step, scale, skip and attributes, at most 256 parameters in a node.

    Refuses when:
        the update has no GradScale and no Skip: it follows its own gradient, which then need not live until the last
        gradient is there;
        another node reads what an update makes.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "group-updates"
    roots: ClassVar[frozenset[str]] = frozenset(f"{KERNELS}.{name}" for name in _STATES)

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        groups: dict[tuple[Any, ...], list[ir.Node]] = {}
        sweep = Sweep(self, graph, accept)
        for node in graph.graph:
            if op_key(node) not in self.roots:
                continue
            reason = _refusal(node)
            if reason is not None:
                sweep.take(Refusal(node.name or "", reason))
                continue
            groups.setdefault(_key(node), []).append(node)
        for nodes in groups.values():
            for first in range(0, len(nodes), MULTI):
                together = tuple(nodes[first : first + MULTI])
                if len(together) > 1:
                    outputs = tuple(v for node in together for v in node.outputs)
                    sweep.take(Match(together, outputs, count="groups"))
        return sweep.changes

    def rewrite(self, build: Builder, match: Match) -> tuple[ir.Value, ...]:
        first = match.nodes[0]
        states = _STATES[first.op_type]
        rate, step, *_ = first.inputs
        scale, skip = _guard(first)
        tensors = [v for node in match.nodes for v in node.inputs[2 : 4 + states] if v is not None]
        attributes = {name: a.value for name, a in first.attributes.items()}
        return build.multi(
            f"Multi{first.op_type}", rate, step, scale, skip, *tensors, outputs=len(match.outputs), domain=KERNELS,
            **attributes,
        )  # fmt: skip


def _guard(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """GradScale and Skip."""
    scale, skip = (*node.inputs[4 + _STATES[node.op_type] :], None, None)[:2]
    return scale, skip


def _refusal(node: ir.Node) -> str | None:
    if _guard(node) == (None, None):
        return "the update waits for its own gradient only"
    read = next((v for v in node.outputs if any(True for _ in v.uses())), None)
    return None if read is None else f"%{read.name} is read in the graph"


def _key(node: ir.Node) -> tuple[Any, ...]:
    attributes = tuple(sorted((name, str(a.value)) for name, a in node.attributes.items()))
    values = (node.inputs[0], node.inputs[1], *_guard(node))
    return (node.op_type, *(None if v is None else v.name for v in values), len(node.outputs), attributes)
