"""LAMB for training scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ortgraph.errors import InputError
from ortgraph.ops import updates
from ortgraph.optim.script_optimizer import TYPES, Flat, by_kernel, evaluate, refuse_sparse


class FusedLAMB(torch.optim.Optimizer):
    """LAMB (You et al., 2020): Adam's direction, scaled per tensor to a part of the weights' norm.

    The arithmetic is that of ``ortgraph.optim.LAMB`` in a graph, by the same compiled code: two passes over weights, gradients
    and moments of all tensors. Parameters on other devices or of other dtypes than float32 are updated by PyTorch operators,
    as are all where there is no compiler (with a warning).

    Args:
        params: Tensors, or groups as dicts.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Term added to the denominator.
        weight_decay: Weight decay, a part of the direction.
        bias_correction: Divide moments by ``1 - beta^step``.
        always_adapt: Trust ratios also for groups without weight decay; by default theirs is 1.
        min_trust: The trust ratio is at least this.
        max_trust: The trust ratio is at most this; None: no limit.

    Raises:
        InputError: A hyperparameter is out of range, or a gradient is sparse.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        always_adapt: bool = False,
        min_trust: float = 0.0,
        max_trust: float | None = None,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise InputError(f"FusedLAMB: lr={lr}, betas={betas}, eps={eps}", "none negative, betas below 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options = {"bias_correction": bias_correction, "always_adapt": always_adapt}
        super().__init__(params, {**defaults, **options, "min_trust": min_trust, "max_trust": max_trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = evaluate(closure)
        refuse_sparse(self)
        for group in self.param_groups:
            buckets: dict[tuple[Any, ...], list[torch.Tensor]] = {}
            for p in (p for p in group["params"] if p.grad is not None):
                kernel = p.dtype == torch.float32 and by_kernel(p) and by_kernel(p.grad)
                buckets.setdefault((self._count(p), p.grad.dtype, kernel), []).append(p)
            for (step, _, kernel), parameters in buckets.items():
                (self._update_by_kernel if kernel else self._update_by_torch)(parameters, group, step)
        return loss

    def _count(self, p: torch.Tensor) -> float:
        """The number of this step of a parameter, whose states are made at the first one."""
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p) for _ in range(2))
        state["step"] += 1
        return float(state["step"])

    def _update_by_kernel(self, parameters: Sequence[torch.Tensor], group: Mapping[str, Any], step: float) -> None:
        weights = [Flat(p) for p in parameters]
        first, second = ([Flat(self.state[p][name]) for p in parameters] for name in ("exp_avg", "exp_avg_sq"))
        gradients = [p.grad.contiguous() for p in parameters]  # type: ignore[union-attr]
        updates.lamb(
            [g.numel() for g in gradients],
            [w.address for w in weights],
            [g.data_ptr() for g in gradients],
            [m.address for m in first],
            [v.address for v in second],
            gradient_type=TYPES[gradients[0].dtype],
            step=step, betas=tuple(map(float, group["betas"])), eps=float(group["eps"]),  # type: ignore[arg-type]
            weight_decay=float(group["weight_decay"]), bias_correction=bool(group["bias_correction"]),
            rate=lambda weights, direction: float(group["lr"]) * _trust(group, weights, direction),
            threads=torch.get_num_threads(),
        )  # fmt: skip
        for flat in (*weights, *first, *second):
            flat.put_back()
        torch.autograd.graph.increment_version(parameters)  # so that autograd sees what it did not do

    def _update_by_torch(self, parameters: Sequence[torch.Tensor], group: Mapping[str, Any], step: float) -> None:
        beta1, beta2 = group["betas"]
        one, two = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        for p in parameters:
            m, v, gradient = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"], p.grad.to(p.dtype)  # type: ignore[union-attr]
            m.lerp_(gradient, 1 - beta1)
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            direction = (m / one).div_(v.sqrt().div_(math.sqrt(two)).add_(group["eps"]))
            direction.add_(p, alpha=group["weight_decay"])
            p.add_(direction, alpha=-group["lr"] * _trust(group, float(p.norm()), float(direction.norm())))


def _trust(group: Mapping[str, Any], weights: float, direction: float) -> float:
    """The trust ratio of norms; NaN passes."""
    if not (group["weight_decay"] or group["always_adapt"]):
        return 1.0
    ratio = 1.0 if weights == 0 or direction == 0 else weights / direction
    ratio = group["min_trust"] if ratio < group["min_trust"] else ratio
    return group["max_trust"] if group["max_trust"] and ratio > group["max_trust"] else ratio
