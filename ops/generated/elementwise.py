"""Element-wise operators that a region may hold, and views of whole rows."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.ops.generated.expressions import CHOICE, NUMBER
from ortgraph.ops.generated.reader import Reader, handles
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import COMPOSITE

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
_SIMPLE = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Neg": "neg", "Abs": "abs", "Exp": "exp", "Log": "log",
    "Sqrt": "sqrt", "Reciprocal": "reciprocal", "Sigmoid": "sigmoid", "Tanh": "tanh", "Erf": "erf", "Relu": "relu",
    "Floor": "floor", "Ceil": "ceil", "Round": "round", "Sign": "sign", "Sin": "sin", "Cos": "cos",
    "Softplus": "softplus",
}  # fmt: skip
_VARIADIC = {"Max": "maximum", "Min": "minimum", "Sum": "add"}
_COMPARE = {
    "Greater": "greater", "GreaterOrEqual": "greater_equal", "Less": "less", "LessOrEqual": "less_equal",
    "Equal": "equal",
}  # fmt: skip
_LOGIC = {"And": "and", "Or": "or", "Xor": "xor", "Not": "not"}


@handles(*_SIMPLE)
def _simple(reader: Reader, node: ir.Node) -> None:
    reader.put(node.outputs[0], reader.make.op(_SIMPLE[node.op_type], *reader.operands(node)))


@handles(*_VARIADIC)
def _variadic(reader: Reader, node: ir.Node) -> None:
    first, *rest = reader.operands(node)
    for other in rest:
        first = reader.make.op(_VARIADIC[node.op_type], first, other)
    reader.put(node.outputs[0], first)


@handles(*_COMPARE)
def _compare(reader: Reader, node: ir.Node) -> None:
    reader.put(node.outputs[0], reader.make.op(_COMPARE[node.op_type], *reader.operands(node), kind=CHOICE))


@handles(*_LOGIC)
def _logic(reader: Reader, node: ir.Node) -> None:
    reader.put(node.outputs[0], reader.make.op(_LOGIC[node.op_type], *reader.operands(node), kind=CHOICE))


@handles("IsNaN", "IsInf")
def _is(reader: Reader, node: ir.Node) -> None:
    (x,) = reader.operands(node)
    m = reader.make
    made = m.op("is_nan", x, kind=CHOICE) if node.op_type == "IsNaN" else m.op("is_inf", x, kind=CHOICE)
    reader.put(node.outputs[0], made)


@handles("Where")
def _where(reader: Reader, node: ir.Node) -> None:
    kind = CHOICE if node.outputs[0].dtype == ir.DataType.BOOL else NUMBER
    name = "select_mask" if kind == CHOICE else "select"
    reader.put(node.outputs[0], reader.make.op(name, *reader.operands(node), kind=kind))


@handles("Expand")
def _expand(reader: Reader, node: ir.Node) -> None:
    source = node.inputs[0]
    assert source is not None
    reader.put(node.outputs[0], reader.read(source, *reader.space(node.outputs[0])))


@handles("Cast")
def _cast(reader: Reader, node: ir.Node) -> None:
    source, to = node.inputs[0], node.outputs[0].dtype
    assert source is not None
    x, m = reader.read(source, *reader.space(source)), reader.make
    from_bool = source.dtype == ir.DataType.BOOL
    if to == ir.DataType.BOOL:
        x = x if from_bool else m.op("truth", x, kind=CHOICE)
    elif from_bool:
        x = m.op("indicator", x)
    elif to == ir.DataType.BFLOAT16 and source.dtype != to:
        x = m.op("as_bf16", x)
    elif to == ir.DataType.FLOAT16 and source.dtype != to:
        x = m.op("as_half", x)
    reader.put(node.outputs[0], x)


@handles(*VIEWS)
def _view(reader: Reader, node: ir.Node) -> None:
    reader.alias(node)


@handles("Clip")
def _clip(reader: Reader, node: ir.Node) -> None:
    space = reader.space(node.outputs[0])
    m = reader.make
    x = reader.read(node.inputs[0], *space)  # type: ignore[arg-type]
    low, high = given(node, 1), given(node, 2)
    if low is not None:
        x = m.op("clip_low", x, reader.read(low, *space))
    if high is not None:
        x = m.op("clip_high", x, reader.read(high, *space))
    reader.put(node.outputs[0], x)


@handles("Pow")
def _pow(reader: Reader, node: ir.Node) -> None:
    m = reader.make
    x, y = reader.operands(node)
    exponent = m.exprs[y].data if m.exprs[y].op == "const" else None
    square = m.op("mul", x, x)
    forms = {
        2.0: lambda: square,
        3.0: lambda: m.op("mul", square, x),
        0.5: lambda: m.op("sqrt", x),
        1.0: lambda: x,
        -1.0: lambda: m.op("reciprocal", x),
        -2.0: lambda: m.op("reciprocal", square),
        -0.5: lambda: m.op("reciprocal", m.op("sqrt", x)),
    }
    made = forms[exponent]() if exponent in forms else m.op("pow", x, y)
    reader.put(node.outputs[0], made)


@handles("LeakyRelu")
def _leaky_relu(reader: Reader, node: ir.Node) -> None:
    (x,), m = reader.operands(node), reader.make
    negative = m.op("less", x, m.const(0), kind=CHOICE)
    scaled = m.op("mul", x, m.const(attribute(node, "alpha", 0.01)))
    reader.put(node.outputs[0], m.op("select", negative, scaled, x))


@handles("HardSigmoid")
def _hard_sigmoid(reader: Reader, node: ir.Node) -> None:
    (x,), m = reader.operands(node), reader.make
    line = m.op("mul", x, m.const(attribute(node, "alpha", 0.2)))
    line = m.op("add", line, m.const(attribute(node, "beta", 0.5)))
    reader.put(node.outputs[0], m.op("clip_high", m.op("clip_low", line, m.const(0)), m.const(1)))


@handles("HardSwish")
def _hard_swish(reader: Reader, node: ir.Node) -> None:
    (x,), m = reader.operands(node), reader.make
    line = m.op("add", m.op("mul", x, m.const(1 / 6)), m.const(0.5))
    reader.put(node.outputs[0], m.op("mul", x, m.op("clip_high", m.op("clip_low", line, m.const(0)), m.const(1))))


def _activation(name: str, node: ir.Node) -> str:
    return f"{name}_tanh" if attribute(node, "approximate", "none") == "tanh" else name


@handles("Gelu", "Silu", domain=COMPOSITE)
@handles("Gelu")
def _smooth(reader: Reader, node: ir.Node) -> None:
    (x,), m = reader.operands(node), reader.make
    if node.op_type == "Silu":
        reader.put(node.outputs[0], m.op("mul", x, m.op("sigmoid", x)))
    else:
        reader.put(node.outputs[0], m.op(_activation("gelu", node), x))


@handles("GeluGrad", "SiluGrad", domain=COMPOSITE)
def _smooth_grad(reader: Reader, node: ir.Node) -> None:
    (dy, x), m = reader.operands(node), reader.make
    slope = "silu_slope" if node.op_type == "SiluGrad" else _activation("gelu", node) + "_slope"
    reader.put(node.outputs[0], m.op("mul", dy, m.op(slope, x)))


@handles("ReluGrad", "TanhGrad", "SigmoidGrad", domain=COMPOSITE)
def _gradient(reader: Reader, node: ir.Node) -> None:
    (dy, y), m = reader.operands(node), reader.make
    if node.op_type == "ReluGrad":
        made = m.op("select", m.op("greater", y, m.const(0), kind=CHOICE), dy, m.const(0))
    elif node.op_type == "TanhGrad":
        made = m.op("mul", dy, m.op("sub", m.const(1), m.op("mul", y, y)))
    else:
        made = m.op("mul", dy, m.op("mul", y, m.op("sub", m.const(1), y)))
    reader.put(node.outputs[0], made)
