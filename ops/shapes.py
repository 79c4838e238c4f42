"""Shape rules and small readers that the table modules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ortgraph.errors import UnsupportedError
from ortgraph.graph.edit import is_used, static_shape
from ortgraph.ops.spec import InferRule, Shape, Typed

if TYPE_CHECKING:
    from ortgraph.ops.builder import Builder

UNKNOWN = ir.SymbolicDim(None)
Types = Sequence["Typed | None"]


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """The value of an attribute, or ``default`` when the node does not carry it."""
    found = node.attributes.get(name)
    return default if found is None or found.value is None else found.value


def decimal(node: ir.Node, name: str, default: float) -> float:
    """A float attribute as the decimal that was meant: 0.9, not 0.89999998, so that 1 - 0.9 is PyTorch's.

    ONNX stores float attributes in float32; a graph that went through a file and one that did not give the same.
    """
    return float(str(np.float32(attribute(node, name, default))))


def given(node: ir.Node, index: int) -> ir.Value | None:
    """Input ``index``, None when it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def operand(node: ir.Node, index: int) -> ir.Value:
    """Input ``index``, which the operator's definition requires; raises UnsupportedError when it is left out."""
    value = given(node, index)
    if value is None:
        raise UnsupportedError(
            f"{operator(node)} {node.name!r}: its required input {index} is left out", "check what made the node"
        )
    return value


def operands(node: ir.Node, count: int) -> list[ir.Value]:
    """The first ``count`` inputs, all required."""
    return [operand(node, i) for i in range(count)]


def wanted(node: ir.Node, index: int) -> bool:
    """Whether output ``index`` exists and anybody reads it."""
    return index < len(node.outputs) and is_used(node.outputs[index])


def operator(node: ir.Node) -> str:
    """Domain and operator for messages."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def shape_of(value: ir.Value | None) -> Shape | None:
    """The recorded dimensions, None when unknown."""
    return None if value is None or value.shape is None else tuple(value.shape)


def rank_of(node: ir.Node, value: ir.Value | None, what: str) -> int:
    """The rank of an input; raises UnsupportedError when it is not recorded."""
    if value is None or value.shape is None:
        raise UnsupportedError(
            f"{operator(node)} {node.name!r}: the rank of {what} is not known", "run shape inference on the graph first"
        )
    return len(value.shape)


def bound_shape(node: ir.Node, value: ir.Value | None, what: str) -> tuple[int, ...]:
    """The static shape of an input; raises UnsupportedError when a dimension is symbolic."""
    shape = None if value is None else static_shape(value)
    if shape is None:
        raise UnsupportedError(
            f"{operator(node)} {node.name!r}: its expansion needs the static shape of {what}, recorded is "
            f"{None if value is None else value.shape}",
            "bind the symbolic dimensions first (shapes=...), then lower",
        )
    return shape


def static_dim(node: ir.Node, value: ir.Value, axis: int, what: str) -> int:
    """One dimension as a number; raises UnsupportedError when it is symbolic."""
    rank_of(node, value, what)
    dim = value.shape[axis]  # type: ignore[index]
    if not isinstance(dim, int):
        raise UnsupportedError(
            f"{operator(node)} {node.name!r}: its expansion needs dimension {axis} of {what} as a number, "
            f"recorded is {dim}",
            "bind the symbolic dimensions first (shapes=...), then lower",
        )
    return dim


def ints_of(value: ir.Value | None) -> list[int] | None:
    """The elements of a constant integer tensor, None when the value is not constant."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > 64:
        return None
    return [int(x) for x in tensor.numpy().reshape(-1)]


def typed(value: ir.Value | None) -> Typed | None:
    """Dtype and shape of a value as an inference result."""
    if value is None or value.dtype is None:
        return None
    return value.dtype, shape_of(value)


def retyped(value: ir.Value | None, shape: Shape | None) -> Typed | None:
    """The dtype of a value with another shape."""
    if value is None or value.dtype is None:
        return None
    return value.dtype, shape


def like(*indices: int) -> InferRule:
    """Rule: output i has the type of input ``indices[i]`` (the last one for further outputs)."""

    def rule(node: ir.Node) -> Types:
        return [typed(given(node, indices[min(i, len(indices) - 1)])) for i in range(len(node.outputs))]

    return rule


def product(dims: Sequence[Any]) -> Any:
    """Product of dimensions: an int, a symbolic expression, or the unknown dimension."""
    result: Any = 1
    symbols = [d for d in dims if not isinstance(d, int)]
    for d in dims:
        if isinstance(d, int):
            result *= d
    if result == 0:
        return 0
    for d in symbols:
        if d.value is None:
            return UNKNOWN
        result = d if isinstance(result, int) and result == 1 else result * d
    return result


def broadcast_dim(a: Any, b: Any) -> Any:
    """The broadcast of two dimensions. Equal expressions stay as they are; a number above 1 wins over a symbol."""
    if isinstance(a, int) and a == 1:
        return b
    if isinstance(b, int) and b == 1:
        return a
    if isinstance(a, int):
        return a
    if isinstance(b, int):
        return b
    return a if a.value is not None and a == b else UNKNOWN


def broadcast(*shapes: Shape | None) -> Shape | None:
    """The broadcast shape, None when one is unknown."""
    result: Shape = ()
    for shape in shapes:
        if shape is None:
            return None
        if shape == result:
            continue
        long, short = (result, shape) if len(result) >= len(shape) else (shape, result)
        lead = len(long) - len(short)
        result = long[:lead] + tuple(broadcast_dim(a, b) for a, b in zip(long[lead:], short, strict=True))
    return result


def broadcast_rule(dtype: ir.DataType | None = None, source: int = 0) -> InferRule:
    """Rule: one output, the broadcast of all inputs; its dtype is ``dtype`` or that of input ``source``."""

    def rule(node: ir.Node) -> Types:
        like = node.inputs[source]
        made = dtype or (None if like is None else like.dtype)
        shape = broadcast(*(shape_of(v) for v in node.inputs if v is not None))
        return [None if made is None else (made, shape)]

    return rule


def element_count(value: ir.Value | None) -> int:
    """Number of elements, 0 when a dimension is symbolic."""
    shape = None if value is None else static_shape(value)
    if shape is None:
        return 0
    count = 1
    for d in shape:
        count *= d
    return count


def elements_flops(per_element: int) -> Callable[[ir.Node], int]:
    """Cost rule of an element-wise operator."""
    return lambda node: per_element * element_count(node.outputs[0])


def normalized_axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def zeros_like(b: Builder, value: ir.Value) -> ir.Value:
    """Zeros of the dtype and shape of a value, also when its shape is symbolic and its elements are not finite."""
    shape = static_shape(value)
    if shape is not None:
        return zeros(b, shape, value.dtype)
    return b.op("Cast", b.op("Less", value, value), to=value.dtype)


def zeros(b: Builder, shape: Sequence[int], dtype: ir.DataType | None) -> ir.Value:
    """Zeros of a static shape."""
    assert dtype is not None
    return b.op("ConstantOfShape", b.ints(shape), value=ir.tensor([0], dtype=dtype))


def indicator(b: Builder, mask: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    """1 where a mask holds, else 0. By way of uint8: ONNX Runtime 1.19 casts bool to float three times slower."""
    return b.op("Cast", b.op("Cast", mask, to=ir.DataType.UINT8), to=dtype)
