"""FuseSoftmax: softmax, log-softmax and their gradients from any decomposition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, Refusal
from ortgraph.manager.rewrite import Match, RewritePass, Sweep
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.fusion.operands import FLOATS, producer_of
from ortgraph.passes.fusion.row_region import FULL, NEAR, TOLERANCE, RowRegion, difference, is_reduction

_ROOTS = frozenset({"Add", "Div", "Log", "Mul", "Sub"})


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    z = x - x.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def _softmax_grad(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    return y * (dy - (dy * y).sum(1, keepdims=True))


def _log_softmax_grad(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    return dy - np.exp(y) * dy.sum(1, keepdims=True)


_FORWARD = {"Softmax": _softmax, "LogSoftmax": _log_softmax}
_GRADIENT = {"Softmax": _softmax_grad, "LogSoftmax": _log_softmax_grad}


@dataclasses.dataclass(frozen=True)
class FuseSoftmax(RewritePass):
    """exp(x - max) / sum = Softmax(x); x - max - log(sum(exp)) = LogSoftmax(x); Y (dY - sum(Y dY)) = SoftmaxGrad.

    Recognised by value (row_region.py). The gradients are found from dY and the result Y of a Softmax or LogSoftmax:
    a forward chain is fused first. A chain that does not subtract the maximum is the same function.

    Refuses when:
        the numbers differ by more than 1e-6;
        the sum runs over several axes;
        an inner value of the forward chain is a graph output or has another reader;
        the element type is neither float32 nor float64.
    """

    name: ClassVar[str] = "fuse-softmax"

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        if not any(is_reduction(n) for n in graph.graph):
            return Changes()
        sweep = Sweep(self, graph, accept)
        for look in (_forward, _gradient):
            for node in tuple(graph.graph)[::-1]:
                if node.graph is not None and _is_root(node):
                    sweep.take(look(node, self._inner_reason), at=node)
        return sweep.changes

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        op_type, axis, sources = (match.facts[k] for k in ("op_type", "axis", "sources"))
        assert isinstance(op_type, str) and isinstance(sources, tuple)
        domain = COMPOSITE if op_type.endswith("Grad") else ""
        made = build.op(op_type, *sources, domain=domain, axis=axis)
        made.shape = match.outputs[0].shape
        return [made]


def _is_root(node: ir.Node) -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type in _ROOTS and node.outputs[0].dtype in FLOATS


def _forward(node: ir.Node, inner_reason: Callable[[Match], str | None]) -> Match | Refusal | None:
    """The deepest cut whose inner values nobody else reads: softmax(x - max) is softmax(x)."""
    region = RowRegion(node.outputs[0])
    if not region.nodes or not any(n.op_type in ("Exp", "ReduceLogSumExp") for n in region.nodes):
        return None
    near: tuple[float, str] = (NEAR, "")
    best: Match | Refusal | None = None
    for cut in region.cuts():
        if len(cut) != 1:
            continue
        x = 3.0 * np.random.default_rng(7).standard_normal((6, region.width))
        got = region.evaluate(region.root, {cut[0]: x})
        for op_type, function in _FORWARD.items():
            off = difference(got, function(x))
            if off <= TOLERANCE:
                found = _found(region, cut, op_type)
                reason = inner_reason(found) if isinstance(found, Match) else found.reason
                best = found if reason is None else best or Refusal(node.name or "", reason)
            near = min(near, (off, f"differs from {op_type} of %{cut[0].name} by {off:.1e}"))
    if best is not None:
        return best
    return Refusal(node.name or "", near[1]) if near[1] else None


def _gradient(node: ir.Node, inner_reason: Callable[[Match], str | None]) -> Match | Refusal | None:
    region = RowRegion(node.outputs[0])
    if not region.nodes:
        return None
    leaves = dict.fromkeys(v for n in region.nodes for v in region.operands(n) if v not in region.order)
    near: tuple[float, str] = (NEAR, "")
    for y in leaves:
        maker = producer_of(y, *_GRADIENT)
        if maker is None or region.kind(y) != FULL:
            continue
        pinned = RowRegion(region.root, [y], region.axes, region)
        for cut in pinned.cuts():
            if not set(cut[1:]) <= {y}:
                continue
            dy, x = (3.0 * np.random.default_rng(i).standard_normal((6, pinned.width)) for i in (11, 13))
            result = _FORWARD[maker.op_type](x)
            got = pinned.evaluate(pinned.root, {cut[0]: dy, y: result})
            off = difference(got, _GRADIENT[maker.op_type](dy, result))
            if off <= TOLERANCE:
                return _found(pinned, (cut[0], y), f"{maker.op_type}Grad")
            near = min(near, (off, f"differs from {maker.op_type}Grad of %{cut[0].name} by {off:.1e}"))
    return Refusal(node.name or "", near[1]) if near[1] else None


def _found(region: RowRegion, sources: tuple[ir.Value, ...], op_type: str) -> Match | Refusal:
    nodes, axes = region.inside(sources), region.axes
    root = nodes[-1]
    assert axes is not None
    if len(axes) != 1:
        return Refusal(root.name or "", f"{op_type} over several axes {list(axes)}")
    facts = {"op_type": op_type, "axis": axes[0], "sources": sources}
    return Match(nodes, (region.root,), {}, facts, op_type.lower())
