"""Losses: connectionist temporal classification, and those whose own code looks at values or decomposes wrongly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from ortgraph.capture.torch_substitutes import substitute

_ORIGIN = "_ortgraph_selected_from"  # on a tensor that masked_select made: what it was selected from, and the mask


# --- CTC -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("ortgraph::ctc_loss", mutates_args=())
def _ctc(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor,
    blank: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss per sample and log alpha [N, T, 2 S + 1]; targets are padded, [N, S]."""
    loss, alpha = torch._ctc_loss(log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank)
    return loss, alpha


@_ctc.register_fake
def _(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor,
    blank: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    steps, rows = log_probs.shape[:2]
    return log_probs.new_empty([rows]), log_probs.new_empty([rows, steps, 2 * targets.shape[1] + 1])


@torch.library.custom_op("ortgraph::ctc_loss_backward", mutates_args=())
def _ctc_backward(
    grad: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
    target_lengths: torch.Tensor, loss: torch.Tensor, alpha: torch.Tensor, blank: int,
) -> torch.Tensor:  # fmt: skip
    return torch.ops.aten._ctc_loss_backward(
        grad, log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), loss, alpha, blank
    )


@_ctc_backward.register_fake
def _(
    grad: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
    target_lengths: torch.Tensor, loss: torch.Tensor, alpha: torch.Tensor, blank: int,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.blank = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    log_probs, targets, input_lengths, target_lengths, loss, alpha = ctx.saved_tensors
    made = _ctc_backward(grad, log_probs, targets, input_lengths, target_lengths, loss, alpha, ctx.blank)
    return made, None, None, None, None


_ctc.register_autograd(_differentiate, setup_context=_keep)


@substitute(torch.masked_select, torch.Tensor.masked_select)
def _masked_select(input: torch.Tensor, mask: torch.Tensor) -> Any:
    """Selects as ever, and remembers of what: CTC losses take labels without their padding."""
    selected = torch.masked_select(input, mask)
    setattr(selected, _ORIGIN, (input, mask))
    return selected


@substitute(F.ctc_loss)
def ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``torch.nn.functional.ctc_loss`` over padded targets, with shapes that do not depend on the lengths.

    Targets that were selected by a mask [N, S] may have at most S elements a row; more give NaN.
    """
    single = log_probs.dim() == 2
    if single:
        log_probs = log_probs.unsqueeze(1)
    inputs = _lengths(input_lengths, log_probs.shape[1])
    counts = _lengths(target_lengths, log_probs.shape[1])
    if single and targets.dim() == 1:
        targets = targets.unsqueeze(0)
    padded = _padded(targets, counts)
    loss = _ctc(log_probs, padded, inputs, counts, blank)[0]
    if hasattr(targets, _ORIGIN):
        loss = torch.where(counts > padded.shape[1], math.nan, loss)
    if zero_infinity:
        loss = torch.where(loss == math.inf, torch.zeros_like(loss), loss)
    if reduction == "mean":
        return (loss / counts.clamp(min=1).to(loss.dtype)).mean()
    if reduction == "sum":
        return loss.sum()
    return loss[0] if single else loss


def _lengths(lengths: Any, rows: Any) -> torch.Tensor:
    made = lengths.to(torch.int64) if isinstance(lengths, torch.Tensor) else torch.tensor(lengths, dtype=torch.int64)
    return made.reshape(-1).expand(rows) if made.numel() == 1 else made.reshape(-1)


def _padded(targets: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Targets as [N, S], int64; what stands behind the last of a row is any class."""
    if targets.dim() == 2:
        return targets.to(torch.int64)
    origin = getattr(targets, _ORIGIN, None)
    packed, width = (targets, targets.shape[0]) if origin is None else (_packed(*origin), origin[1].shape[-1])
    ends = counts.cumsum(0)
    at = (ends - counts).unsqueeze(1) + torch.arange(width)
    return packed.to(torch.int64)[at.clamp(max=packed.shape[0] - 1)]


def _packed(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The selected values in front of a tensor with room for all."""
    flat, kept = (v.reshape(-1) for v in torch.broadcast_tensors(values, mask))
    total = flat.shape[0]
    place = torch.where(kept, kept.to(torch.int64).cumsum(0) - 1, total)
    return torch.zeros(total + 1, dtype=flat.dtype).scatter(0, place, flat)


# --- others --------------------------------------------------------------------------------------------------------


def reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    """The mean, the sum or the loss itself."""
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


@substitute(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> torch.Tensor:
    """Without the look at the variances' signs. Like the original the lower limit lets gradients through."""
    if not isinstance(var, torch.Tensor):
        var = torch.full_like(input, var)
    if var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return reduced(loss, reduction)


@substitute(F.multilabel_margin_loss)
def multilabel_margin_loss(
    input: torch.Tensor, target: torch.Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> torch.Tensor:
    """PyTorch's decomposition counts the places behind the first -1 as class 0."""
    if size_average is not None or reduce is not None:
        return NotImplemented
    single = input.dim() == 1
    x, t = (input.unsqueeze(0), target.unsqueeze(0)) if single else (input, target)
    classes = x.shape[1]
    valid = (t == -1).to(torch.int64).cumsum(1) == 0
    own = torch.where(valid, t, 0)
    is_target = ((own.unsqueeze(2) == torch.arange(classes)) & valid.unsqueeze(2)).any(1)
    margins = (1 - x.gather(1, own).unsqueeze(2) + x.unsqueeze(1)).clamp(min=0)
    counted = valid.unsqueeze(2) & ~is_target.unsqueeze(1)
    loss = torch.where(counted, margins, 0).sum((1, 2)) / classes
    return reduced(loss[0] if single else loss, reduction)
