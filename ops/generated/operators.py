"""Turns the body of a region into expressions of one row; the operators are in ``elementwise`` and ``rowwise``."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.ops.generated import elementwise  # noqa: F401 - registers its operators
from ortgraph.ops.generated.expressions import ROW, Region, Result
from ortgraph.ops.generated.reader import HANDLERS, Reader, constant_ints, dims_of, row_of
from ortgraph.ops.generated.rowwise import normalized
from ortgraph.ops.spec import COMPOSITE

FLOATS = (ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


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
            lead, width = ((), 1) if drops_rows_axis(output.producer()) else reader.space(output)
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
    found = [node.inputs[0] if summed or drops_rows_axis(node) else output]
    for node in body:
        if node.op_type == "Reshape" and dims_of(node.inputs[0])[-1:] == dims_of(node.outputs[0])[-1:]:  # type: ignore[arg-type]
            found += [node.inputs[0], node.outputs[0]]
    return [v for v in found if v is not None]


def drops_rows_axis(node: ir.Node | None) -> bool:
    """Whether a node of a body gives one number per row without a dimension for it: its last one counts rows, too."""
    if node is None or not node.op_type.startswith("Reduce") or node.inputs[0] is None or is_column_sum(node):
        return False
    return len(dims_of(node.outputs[0])) < len(dims_of(node.inputs[0]))


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
    dy, _ = row_of(reader, node, 0)
    found = {}
    if len(node.outputs) > 1 and node.outputs[1].name:
        found[1] = reader.make.op("mul", dy, normalized(reader, node)[0])
    if len(node.outputs) > 2 and node.outputs[2].name:
        found[2] = dy
    return found
