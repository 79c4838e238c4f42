"""Operator table: activations, softmax and their gradients."""

from __future__ import annotations

import math

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute, elements_flops, like
from ortgraph.ops.spec import COMPOSITE, OpSpec, register

_TANH_SCALE = math.sqrt(2.0 / math.pi)
_TANH_CUBIC = 0.044715


def _one_plus_erf(b: Builder, x: ir.Value) -> ir.Value:
    scaled = b.op("Mul", x, b.scalar(math.sqrt(0.5), x))
    return b.op("Add", b.op("Erf", scaled), b.scalar(1.0, x))


def _cubic(b: Builder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(k, tanh(x k)) with k = c + 0.044715 c x^2, the inner term of the tanh form."""
    square = b.op("Mul", x, x)
    cubic = b.op("Mul", square, b.scalar(_TANH_SCALE * _TANH_CUBIC, x))
    k = b.op("Add", cubic, b.scalar(_TANH_SCALE, x))
    return k, b.op("Tanh", b.op("Mul", x, k))


def _is_tanh(node: ir.Node) -> bool:
    return attribute(node, "approximate", "none") == "tanh"


def gelu(b: Builder, x: ir.Value, tanh: bool) -> ir.Value:
    """x Phi(x), with Phi by erf or by its tanh approximation."""
    inner = b.op("Add", _cubic(b, x)[1], b.scalar(1.0, x)) if tanh else _one_plus_erf(b, x)
    return b.op("Mul", b.op("Mul", x, b.scalar(0.5, x)), inner)


def gelu_grad(b: Builder, dy: ir.Value, x: ir.Value, tanh: bool) -> ir.Value:
    """dY times the derivative of GELU. Shares its first nodes with ``gelu`` so that CSE merges them."""
    half = b.scalar(0.5, x)
    if not tanh:
        inner = _one_plus_erf(b, x)
        density = b.op("Exp", b.op("Mul", b.op("Mul", x, x), b.scalar(-0.5, x)))
        slope = b.op("Mul", b.op("Mul", x, density), b.scalar(1.0 / math.sqrt(2.0 * math.pi), x))
        return b.op("Mul", dy, b.op("Add", b.op("Mul", inner, half), slope))
    k, t = _cubic(b, x)
    inner = b.op("Add", t, b.scalar(1.0, x))
    # d(x k)/dx = c + 3 (k - c); 1 - t^2 = (1 + t)(1 - t) shares the factor 1 + t.
    inner_slope = b.op("Sub", b.op("Mul", k, b.scalar(3.0, x)), b.scalar(2.0 * _TANH_SCALE, x))
    fall = b.op("Mul", x, b.op("Sub", b.scalar(1.0, x), t))
    rest = b.op("Add", b.op("Mul", fall, inner_slope), b.scalar(1.0, x))
    return b.op("Mul", dy, b.op("Mul", b.op("Mul", inner, half), rest))


def relu_grad(b: Builder, dy: ir.Value, y: ir.Value) -> ir.Value:
    """dY where Y > 0, else 0. Plain operators: faster than ONNX Runtime's own ReluGrad.

    A choice and no product: dY is infinite where sqrt(relu(x)) is 0, and infinity times 0 is no number.
    """
    open_ = b.op("Greater", y, b.scalar(0.0, y))
    return b.op("Where", open_, dy, b.scalar(0.0, dy))


def tanh_grad(b: Builder, dy: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Mul", dy, b.op("Sub", b.scalar(1.0, y), b.op("Mul", y, y)))


def sigmoid_grad(b: Builder, dy: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Mul", dy, b.op("Mul", y, b.op("Sub", b.scalar(1.0, y), y)))


def silu_grad(b: Builder, dy: ir.Value, x: ir.Value) -> ir.Value:
    s = b.op("Sigmoid", x)
    one = b.scalar(1.0, x)
    rest = b.op("Add", b.op("Mul", x, b.op("Sub", one, s)), one)
    return b.op("Mul", dy, b.op("Mul", s, rest))


def softmax_grad(b: Builder, dy: ir.Value, y: ir.Value, axis: int) -> ir.Value:
    """Y (dY - sum(Y dY))."""
    total = b.op("ReduceSum", b.op("Mul", dy, y), b.ints([axis]), keepdims=1)
    return b.op("Mul", y, b.op("Sub", dy, total))


def log_softmax_grad(b: Builder, dy: ir.Value, y: ir.Value, axis: int) -> ir.Value:
    """dY - exp(Y) sum(dY)."""
    total = b.op("ReduceSum", dy, b.ints([axis]), keepdims=1)
    return b.op("Sub", dy, b.op("Mul", b.op("Exp", y), total))


def _pair(function):
    """Expansion of an operator whose only inputs are the gradient and one forward value."""
    return lambda b, node: [function(b, node.inputs[0], node.inputs[1])]


def _over_axis(function):
    return lambda b, node: [function(b, node.inputs[0], node.inputs[1], attribute(node, "axis", -1))]


def _composite(op_type: str, expand, doc: str, flops: int, elementwise: bool = True) -> OpSpec:
    precision = "any" if op_type == "ReluGrad" else "accumulate"
    if op_type == "LogSoftmaxGrad":  # log-probabilities are large where probabilities are small
        precision = "float32"
    return OpSpec(
        COMPOSITE,
        op_type,
        elementwise=elementwise,
        precision=precision,
        infer=like(0),
        expand=expand,
        flops=elements_flops(flops),
        doc=doc,
    )


register(
    _composite("Gelu", lambda b, n: [gelu(b, n.inputs[0], _is_tanh(n))], "Y = X Phi(X)", 8),
    _composite(
        "GeluGrad",
        lambda b, n: [gelu_grad(b, n.inputs[0], n.inputs[1], _is_tanh(n))],
        "dX = dY (Phi(X) + X phi(X))",
        12,
    ),
    _composite("Silu", lambda b, n: [b.op("Mul", n.inputs[0], b.op("Sigmoid", n.inputs[0]))], "Y = X sigmoid(X)", 4),
    _composite("SiluGrad", _pair(silu_grad), "dX = dY s (1 + X (1 - s)), s = sigmoid(X)", 8),
    _composite("ReluGrad", _pair(relu_grad), "dX = dY where Y > 0, else 0", 2),
    _composite("TanhGrad", _pair(tanh_grad), "dX = dY (1 - Y^2)", 3),
    _composite("SigmoidGrad", _pair(sigmoid_grad), "dX = dY Y (1 - Y)", 3),
    _composite("SoftmaxGrad", _over_axis(softmax_grad), "dX = Y (dY - sum(Y dY, axis))", 4, elementwise=False),
    _composite("LogSoftmaxGrad", _over_axis(log_softmax_grad), "dX = dY - exp(Y) sum(dY, axis)", 4, elementwise=False),
)
register(
    OpSpec("", "Softmax", precision="float32", inplace=((0, 0),), infer=like(0), flops=elements_flops(10),
           doc="Y = exp(X) / sum(exp(X), axis)"),
    OpSpec("", "LogSoftmax", precision="float32", inplace=((0, 0),), infer=like(0), flops=elements_flops(10),
           doc="Y = X - log(sum(exp(X), axis))"),
    OpSpec("", "Hardmax", precision="any", infer=like(0), doc="Y = 1 at the first greatest element, else 0"),
)  # fmt: skip
