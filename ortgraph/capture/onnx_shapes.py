"""Symbolic shapes through shape arithmetic: infer with numbers put in for the names, then read the names back.

ONNX's inference loses a named dimension at the first Reshape to a computed shape. Here the graph is inferred three
times, each time with other sizes for its named dimensions and with the small integer values computed on the way; a
dimension that is the same number each time is that number, one that follows c * name + d or a product of two names
is that expression. What follows neither stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.capture.legalize_control import CONTROL_FLOW, evaluate_node, shape_value
from ortgraph.graph.edit import static_shape
from ortgraph.ops.contrib_grad import reduced_axes
from ortgraph.ops.infer import infer_node

_SIZES = ((7, 11, 13, 17, 19, 23, 29, 31), (13, 17, 23, 29, 31, 37, 41, 43), (16, 14, 10, 12, 15, 18, 20, 22))
_MAX_ELEMENTS = 256  # of an integer value that is computed


def record_symbolic_shapes(model: ir.Model) -> None:
    """Record, in place, every dimension that the inputs' named dimensions determine. Known ones stay."""
    graph = model.graph
    symbols = _symbols(graph)
    if not _has_unknown(graph) or len(symbols) > len(_SIZES[0]):
        return
    assignments = [dict(zip(symbols, sizes, strict=False)) for sizes in (_SIZES if symbols else _SIZES[:1])]
    shapes = [_sizes(model, sizes) for sizes in assignments]
    values = [o for node in graph for o in node.outputs]
    for i, value in enumerate(values):
        found = [known for s in shapes if (known := s[i]) is not None]
        if len(found) < len(shapes) or len(set(map(len, found))) != 1:
            continue
        old = value.shape
        dims: list[int | str | ir.SymbolicDim | None] = [
            _expression(sizes, assignments) for sizes in zip(*found, strict=True)
        ]
        if old is not None and len(old) == len(dims):
            dims = [o if _known(o) else d for o, d in zip(old, dims, strict=True)]
        value.shape = ir.Shape(dims)


def _symbols(graph: ir.Graph) -> list[str]:
    names: dict[str, None] = {}
    for value in graph.inputs:
        for dim in value.shape or ():
            if not isinstance(dim, int) and dim.value:
                names[dim.value] = None
    return list(names)


def _known(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, int) or dim.value is not None


def _has_unknown(graph: ir.Graph) -> bool:
    return any(o.shape is None or not all(map(_known, o.shape)) for node in graph for o in node.outputs)


def _sizes(model: ir.Model, assignment: dict[str, int]) -> list[tuple[int, ...] | None]:
    """Shapes of all node outputs, in order, with these sizes."""
    graph = model.clone().graph
    for value in graph.inputs:
        if value.shape is not None:
            value.shape = ir.Shape([d if isinstance(d, int) else assignment.get(d.value or "") for d in value.shape])
    result: list[tuple[int, ...] | None] = []
    for node in graph:
        for output in node.outputs:
            output.shape = _bound(output.shape, assignment)
        if any(o.shape is None or not o.shape.is_static() for o in node.outputs):
            infer_node(node, graph.opset_imports)
        _compute(node)
        result += map(static_shape, node.outputs)
    return result


def _bound(shape: ir.Shape | None, assignment: dict[str, int]) -> ir.Shape | None:
    if shape is None:
        return None
    dims: list[int | None] = []
    for dim in shape:
        value = dim if isinstance(dim, int) else dim.evaluate(assignment) if dim.value else None
        dims.append(value if isinstance(value, int) else None)
    return ir.Shape(dims)


def _compute(node: ir.Node) -> None:
    """Compute the node's small integer and boolean outputs from known inputs."""
    if node.op_type in CONTROL_FLOW or not any(_small_integer(o) for o in node.outputs):
        return
    made: Sequence[np.ndarray | None]
    if node.op_type in ("Shape", "Size"):
        made = [shape_value(node)]
    elif node.op_type == "BroadcastGradientArgs":
        made = _broadcast_axes(node)
    else:
        inputs = [None if v is None else _constant(v) for v in node.inputs]
        if any(v is not None and a is None for v, a in zip(node.inputs, inputs, strict=True)):
            return
        made = evaluate_node(node, inputs)
    for output, array in zip(node.outputs, made, strict=False):
        if array is not None and array.size <= _MAX_ELEMENTS:
            output.const_value = ir.tensor(array)
            output.shape = ir.Shape(array.shape)


def _small_integer(value: ir.Value) -> bool:
    if value.dtype is None or value.dtype.is_floating_point():
        return value.dtype is None
    shape = static_shape(value)
    return shape is None or math.prod(shape) <= _MAX_ELEMENTS


def _constant(value: ir.Value) -> np.ndarray | None:
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.size > _MAX_ELEMENTS else tensor.numpy()


def _broadcast_axes(node: ir.Node) -> list[np.ndarray]:
    """Axes over which the gradients of two broadcast shapes are summed."""
    left, right = (None if v is None else _constant(v) for v in node.inputs)
    if left is None or right is None:
        return []
    pairs = ((left.tolist(), right.tolist()), (right.tolist(), left.tolist()))
    return [np.array(reduced_axes(*pair), dtype=np.int64) for pair in pairs]


def _expression(sizes: Sequence[int], assignments: Sequence[dict[str, int]]) -> int | str | None:
    """The expression in named dimensions that gives ``sizes``; None when there is none."""
    if len(set(sizes)) == 1:
        return sizes[0]
    names = list(assignments[0])
    for name in names:
        if all(size == a[name] for size, a in zip(sizes, assignments, strict=True)):
            return name
    for name in names:
        (s0, s1), (a0, a1) = sizes[:2], (assignments[0][name], assignments[1][name])
        factor, rest = divmod(s0 - s1, a0 - a1)
        offset = s0 - factor * a0
        if (
            rest == 0
            and factor > 0
            and all(s == factor * a[name] + offset for s, a in zip(sizes, assignments, strict=True))
        ):
            return _affine(name, factor, offset)
    for i, first in enumerate(names):
        for second in names[i:]:
            factor, rest = divmod(sizes[0], assignments[0][first] * assignments[0][second])
            if rest == 0 and all(s == factor * a[first] * a[second] for s, a in zip(sizes, assignments, strict=True)):
                return f"{first}*{second}" if factor == 1 else f"{factor}*{first}*{second}"
    return None


def _affine(name: str, factor: int, offset: int) -> str:
    text = name if factor == 1 else f"{factor}*{name}"
    return text if offset == 0 else f"{text} {'+' if offset > 0 else '-'} {abs(offset)}"
