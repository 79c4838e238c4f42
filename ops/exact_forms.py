"""Operators whose processor kernels in ONNX Runtime lose digits that PyTorch keeps, and what stands for them.

Measured over all of float32 against float64 (``tests/ops/test_exact_forms.py``). Lowering never leaves such an operator
as it is where a compiled kernel or a form listed here can stand for it, whatever it costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import CONTRIB
from ortgraph.ops.targets import CPU_TARGETS, TRAINING

Build = Callable[[Builder, ir.Node], ir.Value]


@dataclasses.dataclass(frozen=True)
class ExactForm:
    """An operator that a runtime computes badly.

    Attributes:
        why: What is wrong with the runtime's kernel.
        targets: Where.
        build: Makes the output from standard operators that are right; None where only a compiled kernel is (or the
            operator's own expansion).
        wide: Whether float64 is wrong, too.
    """

    why: str
    targets: tuple[str, ...]
    build: Build | None = None
    wide: bool = True


def sigmoid(b: Builder, node: ir.Node) -> ir.Value:
    """1 / (1 + exp(-X)), which is 0 where exp overflows, as in PyTorch."""
    x = node.inputs[0]
    assert x is not None
    return b.op("Reciprocal", b.op("Add", b.op("Exp", b.op("Neg", x)), b.scalar(1.0, x)))


def exp_minus_one(b: Builder, x: ir.Value) -> ir.Value:
    """exp(X) - 1 for X <= 0 without cancellation: (exp(X) + 1) tanh(X / 2)."""
    half = b.op("Tanh", b.op("Mul", x, b.scalar(0.5, x)))
    return b.op("Mul", b.op("Add", b.op("Exp", x), b.scalar(1.0, x)), half)


def _exponential(b: Builder, x: ir.Value | None, positive: float, negative: float, width: float) -> ir.Value:
    """positive X where X > 0, else negative (exp(X / width) - 1)."""
    assert x is not None
    zero = b.scalar(0.0, x)
    below = b.op("Min", x, zero)
    below = exp_minus_one(b, below if width == 1.0 else b.op("Div", below, b.scalar(width, x)))
    below = below if negative == 1.0 else b.op("Mul", below, b.scalar(negative, x))
    above = x if positive == 1.0 else b.op("Mul", x, b.scalar(positive, x))
    return b.op("Where", b.op("Greater", x, zero), above, below)


def _elu(b: Builder, node: ir.Node) -> ir.Value:
    return _exponential(b, node.inputs[0], 1.0, attribute(node, "alpha", 1.0), 1.0)


def _celu(b: Builder, node: ir.Node) -> ir.Value:
    alpha = attribute(node, "alpha", 1.0)
    return _exponential(b, node.inputs[0], 1.0, alpha, alpha)


def _selu(b: Builder, node: ir.Node) -> ir.Value:
    alpha = attribute(node, "alpha", 1.67326319217681884765625)
    gamma = attribute(node, "gamma", 1.05070102214813232421875)
    return _exponential(b, node.inputs[0], gamma, alpha * gamma, 1.0)


def _log(b: Builder, node: ir.Node) -> ir.Value:
    """Sums of one element are not computed in vectors, and so are their logarithms."""
    axis = b.ints([-1])
    return b.op("ReduceLogSum", b.op("Unsqueeze", node.inputs[0], axis), axis, keepdims=0)


_TAIL = (
    "ONNX Runtime's sigmoid is off by 6e-8 where it is small: no digit is right below -17, and log of it is infinite"
)
_SMALL = "ONNX Runtime computes exp(x) - 1 by subtraction: no digit is right for small x"
EXACT_FORMS: dict[tuple[str, str], ExactForm] = {
    ("", "Sigmoid"): ExactForm(_TAIL, CPU_TARGETS, sigmoid),
    (CONTRIB, "QuickGelu"): ExactForm(_TAIL, CPU_TARGETS),
    (CONTRIB, "QuickGeluGrad"): ExactForm(_TAIL, CPU_TARGETS),
    ("", "Elu"): ExactForm(_SMALL, CPU_TARGETS, _elu),
    ("", "Celu"): ExactForm(_SMALL, CPU_TARGETS, _celu),
    ("", "Selu"): ExactForm(_SMALL, CPU_TARGETS, _selu),
    ("", "Log"): ExactForm(
        "ONNX Runtime 1.19.2 takes subnormal numbers as the least normal one", (TRAINING,), _log, False
    ),
    ("", "Sqrt"): ExactForm(
        "ONNX Runtime 1.19.2 makes 0 of subnormal numbers and NaN of infinity", (TRAINING,), None, False
    ),
    ("", "Erf"): ExactForm("ONNX Runtime 1.19.2 makes 1 of NaN", (TRAINING,), None, False),
}


def exact_form(node: ir.Node, target: str) -> ExactForm | None:
    """What has to stand for a node on a target; None where the runtime's own kernel is right."""
    form = EXACT_FORMS.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
    if form is None or target not in form.targets:
        return None
    x = node.inputs[0] if node.inputs else None
    if x is not None and x.dtype == ir.DataType.DOUBLE and not form.wide:
        return None
    return form
