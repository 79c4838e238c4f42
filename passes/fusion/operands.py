"""What fusions ask about operands: constants, permutations, shapes, readers."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute

MAX_CONSTANT = 1 << 16  # elements of a constant that a fusion looks into
FLOAT32 = ir.DataType.FLOAT
FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The value of a constant; None for everything that could differ at run time (a graph input with a default too)."""
    if value is None or value.is_graph_input():
        return None
    producer = value.producer()
    if producer is not None and producer.op_type in ("Identity", "Cast") and producer.domain == "":
        inner = constant(producer.inputs[0])
        if inner is None or producer.op_type == "Identity":
            return inner
        return inner.astype(ir.DataType(attribute(producer, "to")).numpy())
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > MAX_CONSTANT or tensor.dtype == ir.DataType.STRING:
        return None
    return tensor.numpy()


def scalar(value: ir.Value | None) -> float | None:
    """The number in a constant that holds one number, in one element or filled with it."""
    array = constant(value)
    if array is None or array.size == 0 or array.dtype == bool:
        return None
    first = array.reshape(-1)[0]
    return float(first) if bool(np.all(array == first)) else None


def is_scalar_shape(value: ir.Value) -> bool:
    """Whether broadcasting the value never adds dimensions or elements: all its dimensions are 1."""
    return value.shape is not None and all(d == 1 for d in value.shape)


def with_constant(node: ir.Node) -> tuple[ir.Value, float, int] | None:
    """(other operand, number, position of the number) of a binary node with a finite one-element constant."""
    for i in (1, 0):
        value, other = node.inputs[i], node.inputs[1 - i]
        number = scalar(value)
        if number is None or value is None or other is None or not is_scalar_shape(value):
            continue
        if math.isfinite(number) and len(value.shape) <= len(other.shape or ()):  # type: ignore[arg-type]
            return other, number, i
    return None


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether both shapes are recorded and equal, symbolic dimensions by name."""
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return False
    return all(_same_dimension(x, y) for x, y in zip(a.shape, b.shape, strict=True))


def _same_dimension(x: int | ir.SymbolicDim, y: int | ir.SymbolicDim) -> bool:
    if isinstance(x, int) or isinstance(y, int):
        return x == y
    return x.value is not None and x.value == y.value


def rank(value: ir.Value | None) -> int | None:
    """Number of dimensions, None when unknown."""
    return None if value is None or value.shape is None else len(value.shape)


def producer_of(value: ir.Value | None, *op_types: str, domain: str = "") -> ir.Node | None:
    """The node that makes ``value`` when it is one of these operators of this domain."""
    node = None if value is None else value.producer()
    if node is None or node.op_type not in op_types:
        return None
    return node if node.domain == domain or (not domain and node.domain == "ai.onnx") else None


def permutation(node: ir.Node) -> tuple[int, ...] | None:
    """The permutation of a Transpose (reversed dimensions by default), None when the rank is unknown."""
    perm = attribute(node, "perm")
    if perm is not None:
        return tuple(perm)
    n = rank(node.inputs[0])
    return None if n is None else tuple(range(n))[::-1]


def axes_of(node: ir.Node) -> tuple[int, ...] | None:
    """Non-negative axes of a reduction (input or attribute); None when not constant or the rank is unknown."""
    n = rank(node.inputs[0])
    if n is None:
        return None
    axes = attribute(node, "axes")
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        found = constant(node.inputs[1])
        if found is None:
            return None
        axes = found.reshape(-1).tolist()
    if axes is None or len(axes) == 0:
        return () if attribute(node, "noop_with_empty_axes", 0) else tuple(range(n))
    return tuple(sorted(int(a) % n for a in axes))


def reshape_dims(dims: tuple[int | ir.SymbolicDim, ...]) -> list[int] | None:
    """Constant Reshape target for these dimensions: one unknown becomes -1, more cannot be written."""
    unknown = [d for d in dims if not isinstance(d, int)]
    if len(unknown) > 1 or any(d == 0 for d in dims):
        return None
    return [d if isinstance(d, int) else -1 for d in dims]


def with_lead(b: Builder, value: ir.Value, lead: tuple[int | ir.SymbolicDim, ...]) -> ir.Value:
    """A Reshape [..., m, n] to [*lead, m, n]. Of ``lead`` at most one may be unknown; m and n may be, too."""
    dims = (*lead, *list(value.shape)[-2:])  # type: ignore[arg-type]
    if all(isinstance(d, int) for d in dims):
        made = b.op("Reshape", value, b.ints(list(dims)), allowzero=1 if 0 in dims else None)  # type: ignore[arg-type]
    elif (target := reshape_dims(dims)) is not None:
        made = b.op("Reshape", value, b.ints(target))
    else:
        front = reshape_dims(lead)
        assert front is not None, lead
        tail = b.op("Shape", value, start=len(value.shape or ()) - 2)
        made = b.op("Reshape", value, b.op("Concat", b.ints(front), tail, axis=0))
    made.shape = ir.Shape(dims)
    return made
