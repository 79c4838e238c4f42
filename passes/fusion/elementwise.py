"""A float64 interpreter of element-wise standard operators: what a region of them computes, by value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.fusion.operands import scalar

Array = Any  # numpy array or float
# A decomposed GELU's gradient holds them once raise-contrib has run.
_COMPOSITES = frozenset({"ReluGrad", "SigmoidGrad", "TanhGrad"})
_erf = np.vectorize(math.erf, otypes=[float])


def _clip(node: ir.Node, x: Array, low: Array = None, high: Array = None) -> Array:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


def _gelu(node: ir.Node, x: Array) -> Array:
    tanh = attribute(node, "approximate", "none") == "tanh"
    return gelu_tanh(x) if tanh else gelu(x)


_OPERATORS: dict[str, Callable[..., Array]] = {
    "Abs": lambda n, x: np.abs(x),
    "Add": lambda n, a, b: a + b,
    "And": lambda n, a, b: np.logical_and(a, b),
    "Cast": lambda n, x: np.asarray(x, dtype=float),
    "Clip": _clip,
    "Div": lambda n, a, b: a / b,
    "Equal": lambda n, a, b: a == b,
    "Erf": lambda n, x: _erf(x),
    "Exp": lambda n, x: np.exp(x),
    "Gelu": _gelu,
    "Greater": lambda n, a, b: a > b,
    "GreaterOrEqual": lambda n, a, b: a >= b,
    "Identity": lambda n, x: x,
    "Less": lambda n, a, b: a < b,
    "LessOrEqual": lambda n, a, b: a <= b,
    "LeakyRelu": lambda n, x: np.where(x < 0, attribute(n, "alpha", 0.01) * x, x),
    "Log": lambda n, x: np.log(x),
    "Max": lambda n, *v: np.maximum.reduce(np.broadcast_arrays(*v)),
    "Min": lambda n, *v: np.minimum.reduce(np.broadcast_arrays(*v)),
    "Mul": lambda n, a, b: a * b,
    "Neg": lambda n, x: -x,
    "Not": lambda n, x: np.logical_not(x),
    "Or": lambda n, a, b: np.logical_or(a, b),
    "Pow": lambda n, a, b: np.power(a, b),
    "Reciprocal": lambda n, x: 1.0 / x,
    "Relu": lambda n, x: np.maximum(x, 0.0),
    "ReluGrad": lambda n, dy, y: np.where(y > 0.0, dy, 0.0),
    "Sigmoid": lambda n, x: 1.0 / (1.0 + np.exp(-np.asarray(x, dtype=float))),
    "SigmoidGrad": lambda n, dy, y: dy * y * (1.0 - y),
    "Sign": lambda n, x: np.sign(x),
    "Softplus": lambda n, x: np.logaddexp(0.0, x),
    "Sqrt": lambda n, x: np.sqrt(x),
    "Sub": lambda n, a, b: a - b,
    "Sum": lambda n, *v: sum(v),
    "Tanh": lambda n, x: np.tanh(x),
    "TanhGrad": lambda n, dy, y: dy * (1.0 - y * y),
    "Where": lambda n, c, a, b: np.where(c, a, b),
}


def is_elementwise(node: ir.Node) -> bool:
    """Whether the interpreter knows the operator."""
    domains = (COMPOSITE,) if node.op_type in _COMPOSITES else ("", "ai.onnx")
    return node.domain in domains and node.op_type in _OPERATORS and len(node.outputs) == 1


def evaluate(
    root: ir.Value,
    sources: Mapping[ir.Value, np.ndarray],
    more: Mapping[str, Callable[[ir.Node, Array], Array]] | None = None,
) -> np.ndarray:
    """The value of ``root`` in float64 with ``sources`` given and constants as recorded.

    Every path from the root must end in a source or a constant filled with one number. ``more`` gives operators
    beyond the element-wise ones; they see their first input only.
    """
    more = more or {}
    known: dict[ir.Value, Array] = dict(sources)
    stack = [root]
    while stack:
        value = stack[-1]
        if value in known:
            stack.pop()
            continue
        node = value.producer()
        number = scalar(value)
        if number is not None:
            known[value] = number
            continue
        assert node is not None
        read = node.inputs[:1] if node.op_type in more else node.inputs
        waiting = [v for v in read if v is not None and v not in known]
        if waiting:
            stack += waiting
            continue
        arguments = [None if v is None else known[v] for v in read]
        function = more.get(node.op_type) or _OPERATORS[node.op_type]
        with np.errstate(all="ignore"):
            known[value] = function(node, *arguments)
    return np.asarray(known[root], dtype=float)


def gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x)."""
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def gelu_grad(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dY (Phi(x) + x phi(x))."""
    density = np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return dy * (0.5 * (1.0 + _erf(x / math.sqrt(2.0))) + x * density)


_SCALE, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1.0 + np.tanh(_SCALE * (x + _CUBIC * x**3)))


def gelu_tanh_grad(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dY times the derivative of the tanh form."""
    t = np.tanh(_SCALE * (x + _CUBIC * x**3))
    return dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * _SCALE * (1.0 + 3.0 * _CUBIC * x * x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def silu_grad(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dY s (1 + x (1 - s))."""
    s = sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))
