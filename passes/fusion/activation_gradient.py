"""FuseActivationGradient: SiLU, and the gradients of SiLU, ReLU, Tanh and Sigmoid."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from ortgraph.passes.fusion import elementwise as f
from ortgraph.passes.fusion.pointwise_region import Known, PointwiseFusion

_CURVES = frozenset({"Exp", "Sigmoid", "Tanh"})


@dataclasses.dataclass(frozen=True)
class FuseActivationGradient(PointwiseFusion):
    """x sigmoid(x) = Silu(x); dY (1 - Y^2) = TanhGrad(dY, Y); dY Y (1 - Y) = SigmoidGrad; dY where Y > 0 = ReluGrad.

    Y is the result of the forward operator. Recognised by value, so masks by Greater, Sign or Where all count.

    Refuses when:
        the numbers differ by more than 3e-7 (a leaky slope, a mask that is open at zero);
        Y is not made by the operator that the formula belongs to;
        an inner value of a forward SiLU is a graph output or has another reader that stays;
        an operand is broadcast, or the element type is neither float32 nor float64 or changes inside.
    """

    name: ClassVar[str] = "fuse-activation-gradient"
    known: ClassVar[tuple[Known, ...]] = (
        Known("Silu", f.silu, 1, needs=_CURVES),
        Known("SiluGrad", f.silu_grad, 2, needs=_CURVES),
        Known("TanhGrad", lambda dy, y: dy * (1.0 - y * y), 2, made_by=frozenset({"Tanh"})),
        Known("SigmoidGrad", lambda dy, y: dy * y * (1.0 - y), 2, made_by=frozenset({"Sigmoid"})),
        Known("ReluGrad", lambda dy, y: np.where(y > 0.0, dy, 0.0), 2, made_by=frozenset({"Relu"})),
    )
