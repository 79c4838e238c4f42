"""Negative log likelihood and squared error with their backward halves."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation

REDUCTIONS = ("none", "mean", "sum")


@rule("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll_loss(
    t: Translation, self: ir.Value, target: ir.Value, weight: Any, reduction: int, ignore_index: int
) -> tuple[ir.Value | None, ...]:
    log_prob, rows, single = _batched(t, self, target)
    loss, total = t.composites(
        "NllLoss", log_prob, rows, weight, outputs=2, reduction=REDUCTIONS[reduction], ignore_index=ignore_index
    )
    if single and reduction == 0:
        assert loss is not None
        loss = t.reshape(t.typed(loss, t.out_dtype(), (1,)), ())
    return loss, total


@rule("nll_loss_backward.default", "nll_loss2d_backward.default")
def _nll_loss_backward(
    t: Translation,
    grad_output: ir.Value,
    self: ir.Value,
    target: ir.Value,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total_weight: ir.Value,
) -> ir.Value:
    log_prob, rows, single = _batched(t, self, target)
    if single and reduction == 0:
        grad_output = t.reshape(grad_output, (1,))
    grad = t.composite(
        "NllLossGrad", grad_output, log_prob, rows, weight, total_weight,
        reduction=REDUCTIONS[reduction], ignore_index=ignore_index,
    )  # fmt: skip
    return t.reshape(t.typed(grad, t.out_dtype(), t.dims(log_prob)), t.dims(self)) if single else grad


def _batched(t: Translation, log_prob: ir.Value, target: ir.Value) -> tuple[ir.Value, ir.Value, bool]:
    """A single sample [C] becomes a batch of one."""
    dims = t.dims(log_prob)
    if len(dims) > 1:
        return log_prob, target, False
    return t.reshape(log_prob, (1, *dims)), t.reshape(target, (1,)), True


def _error(t: Translation, self: ir.Value, target: ir.Value) -> ir.Value:
    return t.op("Sub", t.cast(self, t.out_dtype()), t.cast(target, t.out_dtype()))


@rule("mse_loss.default")
def _mse_loss(t: Translation, self: ir.Value, target: ir.Value, reduction: int) -> ir.Value:
    error = _error(t, self, target)
    square = t.op("Mul", error, error)
    if reduction == 0:
        return square
    return t.op("ReduceMean" if reduction == 1 else "ReduceSum", square, keepdims=0)


@rule("mse_loss_backward.default")
def _mse_loss_backward(
    t: Translation, grad_output: ir.Value, self: ir.Value, target: ir.Value, reduction: int
) -> ir.Value:
    dtype = t.out_dtype()
    slope = t.op("Mul", _error(t, self, target), t.scalar(2, dtype))
    if reduction == 1:
        count: Any = 1
        for d in t.out_dims():
            count = count * d
        slope = t.op("Div", slope, t.tensor(count, dtype))
    return t.op("Mul", slope, grad_output)
