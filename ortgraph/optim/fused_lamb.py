"""LAMB for training scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ortgraph.errors import InputError


class FusedLAMB(torch.optim.Optimizer):
    """LAMB (You et al., 2020): Adam's direction, scaled per tensor to a part of the weights' norm.

    The arithmetic is that of ``ortgraph.optim.LAMB`` in a graph, by PyTorch's operators, a tensor at a time.

    Args:
        params: Tensors, or groups as dicts.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Term added to the denominator.
        weight_decay: Weight decay, a part of the direction.
        bias_correction: Divide moments by ``1 - beta^step``.
        always_adapt: Trust ratios also for groups without weight decay; by default theirs is 1.

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
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise InputError(f"FusedLAMB: lr={lr}, betas={betas}, eps={eps}", "none negative, betas below 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction, "always_adapt": always_adapt})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        gradient: Any = p.grad
        if gradient.is_sparse:
            raise InputError("FusedLAMB takes dense gradients", "another optimizer for sparse ones")
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p) for _ in range(2))
        state["step"] += 1
        m, v, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        n, corrected = float(state["step"]), group["bias_correction"]
        one, two = (1 - beta1**n, 1 - beta2**n) if corrected else (1.0, 1.0)
        direction = (m / one).div_(v.sqrt().div_(math.sqrt(two)).add_(group["eps"]))
        direction.add_(p, alpha=group["weight_decay"])
        trust = 1.0
        if group["weight_decay"] or group["always_adapt"]:
            weights, size = float(p.norm()), float(direction.norm())
            trust = weights / size if weights > 0 and size > 0 else 1.0
        p.add_(direction, alpha=-group["lr"] * trust)
