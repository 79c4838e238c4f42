"""Operators over the last axis that a region may hold: sums, softmax, normalization, dropout, parts of rows."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortgraph.ops.generated.expressions import CHOICE, NUMBER, ROW, Access, Expr
from ortgraph.ops.generated.reader import Reader, constant_ints, dims_of, handles, row_of
from ortgraph.ops.shapes import attribute, decimal, given
from ortgraph.ops.spec import COMPOSITE


@handles("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2")
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


@handles("Softmax")
def _softmax(reader: Reader, node: ir.Node) -> None:
    x, width = row_of(reader, node, 0)
    m = reader.make
    e = m.op("exp", m.op("sub", x, m.reduce("peak", x, width)))
    reader.put(node.outputs[0], m.op("mul", e, m.op("reciprocal", m.reduce("sum", e, width))))


@handles("LogSoftmax")
def _log_softmax(reader: Reader, node: ir.Node) -> None:
    x, width = row_of(reader, node, 0)
    m = reader.make
    shifted = m.op("sub", x, m.reduce("peak", x, width))
    total = m.reduce("sum", m.op("exp", shifted), width)
    reader.put(node.outputs[0], m.op("sub", shifted, m.op("log", total)))


@handles("SoftmaxGrad", domain=COMPOSITE)
def _softmax_grad(reader: Reader, node: ir.Node) -> None:
    (dy, width), (y, _) = row_of(reader, node, 0), row_of(reader, node, 1)
    m = reader.make
    total = m.reduce("sum", m.op("mul", dy, y), width)
    reader.put(node.outputs[0], m.op("mul", y, m.op("sub", dy, total)))


@handles("LogSoftmaxGrad", domain=COMPOSITE)
def _log_softmax_grad(reader: Reader, node: ir.Node) -> None:
    (dy, width), (y, _) = row_of(reader, node, 0), row_of(reader, node, 1)
    m = reader.make
    reader.put(node.outputs[0], m.op("sub", dy, m.op("mul", m.op("exp", y), m.reduce("sum", dy, width))))


@handles("LayerNormalization")
def _layer_norm(reader: Reader, node: ir.Node) -> None:
    x, width = row_of(reader, node, 0)
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


@handles("LayerNormGrad", domain=COMPOSITE)
def _layer_norm_grad(reader: Reader, node: ir.Node) -> None:
    m, (dy, width) = reader.make, row_of(reader, node, 0)
    space = reader.space(node.inputs[0])  # type: ignore[arg-type]
    normal, inverse = normalized(reader, node)
    scale = given(node, 4)
    g = dy if scale is None else m.op("mul", dy, reader.read(scale, *space))
    centred = m.op("sub", g, m.mean(g, width))
    along = m.mean(m.op("mul", g, normal), width)
    reader.put(node.outputs[0], m.op("mul", m.op("sub", centred, m.op("mul", normal, along)), inverse))


def normalized(reader: Reader, node: ir.Node) -> tuple[int, int]:
    """What a LayerNormGrad normalizes, normalized, and the inverse deviation."""
    m, space = reader.make, reader.space(node.inputs[0])  # type: ignore[arg-type]
    x, mean, inverse = (reader.read(node.inputs[i], *space) for i in (1, 2, 3))  # type: ignore[arg-type]
    return m.op("mul", m.op("sub", x, mean), inverse), inverse


def _keep_scale(node: ir.Node) -> float:
    ratio = decimal(node, "ratio", 0.5)
    return 0.0 if ratio >= 1.0 else float(np.float32(1.0 / (1.0 - ratio)))


def _scaled(reader: Reader, x: int, mask: int, node: ir.Node) -> int:
    m = reader.make
    return m.op("mul", m.op("mul", x, m.op("indicator", mask)), m.const(_keep_scale(node)))


@handles("Dropout", domain=COMPOSITE)
def _dropout(reader: Reader, node: ir.Node) -> None:
    x, width = row_of(reader, node, 0)
    mask = reader.make.add(Expr("draw", _counters(reader, node), width, CHOICE, _draw(reader, node)))
    reader.put(node.outputs[0], _scaled(reader, x, mask, node))
    if len(node.outputs) > 1:
        reader.put(node.outputs[1], mask)


@handles("DropoutGrad", domain=COMPOSITE)
def _dropout_grad(reader: Reader, node: ir.Node) -> None:
    (x, _), (mask, _) = row_of(reader, node, 0), row_of(reader, node, 1)
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


@handles("Slice")
def _slice(reader: Reader, node: ir.Node) -> None:
    x, width = row_of(reader, node, 0)
    start, end = slice_columns(node)
    reader.put(node.outputs[0], _part(reader, x, start, end))
    assert isinstance(width, int)


def _part(reader: Reader, x: int, start: int, end: int) -> int:
    kind = reader.make.exprs[x].kind
    if reader.make.exprs[x].width == ROW:
        return x
    return reader.make.add(Expr("slice", (x,), end - start, kind, start))


@handles("Split")
def _split(reader: Reader, node: ir.Node) -> None:
    x, _ = row_of(reader, node, 0)
    at = 0
    for output in node.outputs:
        size = dims_of(output)[-1]
        assert isinstance(size, int)
        reader.put(output, _part(reader, x, at, at + size))
        at += size


@handles("Concat")
def _concat(reader: Reader, node: ir.Node) -> None:
    parts = [row_of(reader, node, i) for i in range(len(node.inputs))]
    kind = reader.make.exprs[parts[0][0]].kind
    widths = tuple(width for _, width in parts)
    total = sum(w for w in widths if isinstance(w, int))
    made = reader.make.add(Expr("concat", tuple(x for x, _ in parts), total, kind, widths))
    reader.put(node.outputs[0], made)


@handles("Pad")
def _pad(reader: Reader, node: ir.Node) -> None:
    x, width = row_of(reader, node, 0)
    assert isinstance(width, int)
    before, after = pad_columns(node)
    fill = given(node, 2)
    number = 0.0 if fill is None or fill.const_value is None else float(fill.const_value.numpy().reshape(-1)[0])
    other = reader.make.const(number)
    made = Expr("concat", (other, x, other), before + width + after, NUMBER, (before, width, after))
    reader.put(node.outputs[0], reader.make.add(made))


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
