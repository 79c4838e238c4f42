"""KernelRewrite: base of the passes that use fused extras of the compiled kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, Refusal
from ortgraph.manager.rewrite import RewritePass, op_key
from ortgraph.ops import kernels


@dataclasses.dataclass(frozen=True)
class KernelRewrite(RewritePass):
    """A rewrite of a lowered graph that does nothing, and says why, where compiled kernels are not to be had.

    The library is built when the first root is met, not before: a graph without candidates needs no compiler.
    """

    stages: ClassVar[tuple[str, ...]] = ("lowered",)

    kernels: bool = True

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        if not any(op_key(node) in self.roots for node in graph.graph):
            return Changes()
        if not self.kernels:
            return Changes(refusals=[Refusal("", "compiled kernels are switched off (kernels=false)")])
        if not kernels.available():
            return Changes(refusals=[Refusal("", f"compiled kernels are not available: {kernels.reason()}")])
        return super().run(graph, accept)


def readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value, each once, in order of use."""
    return list(dict.fromkeys(use.node for use in value.uses()))


def other_reader(value: ir.Value, *allowed: ir.Node) -> str | None:
    """Why a value cannot go away with ``allowed``: it is a graph output, or somebody else reads it."""
    if value.is_graph_output():
        return f"%{value.name} is a graph output"
    node = next((n for n in readers(value) if n not in allowed), None)
    return None if node is None else f"%{value.name} is also read by {node.op_type} {node.name!r}"
