"""FuseGelu: GELU and its gradient, in both forms, from any decomposition."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ortgraph.passes.fusion import elementwise as f
from ortgraph.passes.fusion.pointwise_region import Known, PointwiseFusion

_CURVES = frozenset({"Erf", "Exp", "Sigmoid", "Tanh"})


@dataclasses.dataclass(frozen=True)
class FuseGelu(PointwiseFusion):
    """x (1 + erf(x / sqrt 2)) / 2 = Gelu(x), its tanh form = Gelu(x, tanh), and dY times their derivatives = GeluGrad.

    Recognised by value (pointwise_region.py): operand order, Pow or Mul, Div or Mul, factored or not, all count.

    Refuses when:
        the numbers differ by more than 3e-7 from the function (0.044 for 0.044715, 1.414 for sqrt 2);
        an inner value of the forward chain is a graph output or has another reader that stays;
        an operand is broadcast, or the element type is neither float32 nor float64 or changes inside.
    """

    name: ClassVar[str] = "fuse-gelu"
    known: ClassVar[tuple[Known, ...]] = (
        Known("Gelu", f.gelu, 1, {"approximate": "none"}, _CURVES),
        Known("Gelu", f.gelu_tanh, 1, {"approximate": "tanh"}, _CURVES),
        Known("GeluGrad", f.gelu_grad, 2, {"approximate": "none"}, _CURVES),
        Known("GeluGrad", f.gelu_tanh_grad, 2, {"approximate": "tanh"}, _CURVES),
    )
