"""FP16_Optimizer: loss scaling for training scripts whose parameters are in low precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ortgraph.errors import InputError
from ortgraph.optim.fused_adam import FusedAdam, global_norm
from ortgraph.optim.loss_scale import LossScale

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6


class FP16_Optimizer(torch.optim.Optimizer):  # noqa: N801 - the name that scripts know
    """A FusedAdam whose loss is scaled; float32 masters, a step is skipped when gradients overflow.

    In a loop: ``optimizer.zero_grad()``, ``optimizer.backward(loss)`` instead of ``loss.backward()``, if wanted
    ``optimizer.clip_master_grads(1.0)``, ``optimizer.step()``. Several calls of ``backward`` before ``step`` add up. The
    gradients in ``parameter.grad`` are multiples of the true ones: no copies in float32 are made, the update divides by
    the scale as it reads them. A skipped step leaves parameters, masters, moments and step counts bit for bit.

    Args:
        optimizer: A FusedAdam over float16, bfloat16 or float32 parameters.
        loss_scale: ``"dynamic"``, a number, or a ``LossScale``.

    Attributes:
        overflow: Whether the last step was skipped.
        skipped_steps: How many steps were skipped.

    Raises:
        InputError: ``optimizer`` is something else, or the scale is out of range.
    """

    def __init__(self, optimizer: FusedAdam, loss_scale: LossScale | str | float = "dynamic") -> None:
        if not isinstance(optimizer, FusedAdam):
            raise InputError(
                f"FP16_Optimizer takes a FusedAdam, not {type(optimizer).__name__}", "ortgraph.optim.FusedAdam"
            )
        policy = LossScale.of(loss_scale)
        if policy is None:
            raise InputError("FP16_Optimizer without a loss scale", "loss_scale='dynamic' or a number")
        self.optimizer, self.policy = optimizer, policy
        self.overflow, self.skipped_steps = False, 0
        self._scale, self._good, self._clip = policy.initial, 0, 1.0
        self._norm: float | None = None
        self._share()

    def _share(self) -> None:
        """Groups and states are the inner optimizer's own, so that schedulers work on them."""
        inner = self.optimizer
        own = {"defaults": inner.defaults, "state": inner.state, "param_groups": inner.param_groups}
        super().__setstate__(own)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which share nothing with this object."""
        own = ("optimizer", "policy", "overflow", "skipped_steps", "_scale", "_good", "_clip", "_norm")
        return {name: self.__dict__[name] for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()

    @property
    def loss_scale(self) -> float:
        """The factor on the loss of the next ``backward``."""
        return self._scale

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """``(loss * scale).backward(**options)``, in float32."""
        (loss.float() * self._scale).backward(**options)
        self._clip, self._norm = 1.0, None

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the true gradients by their global norm in the next step. Returns the norm; infinite or NaN on overflow."""
        if norm_type != 2.0 or not max_norm > 0.0:
            raise InputError(f"clip_master_grads({max_norm}, {norm_type})", "a positive limit of the 2-norm")
        norm = self._global_norm() / self._scale
        self._clip = min(1.0, max_norm / (norm + CLIP_EPSILON)) if math.isfinite(norm) else 1.0
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update, or skip when a gradient is infinite or NaN; then move the scale."""
        if closure is not None:
            raise InputError("FP16_Optimizer.step takes no closure", "call backward(loss), then step()")
        self.overflow = not math.isfinite(self._global_norm())
        if not self.overflow:
            self.optimizer.step(grad_scale=self._clip / self._scale)
        self._move()
        self._clip, self._norm = 1.0, None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the inner optimizer."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._clip, self._norm = 1.0, None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and the scaler's: scale, good and skipped steps."""
        scaler = {"scale": self._scale, "good_steps": self._good, "skipped_steps": self.skipped_steps}
        return {"optimizer": self.optimizer.state_dict(), "loss_scaler": {**scaler, "policy": str(self.policy)}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, bit for bit. Parameters are left alone: load the module, too."""
        scaler = state_dict["loss_scaler"]
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._share()
        self.policy = LossScale.parse(scaler["policy"])
        self._scale, self._good = float(scaler["scale"]), int(scaler["good_steps"])
        self.skipped_steps, self.overflow = int(scaler["skipped_steps"]), False
        self._clip, self._norm = 1.0, None

    def _global_norm(self) -> float:
        """The norm of the scaled gradients, computed once per step."""
        if self._norm is None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            self._norm = global_norm([p.grad for p in parameters if p.grad is not None])
        return self._norm

    def _move(self) -> None:
        policy = self.policy
        self.skipped_steps += self.overflow
        if not policy.dynamic:
            return
        self._good = 0 if self.overflow else self._good + 1
        if self.overflow:
            self._scale = max(self._scale * policy.backoff, policy.minimum)
        elif self._good == policy.interval:
            self._scale, self._good = min(self._scale * policy.growth, policy.maximum), 0
