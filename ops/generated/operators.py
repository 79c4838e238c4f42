"""Operators that a region may hold: each is written as expressions of one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.ops.generated.expressions import CHOICE, NUMBER, ROW, Access, Expr, Maker, Region, Result, Width
from ortgraph.ops.shapes import attribute, decimal, given
from ortgraph.ops.spec import COMPOSITE

FLOATS = (ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
Dims = tuple[int | str, ...]

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


class Reader:
    """Turns the nodes of a region's body, in order, into expressions."""

    def __init__(self, inputs: Sequence[ir.Value]) -> None:
        self.make = Maker()
        self._index = {value: i for i, value in enumerate(inputs)}
        self._values: dict[ir.Value, int] = {}
        self.trim = 0  # trailing dimensions of size 1 that every value has
        self.draws: list[str] = []

    def space(self, value: ir.Value) -> tuple[Dims, Width]:
        """(leading dimensions, width) of a value."""
        dims = dims_of(value)
        dims = dims[: len(dims) - self.trim] if len(dims) >= self.trim else ()
        if not dims:
            return (), 1
        return dims[:-1], dims[-1]

    def read(self, value: ir.Value, lead: Dims, last: Width) -> int:
        """The value, broadcast to rows of (leading dimensions, width)."""
        found = self._values.get(value)
        if found is not None:
            return found
        constant = ir.convenience.get_const_tensor(value)
        if constant is not None:
            number = constant.numpy().reshape(-1)[0]
            return self.make.choice(bool(number)) if constant.dtype == ir.DataType.BOOL else self.make.const(number)
        dims = dims_of(value)
        dims = dims[: len(dims) - self.trim] if len(dims) >= self.trim else ()
        dims = (1,) * (len(lead) + 1 - len(dims)) + dims
        leading = tuple((size, own != 1) for size, own in zip(lead, dims[:-1], strict=True))
        varies = dims[-1] != 1
        access = Access(self._index[value], leading, last if varies else ROW, varies)
        kind = CHOICE if value.dtype == ir.DataType.BOOL else NUMBER
        return self.make.add(Expr("load", (), last if varies else ROW, kind, access))

    def index_of(self, value: ir.Value) -> int:
        """Position of an input."""
        return self._index[value]

    def put(self, value: ir.Value, expr: int) -> None:
        self._values[value] = expr

    def alias(self, node: ir.Node) -> None:
        source = node.inputs[0]
        assert source is not None
        self.put(node.outputs[0], self.read(source, *self.space(source)))

    def operands(self, node: ir.Node) -> list[int]:
        """All operands of an element-wise node, broadcast to its output."""
        space = self.space(node.outputs[0])
        return [self.read(v, *space) for v in node.inputs if v is not None]


def dims_of(value: ir.Value) -> Dims:
    """The recorded dimensions: numbers, and names of symbolic ones."""
    assert value.shape is not None
    return tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)


def read_region(body: ir.Function) -> Region:
    """The region that a function body describes. Values of the body carry dtype and dimensions."""
    inputs = list(body.inputs)
    reader = Reader(inputs)
    values = [v for v in (*inputs, *(o for n in body for o in n.outputs if n.op_type != "Constant"))]
    shapes = [dims_of(v) for v in values]
    while any(len(s) > reader.trim for s in shapes) and all(
        s[len(s) - 1 - reader.trim] == 1 for s in shapes if len(s) > reader.trim
    ):
        reader.trim += 1
    results: dict[ir.Value, Result] = {}
    for node in body:
        if node.op_type == "Constant" and node.domain == "":
            continue
        if is_column_sum(node):
            source = node.inputs[0]
            assert source is not None
            lead, width = reader.space(source)
            results[node.outputs[0]] = Result(reader.read(source, lead, width), True, node.outputs[0].dtype, width)  # type: ignore[arg-type]
            continue
        for position, expr in _columns(reader, node).items():
            width = reader.space(node.inputs[0])[1]  # type: ignore[arg-type]
            results[node.outputs[position]] = Result(expr, True, node.outputs[position].dtype, width)  # type: ignore[arg-type]
        HANDLERS[node.domain, node.op_type](reader, node)
    found = []
    for output in body.outputs:
        known = results.get(output)
        if known is None:
            lead, width = reader.space(output)
            expr = reader.read(output, lead, width)
            known = Result(expr, False, output.dtype, ROW if width == 1 else width)  # type: ignore[arg-type]
        found.append(known)
    types = tuple(v.dtype for v in inputs)
    rows = tuple(dict.fromkeys(reader.space(value)[0] for value in rows_of(body)))
    return Region(tuple(reader.make.exprs), tuple(found), types, tuple(reader.draws), rows)  # type: ignore[arg-type]


def rows_of(body: ir.Function) -> list[ir.Value]:
    """Values of a body that have all its rows: an output or what it sums, and both sides of reshapes of whole rows."""
    output = body.outputs[0]
    node = output.producer()
    assert node is not None
    summed = is_column_sum(node) or (node.op_type == "LayerNormGrad" and output.index() != 0)
    found = [node.inputs[0] if summed else output]
    for node in body:
        if node.op_type == "Reshape" and dims_of(node.inputs[0])[-1:] == dims_of(node.outputs[0])[-1:]:  # type: ignore[arg-type]
            found += [node.inputs[0], node.outputs[0]]
    return [v for v in found if v is not None]


Handler = Callable[[Reader, ir.Node], None]
HANDLERS: dict[tuple[str, str], Handler] = {}


def _handles(*names: str, domain: str = "") -> Callable[[Handler], Handler]:
    def wrap(handler: Handler) -> Handler:
        HANDLERS.update({(domain, name): handler for name in names})
        return handler

    return wrap


@_handles(*_SIMPLE)
def _simple(reader: Reader, node: ir.Node) -> None:
    reader.put(node.outputs[0], reader.make.op(_SIMPLE[node.op_type], *reader.operands(node)))


@_handles(*_VARIADIC)
def _variadic(reader: Reader, node: ir.Node) -> None:
    first, *rest = reader.operands(node)
    for other in rest:
        first = reader.make.op(_VARIADIC[node.op_type], first, other)
    reader.put(node.outputs[0], first)


@_handles(*_COMPARE)
def _compare(reader: Reader, node: ir.Node) -> None:
    reader.put(node.outputs[0], reader.make.op(_COMPARE[node.op_type], *reader.operands(node), kind=CHOICE))


@_handles(*_LOGIC)
def _logic(reader: Reader, node: ir.Node) -> None:
    reader.put(node.outputs[0], reader.make.op(_LOGIC[node.op_type], *reader.operands(node), kind=CHOICE))


@_handles("IsNaN", "IsInf")
def _is(reader: Reader, node: ir.Node) -> None:
    (x,) = reader.operands(node)
    m = reader.make
    made = m.op("is_nan", x, kind=CHOICE) if node.op_type == "IsNaN" else m.op("is_inf", x, kind=CHOICE)
    reader.put(node.outputs[0], made)


@_handles("Where")
def _where(reader: Reader, node: ir.Node) -> None:
    kind = CHOICE if node.outputs[0].dtype == ir.DataType.BOOL else NUMBER
    name = "select_mask" if kind == CHOICE else "select"
    reader.put(node.outputs[0], reader.make.op(name, *reader.operands(node), kind=kind))


@_handles("Expand")
def _expand(reader: Reader, node: ir.Node) -> None:
    source = node.inputs[0]
    assert source is not None
    reader.put(node.outputs[0], reader.read(source, *reader.space(node.outputs[0])))


@_handles("Cast")
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


@_handles(*VIEWS)
def _view(reader: Reader, node: ir.Node) -> None:
    reader.alias(node)


@_handles("Clip")
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


@_handles("Pow")
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


@_handles("LeakyRelu")
def _leaky_relu(reader: Reader, node: ir.Node) -> None:
    (x,), m = reader.operands(node), reader.make
    negative = m.op("less", x, m.const(0), kind=CHOICE)
    scaled = m.op("mul", x, m.const(attribute(node, "alpha", 0.01)))
    reader.put(node.outputs[0], m.op("select", negative, scaled, x))


@_handles("HardSigmoid")
def _hard_sigmoid(reader: Reader, node: ir.Node) -> None:
    (x,), m = reader.operands(node), reader.make
    line = m.op("mul", x, m.const(attribute(node, "alpha", 0.2)))
    line = m.op("add", line, m.const(attribute(node, "beta", 0.5)))
    reader.put(node.outputs[0], m.op("clip_high", m.op("clip_low", line, m.const(0)), m.const(1)))


@_handles("HardSwish")
def _hard_swish(reader: Reader, node: ir.Node) -> None:
    (x,), m = reader.operands(node), reader.make
    line = m.op("add", m.op("mul", x, m.const(1 / 6)), m.const(0.5))
    reader.put(node.outputs[0], m.op("mul", x, m.op("clip_high", m.op("clip_low", line, m.const(0)), m.const(1))))


# --- over the last axis --------------------------------------------------------------------------------------------


@_handles("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2")
def _reduction(reader: Reader, node: ir.Node) -> None:
    source = node.inputs[0]
    assert source is not None
    lead, width = reader.space(source)
    x, m = reader.read(source, lead, width), reader.make
    name = node.op_type
    if name in ("ReduceSumSquare", "ReduceL2"):
        total = m.reduce("sum", m.op("mul", x, x), width)
        reader.put(node.outputs[0], m.op("sqrt", total) if name == "ReduceL2" else total)
    elif name == "ReduceMean":
        reader.put(node.outputs[0], m.mean(x, width))
    else:
        reader.put(node.outputs[0], m.reduce({"Sum": "sum", "Max": "max", "Min": "min"}[name[6:]], x, width))


def _row(reader: Reader, node: ir.Node, position: int) -> tuple[int, Width]:
    """An operand as a row of its own shape, and its width."""
    value = node.inputs[position]
    assert value is not None
    lead, width = reader.space(value)
    return reader.read(value, lead, width), width


@_handles("Softmax")
def _softmax(reader: Reader, node: ir.Node) -> None:
    x, width = _row(reader, node, 0)
    m = reader.make
    e = m.op("exp", m.op("sub", x, m.reduce("peak", x, width)))
    reader.put(node.outputs[0], m.op("mul", e, m.op("reciprocal", m.reduce("sum", e, width))))


@_handles("LogSoftmax")
def _log_softmax(reader: Reader, node: ir.Node) -> None:
    x, width = _row(reader, node, 0)
    m = reader.make
    shifted = m.op("sub", x, m.reduce("peak", x, width))
    total = m.reduce("sum", m.op("exp", shifted), width)
    reader.put(node.outputs[0], m.op("sub", shifted, m.op("log", total)))


@_handles("SoftmaxGrad", domain=COMPOSITE)
def _softmax_grad(reader: Reader, node: ir.Node) -> None:
    (dy, width), (y, _) = _row(reader, node, 0), _row(reader, node, 1)
    m = reader.make
    total = m.reduce("sum", m.op("mul", dy, y), width)
    reader.put(node.outputs[0], m.op("mul", y, m.op("sub", dy, total)))


@_handles("LogSoftmaxGrad", domain=COMPOSITE)
def _log_softmax_grad(reader: Reader, node: ir.Node) -> None:
    (dy, width), (y, _) = _row(reader, node, 0), _row(reader, node, 1)
    m = reader.make
    reader.put(node.outputs[0], m.op("sub", dy, m.op("mul", m.op("exp", y), m.reduce("sum", dy, width))))


@_handles("LayerNormalization")
def _layer_norm(reader: Reader, node: ir.Node) -> None:
    x, width = _row(reader, node, 0)
    m = reader.make
    space = reader.space(node.inputs[0])  # type: ignore[arg-type]
    mean = m.mean(x, width)
    centred = m.op("sub", x, mean)
    variance = m.mean(m.op("mul", centred, centred), width)
    inverse = m.op("reciprocal", m.op("sqrt", m.op("add", variance, m.const(attribute(node, "epsilon", 1e-5)))))
    y = m.op("mul", m.op("mul", centred, inverse), reader.read(node.inputs[1], *space))  # type: ignore[arg-type]
    bias = given(node, 2)
    if bias is not None:
        y = m.op("add", y, reader.read(bias, *space))
    for output, expr in zip(node.outputs, (y, mean, inverse), strict=False):
        reader.put(output, expr)


@_handles("LayerNormGrad", domain=COMPOSITE)
def _layer_norm_grad(reader: Reader, node: ir.Node) -> None:
    m, (dy, width) = reader.make, _row(reader, node, 0)
    space = reader.space(node.inputs[0])  # type: ignore[arg-type]
    normal, inverse = _normalized(reader, node)
    scale = given(node, 4)
    g = dy if scale is None else m.op("mul", dy, reader.read(scale, *space))
    centred = m.op("sub", g, m.mean(g, width))
    along = m.mean(m.op("mul", g, normal), width)
    reader.put(node.outputs[0], m.op("mul", m.op("sub", centred, m.op("mul", normal, along)), inverse))


def _normalized(reader: Reader, node: ir.Node) -> tuple[int, int]:
    m, space = reader.make, reader.space(node.inputs[0])  # type: ignore[arg-type]
    x, mean, inverse = (reader.read(node.inputs[i], *space) for i in (1, 2, 3))  # type: ignore[arg-type]
    return m.op("mul", m.op("sub", x, mean), inverse), inverse


def is_column_sum(node: ir.Node) -> bool:
    """Whether a node of a body sums over all dimensions but the last."""
    if node.op_type != "ReduceSum" or node.domain != "":
        return False
    axes = constant_ints(node.inputs[1])
    return axes is not None and axes == list(range(len(dims_of(node.inputs[0])) - 1)) and axes != []  # type: ignore[arg-type]


def _columns(reader: Reader, node: ir.Node) -> dict[int, int]:
    """Outputs that are sums over the rows, with what is summed."""
    if (node.domain, node.op_type) != (COMPOSITE, "LayerNormGrad"):
        return {}
    dy, _ = _row(reader, node, 0)
    found = {}
    if len(node.outputs) > 1 and node.outputs[1].name:
        found[1] = reader.make.op("mul", dy, _normalized(reader, node)[0])
    if len(node.outputs) > 2 and node.outputs[2].name:
        found[2] = dy
    return found


# --- composites ----------------------------------------------------------------------------------------------------


def _activation(name: str, node: ir.Node) -> str:
    return f"{name}_tanh" if attribute(node, "approximate", "none") == "tanh" else name


@_handles("Gelu", "Silu", domain=COMPOSITE)
@_handles("Gelu")
def _smooth(reader: Reader, node: ir.Node) -> None:
    (x,), m = reader.operands(node), reader.make
    if node.op_type == "Silu":
        reader.put(node.outputs[0], m.op("mul", x, m.op("sigmoid", x)))
    else:
        reader.put(node.outputs[0], m.op(_activation("gelu", node), x))


@_handles("GeluGrad", "SiluGrad", domain=COMPOSITE)
def _smooth_grad(reader: Reader, node: ir.Node) -> None:
    (dy, x), m = reader.operands(node), reader.make
    slope = "silu_slope" if node.op_type == "SiluGrad" else _activation("gelu", node) + "_slope"
    reader.put(node.outputs[0], m.op("mul", dy, m.op(slope, x)))


@_handles("ReluGrad", "TanhGrad", "SigmoidGrad", domain=COMPOSITE)
def _gradient(reader: Reader, node: ir.Node) -> None:
    (dy, y), m = reader.operands(node), reader.make
    if node.op_type == "ReluGrad":
        made = m.op("select", m.op("greater", y, m.const(0), kind=CHOICE), dy, m.const(0))
    elif node.op_type == "TanhGrad":
        made = m.op("mul", dy, m.op("sub", m.const(1), m.op("mul", y, y)))
    else:
        made = m.op("mul", dy, m.op("mul", y, m.op("sub", m.const(1), y)))
    reader.put(node.outputs[0], made)


def _keep_scale(node: ir.Node) -> float:
    ratio = decimal(node, "ratio", 0.5)
    return 0.0 if ratio >= 1.0 else float(np.float32(1.0 / (1.0 - ratio)))


def _scaled(reader: Reader, x: int, mask: int, node: ir.Node) -> int:
    m = reader.make
    return m.op("mul", m.op("mul", x, m.op("indicator", mask)), m.const(_keep_scale(node)))


@_handles("Dropout", domain=COMPOSITE)
def _dropout(reader: Reader, node: ir.Node) -> None:
    x, width = _row(reader, node, 0)
    mask = reader.make.add(Expr("draw", _counters(reader, node), width, CHOICE, _draw(reader, node)))
    reader.put(node.outputs[0], _scaled(reader, x, mask, node))
    if len(node.outputs) > 1:
        reader.put(node.outputs[1], mask)


@_handles("DropoutGrad", domain=COMPOSITE)
def _dropout_grad(reader: Reader, node: ir.Node) -> None:
    (x, _), (mask, _) = _row(reader, node, 0), _row(reader, node, 1)
    reader.put(node.outputs[0], _scaled(reader, x, mask, node))


def _counters(reader: Reader, node: ir.Node) -> tuple[int, ...]:
    """Key and Step of a drawing node: loads that are not numbers."""
    return tuple(
        reader.make.add(Expr("counter", data=Access(reader.index_of(v), (), 1, False)))  # type: ignore[arg-type]
        for v in node.inputs[1:3]
    )


def _draw(reader: Reader, node: ir.Node) -> tuple[str, float]:
    """(attribute that holds the node's number, ratio)."""
    reference = node.attributes["node"]
    name = reference.ref_attr_name or ""
    if name not in reader.draws:
        reader.draws.append(name)
    return name, decimal(node, "ratio", 0.5)


# --- columns change places -----------------------------------------------------------------------------------------


@_handles("Slice")
def _slice(reader: Reader, node: ir.Node) -> None:
    x, width = _row(reader, node, 0)
    start, end = slice_columns(node)
    reader.put(node.outputs[0], _part(reader, x, start, end))
    assert isinstance(width, int)


def _part(reader: Reader, x: int, start: int, end: int) -> int:
    kind = reader.make.exprs[x].kind
    if reader.make.exprs[x].width == ROW:
        return x
    return reader.make.add(Expr("slice", (x,), end - start, kind, start))


@_handles("Split")
def _split(reader: Reader, node: ir.Node) -> None:
    x, _ = _row(reader, node, 0)
    at = 0
    for output in node.outputs:
        size = dims_of(output)[-1]
        assert isinstance(size, int)
        reader.put(output, _part(reader, x, at, at + size))
        at += size


@_handles("Concat")
def _concat(reader: Reader, node: ir.Node) -> None:
    parts = [_row(reader, node, i) for i in range(len(node.inputs))]
    kind = reader.make.exprs[parts[0][0]].kind
    widths = tuple(width for _, width in parts)
    total = sum(w for w in widths if isinstance(w, int))
    made = reader.make.add(Expr("concat", tuple(x for x, _ in parts), total, kind, widths))
    reader.put(node.outputs[0], made)


@_handles("Pad")
def _pad(reader: Reader, node: ir.Node) -> None:
    x, width = _row(reader, node, 0)
    assert isinstance(width, int)
    before, after = pad_columns(node)
    fill = given(node, 2)
    number = 0.0 if fill is None or fill.const_value is None else float(fill.const_value.numpy().reshape(-1)[0])
    other = reader.make.const(number)
    made = Expr("concat", (other, x, other), before + width + after, NUMBER, (before, width, after))
    reader.put(node.outputs[0], reader.make.add(made))


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """Elements of a constant of a body."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.size > 64 else [int(i) for i in tensor.numpy().reshape(-1)]


def slice_columns(node: ir.Node) -> tuple[int, int]:
    """First column and the one behind the last of a Slice of the last axis."""
    width = dims_of(node.inputs[0])[-1]  # type: ignore[arg-type]
    start, end = constant_ints(node.inputs[1]), constant_ints(node.inputs[2])
    assert isinstance(width, int) and start is not None and end is not None
    first, last, _ = slice(start[0], end[0]).indices(width)
    return first, max(first, last)


def pad_columns(node: ir.Node) -> tuple[int, int]:
    """Columns put before and behind a row by a Pad of the last axis."""
    pads = constant_ints(node.inputs[1])
    assert pads is not None
    return pads[len(pads) // 2 - 1], pads[-1]
