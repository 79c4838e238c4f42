"""Losses of class indices without a gradient builder, or whose builder drops one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ortgraph.capture.legalize_layout import optional
from ortgraph.ops.builder import Builder


def _nll_loss(b: Builder, node: ir.Node) -> list[ir.Value]:
    return [_negative_log_likelihood(b, node, node.inputs[0])]


def _negative_log_likelihood(b: Builder, node: ir.Node, x: ir.Value | None) -> ir.Value:
    """-sum w[t] X[t] / sum w[t], targets equal to ignore_index left out. ``node`` has targets, weights, attributes."""
    target, weight = node.inputs[1], optional(node, 2)
    assert x is not None and target is not None
    reduction = node.attributes.get_string("reduction", "mean")
    ignore = node.attributes.get_int("ignore_index", None)
    used, counted = target, None
    if ignore is not None:
        ignored = b.op("Equal", target, b.scalar(ignore, target))
        used = b.op("Where", ignored, b.scalar(0, target), target)
        counted = b.op("Cast", b.op("Not", ignored), to=x.dtype)
    if weight is not None:
        per_row = b.op("Gather", weight, used, axis=0)
        counted = per_row if counted is None else b.op("Mul", counted, per_row)
    picked = b.op("GatherElements", x, b.op("Unsqueeze", used, b.ints([1])), axis=1)
    loss = b.op("Neg", b.op("Squeeze", picked, b.ints([1])))
    if counted is not None:
        loss = b.op("Mul", loss, counted)
    if reduction == "none":
        return loss
    if reduction == "mean" and counted is None:
        return b.op("ReduceMean", loss, keepdims=0)
    total = b.op("ReduceSum", loss, keepdims=0)
    return total if reduction == "sum" else b.op("Div", total, b.op("ReduceSum", counted, keepdims=0))


def _cross_entropy(b: Builder, node: ir.Node) -> list[ir.Value] | None:
    """Log-probabilities that something reads: the builder would drop the gradient that comes from there."""
    if len(node.outputs) < 2 or not node.outputs[1].uses():
        return None
    log_prob = b.op("LogSoftmax", node.inputs[0], axis=1)
    return [_negative_log_likelihood(b, node, log_prob), log_prob]


LOSSES: dict[str, Callable[[Builder, ir.Node], Sequence[ir.Value] | None]] = {
    "NegativeLogLikelihoodLoss": _nll_loss,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
}
