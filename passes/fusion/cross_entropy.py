"""FuseCrossEntropy: log-softmax and negative log-likelihood as one operator, in both halves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, Refusal
from ortgraph.manager.rewrite import Match, RewritePass, op_key
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.fusion.operands import producer_of, rank

_IGNORE = -100


@dataclasses.dataclass(frozen=True)
class FuseCrossEntropy(RewritePass):
    """NllLoss(LogSoftmax(X), T) = CrossEntropy(X, T); LogSoftmaxGrad(NllLossGrad(dL, P, T), P) = CrossEntropyGrad.

    Also from the standard NegativeLogLikelihoodLoss. The log-probabilities stay available as an output, since the
    gradient reads them.

    Refuses when:
        the log-softmax runs along another axis than the classes (1);
        the gradient of the log-probabilities is read elsewhere or is a graph output;
        the two halves of the gradient read different log-probabilities.
    """

    name: ClassVar[str] = "fuse-cross-entropy"
    roots: ClassVar[frozenset[str]] = frozenset({
        "NegativeLogLikelihoodLoss", f"{COMPOSITE}.NllLoss", f"{COMPOSITE}.LogSoftmaxGrad",
    })  # fmt: skip

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        changes = super().run(graph, accept)
        if changes.counts:
            graph.graph.sort()  # log-probabilities may be read between their old place and that of the loss
        return changes

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        if op_key(node) == f"{COMPOSITE}.LogSoftmaxGrad":
            return self._gradient(node)
        log_prob, target, weight = node.inputs[0], node.inputs[1], given(node, 2)
        softmax = producer_of(log_prob, "LogSoftmax")
        if softmax is None or log_prob is None:
            return None
        reason = _wrong_axis(softmax)
        if reason is not None:
            return Refusal(node.name or "", reason)
        outputs = (node.outputs[0], log_prob, *node.outputs[1:])
        values = {"logits": softmax.inputs[0], "target": target, "weight": weight}
        return Match((softmax, node), outputs, values, count="loss")

    def _gradient(self, node: ir.Node) -> Match | Refusal | None:
        inner = producer_of(node.inputs[0], "NllLossGrad", domain=COMPOSITE)
        if inner is None:
            return None
        reason = _wrong_axis(node)
        if reason is None and inner.inputs[1] is not node.inputs[1]:
            reason = "its halves read different log-probabilities"
        if reason is not None:
            return Refusal(node.name or "", reason)
        return Match((inner, node), (node.outputs[0],), count="gradient")

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        loss = match.nodes[1] if match.count == "loss" else match.nodes[0]
        options = {
            "reduction": attribute(loss, "reduction", "mean"),
            "ignore_index": attribute(loss, "ignore_index", _IGNORE),
        }
        if match.count == "gradient":
            return [build.op("CrossEntropyGrad", *loss.inputs, domain=COMPOSITE, **options)]
        inputs = [match.values[k] for k in ("logits", "target", "weight")]
        made = build.multi("CrossEntropy", *inputs, outputs=3, domain=COMPOSITE, **options)
        for new, old in zip(made, match.outputs, strict=False):
            new.shape = old.shape if old.shape is not None else new.shape
        return made[: len(match.outputs)]


def _wrong_axis(node: ir.Node) -> str | None:
    axis, n = attribute(node, "axis", -1), rank(node.inputs[0])
    if n is None:
        return "the rank of the log-probabilities is not known"
    return None if axis % n == 1 else f"{node.op_type} runs along axis {axis}, the classes are axis 1"
