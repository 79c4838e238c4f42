"""AdamW."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ortgraph.optim.base import Group, Optimizer, Settings
from ortgraph.optim.loss_scale import LossScale

MOMENTS = (("exp_avg", "moment1"), ("exp_avg_sq", "moment2"))


@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), with the semantics of ``torch.optim.AdamW``.

    Attributes:
        lr: Initial learning rate; ``session.step(batch, learning_rate=...)`` changes it.
        betas: Decay rates of the moments.
        eps: Term added to the denominator, after bias correction.
        weight_decay: Weights are multiplied by ``1 - lr * weight_decay`` first.
        max_grad_norm: Clip all gradients by their global norm, as ``torch.nn.utils.clip_grad_norm_``; None: do not.
        no_decay: Name patterns of parameters without weight decay, e.g. ``("*.bias", "*norm*")``.
        groups: Overrides by name pattern. The first matching group applies; ``no_decay`` applies where that group sets
            no weight_decay.
        loss_scale: ``"dynamic"``, a number, or a LossScale; None: the loss is not scaled and no step is skipped.

    Raises:
        InputError: A hyperparameter is out of range.
    """

    TEXT: ClassVar[str] = "adamw"
    COMPOSITE: ClassVar[str] = "AdamW"
    STATES: ClassVar[int] = 2
    OVERRIDES: ClassVar[tuple[str, ...]] = ("betas", "eps", "weight_decay")

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = None
    no_decay: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    loss_scale: LossScale | str | float | None = None  # type: ignore[assignment]

    def attributes(self, settings: Settings) -> dict[str, Any]:
        beta1, beta2 = settings.betas
        return {"beta1": beta1, "beta2": beta2, "epsilon": settings.eps, "weight_decay": settings.weight_decay}

    def states(self, settings: Settings) -> tuple[tuple[str, str], ...]:
        return MOMENTS
