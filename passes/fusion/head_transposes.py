"""AbsorbHeadTransposes: attention reads and writes heads where projections leave and want them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, Refusal
from ortgraph.manager.rewrite import Match, RewritePass, Sweep
from ortgraph.ops.attention import HEADS_FIRST, ROWS_FIRST, layouts
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.fusion.operands import permutation, producer_of, rank

_TURN = (0, 2, 1, 3)
_NAMES = "QKVY"
_INPUTS = {"Attention": (0, 1, 2, None), "AttentionGrad": (1, 2, 3, 4)}  # of Q, K, V and Y
_OUTPUTS = {"Attention": (None, None, None, 0), "AttentionGrad": (0, 1, 2, None)}
_INCOMING = 0  # dY, which lies as Y


@dataclasses.dataclass(frozen=True)
class AbsorbHeadTransposes(RewritePass):
    """Attention(Transpose(Q), ..) = Attention(Q, .., layout), likewise K, V, Y and their gradients, each on its own.

    Projections leave heads as [B, S, H, D]; the transposes to [B, H, S, D] and back move every activation once more. A
    tensor changes its layout in the forward and the backward half at once, where that saves more transposes than it
    costs. Those left over cancel in ``simplify-transposes``.

    Refuses when:
        a tensor has as many readers or makers that want heads first.
    """

    name: ClassVar[str] = "absorb-head-transposes"

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        sweep = Sweep(self, graph, accept)
        for node in tuple(graph.graph):
            if node.graph is None or not _is_attention(node, "Attention") or rank(node.inputs[0]) != 4:
                continue
            gradients = _gradients(node)
            ports = [i for i in range(4) if layouts(node)[i] == HEADS_FIRST and _saves(i, node, gradients) > 0]
            if any(layouts(g) != layouts(node) for g in gradients):
                sweep.take(Refusal(node.name or "", "its gradient has another layout"))
                continue
            if not ports:
                sweep.take(_refusal(node, gradients))
                continue
            words = [ROWS_FIRST if i in ports else word for i, word in enumerate(layouts(node))]
            for half in (node, *gradients):
                facts: dict[str, object] = {"ports": tuple(ports), "words": tuple(words)}
                sweep.take(Match((half,), tuple(half.outputs), {}, facts, "halves"))
        return sweep.changes

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        node, ports, words = match.nodes[-1], match.facts["ports"], match.facts["words"]
        assert isinstance(ports, tuple) and isinstance(words, tuple)
        inputs = list(node.inputs)
        for port in ports:
            at = _INPUTS[node.op_type][port]
            for i in (at, _INCOMING if port == 3 and node.op_type == "AttentionGrad" else None):
                if i is not None:
                    inputs[i] = _turned(build, inputs[i])
        options = {k: a.value for k, a in node.attributes.items()}
        options["layout"] = ROWS_FIRST if set(words) == {ROWS_FIRST} else ",".join(words)
        made = build.multi(node.op_type, *inputs, outputs=len(node.outputs), domain=COMPOSITE, **options)
        turned = {_OUTPUTS[node.op_type][port] for port in ports}
        results = []
        for i, (new, old) in enumerate(zip(made, node.outputs, strict=True)):
            if i in turned and (old.uses() or old.is_graph_output()):
                new = build.op("Transpose", new, perm=list(_TURN))
            new.shape = old.shape if i not in turned or new.producer().op_type == "Transpose" else new.shape  # type: ignore[union-attr]
            results.append(new)
        return results


def _is_attention(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain == COMPOSITE


def _gradients(node: ir.Node) -> list[ir.Node]:
    """The backward halves, which read Y."""
    found = dict.fromkeys(u.node for u in node.outputs[0].uses() if _is_attention(u.node, "AttentionGrad"))
    return [g for g in found if g.inputs[4] is node.outputs[0]]


def _source(value: ir.Value | None) -> ir.Value | None:
    """X of Transpose(X) to heads first."""
    turn = producer_of(value, "Transpose")
    return turn.inputs[0] if turn is not None and permutation(turn) == _TURN else None


def _turned(build: Builder, value: ir.Value | None) -> ir.Value:
    source = _source(value)
    return source if source is not None else build.op("Transpose", value, perm=list(_TURN))


def _saves(port: int, node: ir.Node, gradients: list[ir.Node]) -> int:
    """Transposes saved less transposes added."""
    if port == 3:
        return _saves_output(node.outputs[0], gradients) + sum(_saves_input(g.inputs[_INCOMING]) for g in gradients)
    saved = _saves_input(node.inputs[port])
    return saved + sum(_saves_output(g.outputs[port], []) for g in gradients if port < len(g.outputs))


def _saves_input(value: ir.Value | None) -> int:
    return 1 if _source(value) is not None else -1


def _saves_output(value: ir.Value, gradients: list[ir.Node]) -> int:
    nodes = [u.node for u in value.uses() if u.node not in gradients]
    if value.is_graph_output():
        return -1
    if not nodes:
        return 0
    return 1 if all(n.op_type == "Transpose" and permutation(n) == _TURN for n in nodes) else -1


def _refusal(node: ir.Node, gradients: list[ir.Node]) -> Refusal | None:
    """A reason where some transpose stands beside the node."""
    for port in range(4):
        value = node.inputs[port] if port < 3 else None
        if layouts(node)[port] == HEADS_FIRST and value is not None and _source(value) is not None:
            return Refusal(node.name or "", f"as many of {_NAMES[port]} and its gradient are wanted with heads first")
    return None
