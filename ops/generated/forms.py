"""Forms: which nodes a region may hold, and how their values lie in rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from ortgraph.ops.generated.operators import FLOATS
from ortgraph.ops.generated.reader import HANDLERS, constant_ints
from ortgraph.ops.shapes import attribute, given, normalized_axis, product
from ortgraph.ops.spec import COMPOSITE

_BROADCAST_TYPES = (*FLOATS, ir.DataType.BOOL)
_ROWWISE = frozenset({"Softmax", "LogSoftmax", "SoftmaxGrad", "LogSoftmaxGrad", "LayerNormalization", "LayerNormGrad"})
_MOVES = frozenset({"Slice", "Concat", "Pad", "Split"})
_DRAWS = frozenset({"Dropout"})
MAX_RANK = 8
Key = int | str
Space = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Form:
    """How a node takes part in a region.

    Attributes:
        rows: Number of rows that it works on.
        spaces: For each input the dimensions that it is broadcast to; None for one that is no tensor of the region.
        layouts: For each output (rows, width), or None when it is summed over the rows.
    """

    rows: Key
    spaces: tuple[Space | None, ...]
    layouts: tuple[tuple[Key, Key] | None, ...]


def form_of(node: ir.Node) -> Form | str:
    """The form of a node, or why it has none."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    if (domain, node.op_type) not in HANDLERS:
        return "no expression for this operator"
    values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.name]
    if any(v.shape is None or v.dtype is None or len(v.shape) > MAX_RANK for v in values):
        return "a shape is not known"
    if _narrow(node):
        return "its rows have one column"
    if any(not isinstance(d, int) and d.value is None for v in values for d in v.shape):  # type: ignore[union-attr]
        return "a dimension has no name"
    if not node.outputs[0].name:
        return "its first output is left out"
    made = _form(node)
    return made if isinstance(made, str) else _checked(node, made)


def _narrow(node: ir.Node) -> bool:
    """Whether an operator along rows meets rows of one element, which count as numbers per row."""
    along = node.op_type in (*_ROWWISE, *_DRAWS, *_MOVES, "DropoutGrad") or node.op_type.startswith("Reduce")
    if not along:
        return False
    values = [v for v in (node.inputs[0], *node.outputs) if v is not None and v.shape is not None]
    values = values[:1] if node.op_type not in _MOVES else values
    return any(not dims(v) or dims(v)[-1] == 1 for v in values)


def _checked(node: ir.Node, made: Form) -> Form | str:
    for value, space in zip(node.inputs, made.spaces, strict=True):
        if value is None or space is None:
            continue
        if value.dtype not in _BROADCAST_TYPES and not _is_number(value):
            return f"element type {value.dtype}"
        if not _fits(tuple(value.shape or ()), space):
            return f"%{value.name} is not broadcast by known dimensions"
    for output in node.outputs:
        if output.name and output.dtype not in _BROADCAST_TYPES:
            return f"element type {output.dtype}"
    if isinstance(made.rows, str) and made.rows == "None":
        return "the number of rows is not known"
    return made


def _is_number(value: ir.Value) -> bool:
    tensor = ir.convenience.get_const_tensor(value) if not value.is_graph_input() else None
    return tensor is not None and tensor.size == 1


def _fits(dims: Space, space: Space) -> bool:
    if len(dims) > max(len(space), 1):
        return all(d == 1 for d in dims)
    lead = len(space) - len(dims)
    return all(same(d, s) or (isinstance(d, int) and d == 1) for d, s in zip(dims, space[max(lead, 0) :], strict=False))


def same(a: Any, b: Any) -> bool:
    """Whether two dimensions are equal, symbolic ones by name."""
    return a == b if isinstance(a, int) or isinstance(b, int) else str(a.value) == str(b.value)


def dims(value: ir.Value) -> Space:
    return tuple(value.shape or ())


def rows_in(space: Space) -> Key:
    """Number of rows of values with these dimensions."""
    found = product(space[:-1])
    return found if isinstance(found, int) else str(found.value)


def key(dim: Any) -> Key:
    return dim if isinstance(dim, int) else str(dim.value)


def layout_in(space: Space) -> tuple[Key, Key]:
    return rows_in(space), key(space[-1]) if space else 1


def _form(node: ir.Node) -> Form | str:
    name = node.op_type
    if name in _MOVES:
        return _moving(node)
    if name.startswith("Reduce"):
        return _reducing(node)
    if name in _ROWWISE:
        return _rowwise(node)
    first = node.outputs[0]
    space = dims(first)
    layouts = tuple(layout_in(space) for _ in node.outputs)
    if name == "Expand":
        source = dims(node.inputs[0])  # type: ignore[arg-type]
        own = (1,) * (len(space) - len(source)) + source
        if any(not isinstance(d, int) and not same(d, o) for d, o in zip(space, own, strict=False)):
            return "it repeats to a symbolic dimension"
        return Form(rows_in(space), (space, *[None] * (len(node.inputs) - 1)), layouts)
    if name == "Dropout" and node.domain != COMPOSITE:
        return "draws from the runtime's own generator"
    if name in _DRAWS:
        return Form(rows_in(space), (space, None, None), layouts)
    if name == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype not in _BROADCAST_TYPES:
        return f"element type {node.inputs[0].dtype}"
    if name in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
        compared = given(node, 0)
        if compared is None or compared.dtype not in FLOATS:
            return f"element type {compared.dtype if compared is not None else None}"
    return Form(rows_in(space), tuple(space for _ in node.inputs), layouts)


def _reducing(node: ir.Node) -> Form | str:
    source = node.inputs[0]
    assert source is not None
    space = dims(source)
    rank = len(space)
    axes = constant_ints(node.inputs[1]) if len(node.inputs) > 1 else attribute(node, "axes")
    if given(node, 1) is not None and axes is None:
        return "its axes are not constant"
    found = sorted(normalized_axis(a, rank) for a in axes or range(rank))
    rest = (None,) * (len(node.inputs) - 1)
    if found == [rank - 1]:
        return Form(rows_in(space), (space, *rest), ((rows_in(space), 1),))
    if node.op_type == "ReduceSum" and rank > 1 and found == list(range(rank - 1)):
        return Form(rows_in(space), (space, *rest), (None,))
    return "it reduces other dimensions than the last one, or all but the last one"


def _rowwise(node: ir.Node) -> Form | str:
    source = node.inputs[0]
    assert source is not None
    space = dims(source)
    if not space or normalized_axis(attribute(node, "axis", -1), len(space)) != len(space) - 1:
        return "it works along another axis than the last one"
    rows, full = rows_in(space), layout_in(space)
    spaces = tuple(None if v is None else space for v in node.inputs)
    if node.op_type == "LayerNormalization":
        return Form(rows, spaces, (full, (rows, 1), (rows, 1))[: len(node.outputs)])
    if node.op_type == "LayerNormGrad":
        if node.inputs[2] is None:
            return "it has no mean"
        return Form(rows, spaces, (full, None, None)[: len(node.outputs)])
    return Form(rows, spaces, (full,))


def _moving(node: ir.Node) -> Form | str:
    source = node.inputs[0]
    assert source is not None
    space = dims(source)
    if not space or not all(isinstance(v.shape[-1], int) for v in (source, *node.outputs) if v.shape is not None):
        return "the last dimension is symbolic"
    rank = len(space)
    rest = (None,) * (len(node.inputs) - 1)
    layouts = tuple(layout_in(dims(o)) for o in node.outputs)
    if node.op_type in ("Concat", "Split"):
        if normalized_axis(attribute(node, "axis", 0), rank) != rank - 1:
            return "it works along another axis than the last one"
        if node.op_type == "Split":
            return Form(rows_in(space), (space, *rest), layouts)
        return Form(rows_in(space), tuple(dims(v) for v in node.inputs if v is not None), layouts)
    if node.op_type == "Slice":
        parts = [constant_ints(given(node, i)) for i in (1, 2, 3)]
        steps = constant_ints(given(node, 4)) if given(node, 4) is not None else [1]
        if any(p is None or len(p) != 1 for p in parts) or steps != [1]:
            return "it does not slice one dimension in steps of 1"
        if normalized_axis(parts[2][0], rank) != rank - 1:  # type: ignore[index]
            return "it works along another axis than the last one"
        return Form(rows_in(space), (space, *rest), layouts)
    pads = constant_ints(given(node, 1))
    if given(node, 3) is not None or attribute(node, "mode", "constant") != "constant" or pads is None:
        return "its margin is not constant"
    if len(pads) != 2 * rank or any(p for i, p in enumerate(pads) if i % rank != rank - 1) or min(pads) < 0:
        return "it does not pad the last dimension only"
    fill = given(node, 2)
    if fill is not None and not _is_number(fill):
        return "its margin is not constant"
    return Form(rows_in(space), (space, *rest), layouts)


def operand_layout(value: ir.Value, space: Space) -> tuple[Key, Key] | None:
    """(rows, width) of an operand that has every row of the space to itself, None when it repeats along some."""
    own = dims(value)
    own = (1,) * (len(space) - len(own)) + own
    if len(own) != len(space):
        return None
    if not all(same(a, b) for a, b in zip(own[:-1], space[:-1], strict=True)):
        return None
    return (rows_in(space), key(own[-1])) if own else (1, 1)
