"""Operator table: losses over class indices and their gradients."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import (
    Types,
    attribute,
    element_count,
    elements_flops,
    given,
    operand,
    operands,
    retyped,
    shape_of,
    typed,
    wanted,
    zeros_like,
)
from ortgraph.ops.spec import COMPOSITE, OpSpec, register

DEFAULT_IGNORE = -100  # PyTorch's


def _options(node: ir.Node) -> tuple[str, int | None]:
    return attribute(node, "reduction", "mean"), attribute(node, "ignore_index", DEFAULT_IGNORE)


def _loss_shape(node: ir.Node, target: ir.Value | None):
    return shape_of(target) if _options(node)[0] == "none" else ()


def _nll_types(node: ir.Node) -> Types:
    score = given(node, 0)
    return [retyped(score, _loss_shape(node, given(node, 1))), retyped(score, ())][: len(node.outputs)]


def _cross_entropy_types(node: ir.Node) -> Types:
    score = given(node, 0)
    loss = retyped(score, _loss_shape(node, given(node, 1)))
    return [loss, typed(score), retyped(score, ())][: len(node.outputs)]


def _grad_types(node: ir.Node) -> Types:
    return [typed(given(node, 1))]


def _both_types(node: ir.Node) -> Types:
    logits = given(node, 1)
    return [retyped(logits, ()), typed(logits)][: len(node.outputs)]


def kept_rows(
    b: Builder, target: ir.Value, weight: ir.Value | None, ignore: int | None, like: ir.Value
) -> tuple[ir.Value | None, ir.Value, ir.Value]:
    """(which targets count or None for all, targets with ignored ones set to class 0, their weights or 0)."""
    kept, safe = None, target
    if ignore is not None:
        kept = b.op("Not", b.op("Equal", target, b.scalar(ignore, target)))
        safe = b.op("Where", kept, target, b.scalar(0, target))
    if weight is None:
        valid = kept if kept is not None else b.op("Equal", target, target)
        return kept, safe, b.op("Cast", valid, to=like.dtype)
    row_weight = b.op("Gather", weight, safe, axis=0)
    if kept is not None:
        row_weight = b.op("Where", kept, row_weight, b.scalar(0.0, weight))
    return kept, safe, row_weight


def nll_loss(
    b: Builder, log_prob: ir.Value, target: ir.Value, weight: ir.Value | None, reduction: str, ignore: int | None
) -> tuple[ir.Value, ir.Value]:
    """(Loss, TotalWeight) of log-probabilities [N, C, ...] and class indices [N, ...]."""
    kept, safe, row_weight = kept_rows(b, target, weight, ignore, log_prob)
    one = b.ints([1])
    picked = b.op("Squeeze", b.op("GatherElements", log_prob, b.op("Unsqueeze", safe, one), axis=1), one)
    rows = b.op("Neg", picked if weight is None else b.op("Mul", picked, row_weight))
    if kept is not None:
        # An ignored row may hold -inf; multiplying by a zero weight would give NaN.
        rows = b.op("Where", kept, rows, b.scalar(0.0, log_prob))
    total = b.op("ReduceSum", row_weight, keepdims=0)
    if reduction == "none":
        return rows, total
    loss = b.op("ReduceSum", rows, keepdims=0)
    return (b.op("Div", loss, total) if reduction == "mean" else loss), total


def row_factor(
    b: Builder,
    d_loss: ir.Value,
    kept: ir.Value | None,
    row_weight: ir.Value,
    total: ir.Value | None,
    reduction: str,
) -> ir.Value:
    """d loss / d (-log p[target]) of every row, [N, ...]. An ignored row has 0 even where the total weight is 0."""
    scale = b.op("Div", d_loss, total) if reduction == "mean" else d_loss
    factor = b.op("Mul", row_weight, scale)
    return factor if kept is None else b.op("Where", kept, factor, b.scalar(0.0, factor))


def nll_loss_grad(
    b: Builder,
    d_loss: ir.Value,
    log_prob: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    total: ir.Value | None,
    reduction: str,
    ignore: int | None,
) -> ir.Value:
    """Zeros, and -factor at each row's class."""
    kept, safe, row_weight = kept_rows(b, target, weight, ignore, log_prob)
    factor = b.op("Neg", row_factor(b, d_loss, kept, row_weight, total, reduction))
    one = b.ints([1])
    return b.op(
        "ScatterElements", zeros_like(b, log_prob), b.op("Unsqueeze", safe, one), b.op("Unsqueeze", factor, one), axis=1
    )


def cross_entropy_grad(
    b: Builder,
    d_loss: ir.Value,
    log_prob: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    total: ir.Value | None,
    reduction: str,
    ignore: int | None,
) -> ir.Value:
    """(softmax - onehot) factor: one exponential, one row-wise scatter, one product."""
    kept, safe, row_weight = kept_rows(b, target, weight, ignore, log_prob)
    one = b.ints([1])
    indicator = row_weight if weight is None else b.op("Cast", b.op("Equal", safe, safe), to=log_prob.dtype)
    # Subtract before scaling: p - 1 is then exact where p is near 1.
    minus_one = b.op("Unsqueeze", b.op("Neg", indicator), one)
    shifted = b.op(
        "ScatterElements", b.op("Exp", log_prob), b.op("Unsqueeze", safe, one), minus_one, axis=1, reduction="add"
    )
    factor = b.op("Unsqueeze", row_factor(b, d_loss, kept, row_weight, total, reduction), one)
    return b.op("Mul", shifted, factor)


def _expand_nll(b: Builder, node: ir.Node) -> list[ir.Value]:
    log_prob, target = operands(node, 2)
    return list(nll_loss(b, log_prob, target, given(node, 2), *_options(node)))


def _expand_cross_entropy(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    log_prob = b.op("LogSoftmax", node.inputs[0], axis=1)
    if not (wanted(node, 0) or wanted(node, 2)):
        return [None, log_prob, None]
    loss, total = nll_loss(b, log_prob, operand(node, 1), given(node, 2), *_options(node))
    return [loss, log_prob, total]


def _expand_both(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    factor, logits, target, weight = *operands(node, 3), given(node, 3)
    ignore = attribute(node, "ignore_index", DEFAULT_IGNORE)
    log_prob = b.op("LogSoftmax", logits, axis=1)
    loss = nll_loss(b, log_prob, target, weight, "sum", ignore)[0] if wanted(node, 0) else None
    return [loss, cross_entropy_grad(b, factor, log_prob, target, weight, None, "sum", ignore)]


def _expand_grad(function):
    def expand(b: Builder, node: ir.Node) -> list[ir.Value]:
        return [function(b, *node.inputs[:3], given(node, 3), given(node, 4), *_options(node))]

    return expand


register(
    OpSpec(
        COMPOSITE,
        "NllLoss",
        infer=_nll_types,
        expand=_expand_nll,
        doc="Loss = -sum w[t] LogProb[t] / TotalWeight (mean), over targets other than ignore_index",
    ),
    OpSpec(
        COMPOSITE,
        "NllLossGrad",
        infer=_grad_types,
        expand=_expand_grad(nll_loss_grad),
        flops=elements_flops(1),
        doc="dLogProb = -dLoss w[t] / TotalWeight (mean) at each row's target, 0 elsewhere",
    ),
    OpSpec(
        COMPOSITE,
        "CrossEntropy",
        infer=_cross_entropy_types,
        expand=_expand_cross_entropy,
        flops=lambda node: 6 * element_count(node.inputs[0]),
        doc="LogProb = LogSoftmax(Logits, axis 1); Loss = NllLoss(LogProb)",
    ),
    OpSpec(
        COMPOSITE,
        "CrossEntropyGrad",
        infer=_grad_types,
        expand=_expand_grad(cross_entropy_grad),
        flops=elements_flops(4),
        doc="dLogits = dLoss w[t] / TotalWeight (mean) (exp(LogProb) - onehot(t))",
    ),
    OpSpec(
        COMPOSITE,
        "CrossEntropyAndGrad",
        infer=_both_types,
        expand=_expand_both,
        flops=elements_flops(10),
        doc="Loss = -sum w[t] LogSoftmax(Logits)[t]; dLogits = Factor w[t] (Softmax(Logits) - onehot(t))",
    ),
)
register(
    OpSpec("", "NegativeLogLikelihoodLoss", doc="Loss = -sum w[t] X[t] / sum w[t] (mean)"),
    OpSpec("", "SoftmaxCrossEntropyLoss", optional_outputs=(1,), doc="Loss = NLL(LogSoftmax(X, axis 1))"),
)
