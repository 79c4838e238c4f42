"""Element-wise functions without a gradient builder: kept as they are, with the derivative written by us.

Each is shown to the builder as a Tanh. The TanhGrad that it answers with reads the stand-in's output, which names the
stand-in; it becomes dX = dY f'(X) in standard operators, and the stand-in becomes the function again. At kinks the
derivative is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ortgraph.capture.legalize_saved import BY, COMPOSITE
from ortgraph.capture.onnx_joint import Joint
from ortgraph.graph import Names, replace_value
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder

# (builder, node, dY, X, Y) -> dX
Derivative = Callable[[Builder, ir.Node, ir.Value, ir.Value, ir.Value], ir.Value]


def stand_in(path: list[ir.Node], names: Names) -> Callable[[Joint], None]:
    """Show the functions of this table as Tanh; the returned step puts them back and writes their derivatives."""
    held: dict[ir.Node, tuple[str, dict[str, ir.Attr]]] = {}
    for node in path:
        if node.op_type in DERIVATIVES and node.domain in ("", "ai.onnx"):
            held[node] = (node.op_type, dict(node.attributes))
            node.op_type = "Tanh"
            node.attributes.clear()

    def finish(joint: Joint) -> None:
        for node, (op_type, attributes) in held.items():
            node.op_type = op_type
            node.attributes.update(attributes)
        for node in joint.backward:
            if node.op_type == "TanhGrad" and node.inputs[1] is not None and node.inputs[1].producer() in held:
                _write_derivative(node, node.inputs[1].producer(), names)
        for node in held:
            if node.op_type == "Gelu":
                node.domain = COMPOSITE
                node.graph.opset_imports.setdefault(COMPOSITE, 1)  # type: ignore[union-attr]

    return finish


def _write_derivative(gradient: ir.Node, function: ir.Node | None, names: Names) -> None:
    assert function is not None and isinstance(gradient.graph, ir.Graph)
    build = Builder(gradient.graph, BY, before=gradient, origins=[gradient], names=names)
    dy, x = gradient.inputs[0], function.inputs[0]
    assert dy is not None and x is not None
    replace_value(gradient.outputs[0], DERIVATIVES[function.op_type](build, function, dy, x, function.outputs[0]))
    remove_node(gradient)


def _masked(b: Builder, condition: ir.Value, dy: ir.Value) -> ir.Value:
    """dY where the condition holds, else 0."""
    return b.op("Where", condition, dy, b.scalar(0.0, dy))


def _scaled(b: Builder, x: ir.Value, factor: float) -> ir.Value:
    return x if factor == 1.0 else b.op("Mul", x, b.scalar(factor, x))


def _exponential(b: Builder, dy: ir.Value, x: ir.Value, positive: float, negative: float, width: float) -> ir.Value:
    """dY * (positive where X > 0, else negative * exp(X / width)); the exponent is bounded so that none overflows."""
    exponent = _scaled(b, b.op("Min", x, b.scalar(0.0, x)), 1.0 / width)
    below = _scaled(b, b.op("Exp", exponent), negative)
    above = b.op("Greater", x, b.scalar(0.0, x))
    return b.op("Mul", dy, b.op("Where", above, b.scalar(positive, x), below))


def _elu(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return _exponential(b, dy, x, 1.0, node.attributes.get_float("alpha", 1.0), 1.0)


def _selu(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    alpha = node.attributes.get_float("alpha", 1.67326319217681884765625)
    gamma = node.attributes.get_float("gamma", 1.05070102214813232421875)
    return _exponential(b, dy, x, gamma, gamma * alpha, 1.0)


def _celu(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return _exponential(b, dy, x, 1.0, 1.0, node.attributes.get_float("alpha", 1.0))


def _leaky_relu(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    slope = _scaled(b, dy, node.attributes.get_float("alpha", 0.01))
    return b.op("Where", b.op("Greater", x, b.scalar(0.0, x)), dy, slope)


def _softplus(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Mul", dy, b.op("Sigmoid", x))


def _softsign(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    width = b.op("Add", b.op("Abs", x), b.scalar(1.0, x))
    return b.op("Div", dy, b.op("Mul", width, width))


def _hard_sigmoid(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    alpha = node.attributes.get_float("alpha", 0.2)
    inside = b.op("And", b.op("Greater", y, b.scalar(0.0, y)), b.op("Less", y, b.scalar(1.0, y)))
    return _masked(b, inside, _scaled(b, dy, alpha))


def _hard_swish(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    slope = b.op("Add", _scaled(b, x, 1.0 / 3.0), b.scalar(0.5, x))
    inside = b.op("Where", b.op("Less", x, b.scalar(3.0, x)), b.op("Mul", dy, slope), dy)
    return _masked(b, b.op("Greater", x, b.scalar(-3.0, x)), inside)


def _mish(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    tanh = b.op("Tanh", b.op("Softplus", x))
    rest = b.op("Sub", b.scalar(1.0, x), b.op("Mul", tanh, tanh))
    inner = b.op("Mul", b.op("Mul", x, b.op("Sigmoid", x)), rest)
    return b.op("Mul", dy, b.op("Add", tanh, inner))


def _thresholded_relu(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return _masked(b, b.op("Greater", x, b.scalar(node.attributes.get_float("alpha", 1.0), x)), dy)


def _shrink(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    bound = b.scalar(node.attributes.get_float("lambd", 0.5), x)
    return _masked(b, b.op("Greater", b.op("Abs", x), bound), dy)


def _gelu(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    approximate = node.attributes.get_string("approximate", "none")
    return b.op("GeluGrad", dy, x, domain=COMPOSITE, approximate=approximate)


def _square_plus(b: Builder, x: ir.Value, sign: float, constant: float) -> ir.Value:
    """constant + sign X^2"""
    return b.op("Add" if sign > 0 else "Sub", b.scalar(constant, x), b.op("Mul", x, x))


def _atan(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Div", dy, _square_plus(b, x, 1, 1.0))


def _atanh(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Div", dy, _square_plus(b, x, -1, 1.0))


def _asin(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Div", dy, b.op("Sqrt", _square_plus(b, x, -1, 1.0)))


def _acos(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Neg", _asin(b, node, dy, x, y))


def _asinh(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Div", dy, b.op("Sqrt", _square_plus(b, x, 1, 1.0)))


def _acosh(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Div", dy, b.op("Sqrt", _square_plus(b, x, 1, -1.0)))


def _sinh(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Mul", dy, b.op("Cosh", x))


def _cosh(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Mul", dy, b.op("Sinh", x))


def _tan(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.op("Mul", dy, _square_plus(b, y, 1, 1.0))


DERIVATIVES: dict[str, Derivative] = {
    "Acos": _acos,
    "Acosh": _acosh,
    "Asin": _asin,
    "Asinh": _asinh,
    "Atan": _atan,
    "Atanh": _atanh,
    "Celu": _celu,
    "Cosh": _cosh,
    "Elu": _elu,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "LeakyRelu": _leaky_relu,
    "Mish": _mish,
    "Selu": _selu,
    "Shrink": _shrink,
    "Sinh": _sinh,
    "Softplus": _softplus,
    "Softsign": _softsign,
    "Tan": _tan,
    "ThresholdedRelu": _thresholded_relu,
}
