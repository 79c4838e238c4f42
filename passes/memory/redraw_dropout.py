"""RedrawDropout: no dropout mask is kept from the forward to the backward half."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import decimal, given
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.fusion.operands import producer_of, same_shape
from ortgraph.passes.lowering.kernel_rewrite import KernelRewrite

_RATIO = 0.5  # the operators' default


@dataclasses.dataclass(frozen=True)
class RedrawDropout(KernelRewrite):
    """DropoutGrad(dY, Dropout(X, Key, Step).Mask) = Dropout(dY, Key, Step), bit for bit.

    The mask is a function of key, step and node number, so the backward half draws it again and the forward half does
    not write it: no byte is saved. Measured, one thread, microseconds, mask written and read against drawn twice: 2^17
    elements 24 and 28, 2^20 180 and 198, 2^23 3245 and 2574. A mask of bits would cost more than either.

    Refuses when:
        the mask does not come from the Dropout kernel (drawn by standard operators, or by ONNX Runtime's own state);
        the halves have different ratios or shapes.

    Attributes:
        kernels: Whether compiled kernels take part.
    """

    name: ClassVar[str] = "redraw-dropout"
    roots: ClassVar[frozenset[str]] = frozenset({f"{KERNELS}.DropoutGrad"})

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        mask = given(node, 1)
        view = producer_of(mask, "Reshape")
        while view is not None:  # a view keeps the index of every element
            mask = view.inputs[0]
            view = producer_of(mask, "Reshape")
        forward = producer_of(mask, "Dropout", domain=KERNELS)
        if forward is None or mask is not forward.outputs[1]:
            return Refusal(node.name or "", "its mask is not drawn by the Dropout kernel")
        return Match((node,), (node.outputs[0],), facts={"forward": forward}, count="redrawn")

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        (node,), forward = match.nodes, match.facts["forward"]
        assert isinstance(forward, ir.Node)
        if decimal(node, "ratio", _RATIO) != decimal(forward, "ratio", _RATIO):
            return "the halves have different ratios"
        dy, x = node.inputs[0], forward.inputs[0]
        assert dy is not None and x is not None
        sizes = static_shape(dy), static_shape(x)
        counts = [None if shape is None else math.prod(shape) for shape in sizes]
        if not same_shape(dy, x) and (None in counts or counts[0] != counts[1]):
            return "the halves have different shapes"
        return None

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        (node,), forward = match.nodes, match.facts["forward"]
        assert isinstance(forward, ir.Node)
        options = {k: a.value for k, a in forward.attributes.items() if k in ("ratio", "node")}
        made = build.op("Dropout", node.inputs[0], *forward.inputs[1:3], domain=KERNELS, **options)
        made.shape = match.outputs[0].shape
        return [made]
