"""LAMB: Adam whose step is scaled per parameter to the size of its weights."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ortgraph.optim.adamw import MOMENTS
from ortgraph.optim.base import Group, Optimizer, Settings
from ortgraph.optim.loss_scale import LossScale


@dataclasses.dataclass(frozen=True)
class LAMB(Optimizer):
    """Layer-wise adaptive moments (You et al. 2020, algorithm 2).

    With moments as Adam's, ``u = m / (sqrt(v) + eps) + weight_decay * w`` and the trust ratio ``r = |w| / |u|`` (norms of
    the whole parameter; 1 where either norm is zero), the update is ``w - lr * r * u``. The variant: ``m`` and ``v`` are
    corrected for their bias, the scaling function of the paper is the identity, and the ratio may be limited.

    Attributes:
        lr: Initial learning rate; ``session.step(batch, learning_rate=...)`` changes it.
        betas: Decay rates of the moments.
        eps: Term added to the denominator, after bias correction.
        weight_decay: Part of the direction ``u``, and so of the trust ratio.
        bias_correction: Divide the moments by ``1 - beta^step``.
        min_trust: The trust ratio is at least this.
        max_trust: The trust ratio is at most this; None: no limit.
        always_adapt: Trust ratios also for parameters without weight decay; by default theirs is 1, as is usual for
            biases and norms.
        max_grad_norm: Clip all gradients by their global norm first; None: do not.
        no_decay: Name patterns of parameters without weight decay, e.g. ``("*.bias", "*norm*")``.
        groups: Overrides by name pattern, as of AdamW.
        loss_scale: As of AdamW.

    Raises:
        InputError: A hyperparameter is out of range.
    """

    TEXT: ClassVar[str] = "lamb"
    COMPOSITE: ClassVar[str] = "LAMB"
    STATES: ClassVar[int] = 2
    OVERRIDES: ClassVar[tuple[str, ...]] = ("betas", "eps", "weight_decay")

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    min_trust: float = 0.0
    max_trust: float | None = None
    always_adapt: bool = False
    max_grad_norm: float | None = None
    no_decay: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    loss_scale: LossScale | str | float | None = None  # type: ignore[assignment]

    def attributes(self, settings: Settings) -> dict[str, Any]:
        beta1, beta2 = settings.betas
        return {
            "beta1": beta1, "beta2": beta2, "epsilon": settings.eps, "weight_decay": settings.weight_decay,
            "bias_correction": int(self.bias_correction), "min_trust": self.min_trust, "max_trust": self.max_trust or 0.0,
            "adapt": int(self.always_adapt or settings.weight_decay != 0.0),
        }  # fmt: skip

    def states(self, settings: Settings) -> tuple[tuple[str, str], ...]:
        return MOMENTS

    def _check(self) -> None:
        super()._check()
        if self.max_trust is not None and not max(self.min_trust, 0.0) < self.max_trust < float("inf"):
            raise self._fail(f"max_trust={self.max_trust}", "a number above min_trust, or None")
