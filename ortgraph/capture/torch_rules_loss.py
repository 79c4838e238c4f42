"""Negative log likelihood and squared error with their backward halves."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_dims import Dim
from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation

INT64, BOOL = ir.DataType.INT64, ir.DataType.BOOL
REDUCTIONS = ("none", "mean", "sum")
IGNORED = -100  # PyTorch's default


@rule("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll_loss(
    t: Translation, self: ir.Value, target: ir.Value, weight: Any, reduction: int, ignore_index: Dim
) -> tuple[ir.Value | None, ...]:
    log_prob, rows, single = _batched(t, self, target)
    rows, ignored = _ignoring(t, rows, ignore_index)
    loss, total = t.composites(
        "NllLoss", log_prob, rows, weight, outputs=2, reduction=REDUCTIONS[reduction], ignore_index=ignored
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
    ignore_index: Dim,
    total_weight: ir.Value,
) -> ir.Value:
    log_prob, rows, single = _batched(t, self, target)
    rows, ignored = _ignoring(t, rows, ignore_index)
    if single and reduction == 0:
        grad_output = t.reshape(grad_output, (1,))
    grad = t.composite(
        "NllLossGrad", grad_output, log_prob, rows, weight, total_weight,
        reduction=REDUCTIONS[reduction], ignore_index=ignored,
    )  # fmt: skip
    return t.reshape(t.typed(grad, t.out_dtype(), t.dims(log_prob)), t.dims(self)) if single else grad


def _batched(t: Translation, log_prob: ir.Value, target: ir.Value) -> tuple[ir.Value, ir.Value, bool]:
    """A single sample [C] becomes a batch of one."""
    dims = t.dims(log_prob)
    if len(dims) > 1:
        return log_prob, target, False
    return t.reshape(log_prob, (1, *dims)), t.reshape(target, (1,)), True


def _ignoring(t: Translation, rows: ir.Value, ignore_index: Dim) -> tuple[ir.Value, int]:
    """The labels and the number that is skipped; a symbolic one (the length of a text) becomes a number."""
    if isinstance(ignore_index, int) or ignore_index.is_Integer:
        return rows, int(ignore_index)
    dims, ignored = t.dims(rows), t.scalar(IGNORED, INT64)
    skipped = t.typed(t.op("Equal", rows, t.size(ignore_index)), BOOL, dims)
    return t.typed(t.op("Where", skipped, ignored, rows), INT64, dims), IGNORED


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
