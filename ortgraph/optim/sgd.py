"""SGD with momentum."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ortgraph.optim.base import Group, Optimizer, Settings
from ortgraph.optim.loss_scale import LossScale


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with the semantics of ``torch.optim.SGD``.

    Attributes:
        lr: Initial learning rate; ``session.step(batch, learning_rate=...)`` changes it.
        momentum: Factor of the momentum buffer; 0: there is none. The first step sets the buffer to the gradient.
        dampening: The gradient enters the buffer with factor ``1 - dampening`` after the first step.
        nesterov: Nesterov momentum; needs momentum and no dampening.
        weight_decay: Weights times this are added to the gradient.
        max_grad_norm: Clip all gradients by their global norm first; None: do not.
        no_decay: Name patterns of parameters without weight decay, e.g. ``("*.bias", "*norm*")``.
        groups: Overrides by name pattern, as of AdamW; also momentum, dampening and nesterov.
        loss_scale: As of AdamW.

    Raises:
        InputError: A hyperparameter is out of range.
    """

    TEXT: ClassVar[str] = "sgd"
    COMPOSITE: ClassVar[str] = "SGD"
    STATES: ClassVar[int] = 1
    OVERRIDES: ClassVar[tuple[str, ...]] = ("momentum", "dampening", "nesterov", "weight_decay")

    lr: float = 1e-2
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    no_decay: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    loss_scale: LossScale | str | float | None = None  # type: ignore[assignment]

    def attributes(self, settings: Settings) -> dict[str, Any]:
        return {
            "momentum": settings.momentum, "dampening": settings.dampening, "weight_decay": settings.weight_decay,
            "nesterov": int(settings.nesterov),
        }  # fmt: skip

    def states(self, settings: Settings) -> tuple[tuple[str, str], ...]:
        return (("momentum_buffer", "moment1"),) if settings.momentum else ()

    def _check(self) -> None:
        super()._check()
        for group in (Group(match=("*",)), *self.groups):
            over = {f: getattr(group, f) for f in self.OVERRIDES if getattr(group, f) is not None}
            of = {**{f: getattr(self, f) for f in self.OVERRIDES}, **over}
            if of["nesterov"] and (not of["momentum"] or of["dampening"]):
                raise self._fail("nesterov without momentum, or with dampening", "set momentum > 0 and dampening = 0")
