"""What shape arithmetic computes, as far as recorded shapes tell: small integer tensors with named unknowns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.passes.canonical.values import constant_array, constant_ints

_MAX_ELEMENTS = 64
_DTYPES = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.bool_))


@dataclasses.dataclass(frozen=True)
class ShapeValue:
    """Elements of an integer (or bool) scalar (rank 0) or vector (rank 1).

    A name stands for a named dimension: equal names are equal numbers, and at least 0. None is not known.
    """

    elements: tuple[int | str | None, ...]
    rank: int = 1

    @property
    def is_number(self) -> bool:
        return all(isinstance(e, int) for e in self.elements)

    @property
    def is_known(self) -> bool:
        return None not in self.elements


def target_of(elements: Sequence[int | str | None], given: Sequence[int | str | None]) -> tuple[int, ...] | None:
    """Reshape's shape for wanted ``elements`` from a value of shape ``given``: one -1, and 0 where a name stays put."""
    unknown = [i for i, e in enumerate(elements) if not isinstance(e, int)]
    if len(unknown) <= 1 and (not unknown or -1 not in elements):
        return tuple(e if isinstance(e, int) else -1 for e in elements)
    target = []
    for i, e in enumerate(elements):
        stays = e is not None and i < len(given) and given[i] == e
        target.append(e if isinstance(e, int) else 0 if stays else -1)
    return tuple(target) if target.count(-1) <= 1 else None


class ShapeValues:
    """The known integer tensors of one graph, filled node by node in graph order."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._found: dict[ir.Value, ShapeValue] = {}

    def get(self, value: ir.Value | None) -> ShapeValue | None:
        """What is known about a value; None when it is no small integer tensor or nothing is known."""
        if value is None:
            return None
        if value in self._found:
            return self._found[value]
        array = constant_array(value, _MAX_ELEMENTS)
        if array is None or array.ndim > 1 or array.dtype not in _DTYPES:
            return None
        return ShapeValue(tuple(int(e) for e in array.reshape(-1)), array.ndim)

    def visit(self, node: ir.Node) -> tuple[ir.Value, ShapeValue] | None:
        """Note what a node's one output holds, and return it."""
        if node.domain not in ("", "ai.onnx") or len(node.outputs) != 1:
            return None
        rule = _RULES.get(node.op_type)
        found = rule(self, node) if rule is not None else None
        if found is None or len(found.elements) > _MAX_ELEMENTS:
            return None
        self._found[node.outputs[0]] = found
        return node.outputs[0], found


def _input(node: ir.Node, i: int) -> ir.Value | None:
    return node.inputs[i] if i < len(node.inputs) else None


def _recorded(value: ir.Value | None) -> tuple[int | str | None, ...] | None:
    if value is None or value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def _shape(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
    shape = _recorded(node.inputs[0])
    if shape is None:
        return None
    return ShapeValue(shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)])


def _product(elements: Sequence[int | str | None]) -> int | str | None:
    numbers = [e for e in elements if isinstance(e, int)]
    others = [e for e in elements if not isinstance(e, int)]
    if not others:
        return math.prod(numbers)
    return others[0] if len(others) == 1 and math.prod(numbers) == 1 else None


def _size(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
    shape = _recorded(node.inputs[0])
    return None if shape is None else ShapeValue((_product(shape),), 0)


def _reduce_prod(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
    x = known.get(node.inputs[0])
    if x is None or x.rank != 1 or node.attributes.get_int("noop_with_empty_axes", 0) != 0:
        return None
    return ShapeValue((_product(x.elements),), 1 if node.attributes.get_int("keepdims", 1) else 0)


def _gather(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
    x, index = known.get(node.inputs[0]), known.get(node.inputs[1])
    if x is None or index is None or x.rank != 1:
        return None
    size = len(x.elements)
    if not all(isinstance(i, int) and -size <= i < size for i in index.elements):
        return None
    return ShapeValue(tuple(x.elements[i] for i in index.elements), index.rank)  # type: ignore[index]


def _slice(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
    x = known.get(node.inputs[0])
    if x is None or x.rank != 1:
        return None
    if known.version < 10:
        bounds = node.attributes.get_ints("starts", None), node.attributes.get_ints("ends", None)
        step: tuple[int, ...] | None = (1,)
    else:
        bounds = constant_ints(_input(node, 1)), constant_ints(_input(node, 2))
        step = (1,) if _input(node, 4) is None else constant_ints(_input(node, 4))
    if None in bounds or step is None or any(len(b) != 1 for b in (*bounds, step)) or step[0] < 1:  # type: ignore[arg-type]
        return None
    return ShapeValue(x.elements[bounds[0][0] : bounds[1][0] : step[0]])  # type: ignore[index]


def _concat(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
    parts = [known.get(v) or _unknown(v) for v in node.inputs]
    if any(p is None or p.rank != 1 for p in parts):
        return None
    return ShapeValue(tuple(e for p in parts for e in p.elements))  # type: ignore[union-attr]


def _unknown(value: ir.Value | None) -> ShapeValue | None:
    """A vector of recorded length whose elements are not known."""
    shape = _recorded(value)
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int) or shape[0] > _MAX_ELEMENTS:
        return None
    return ShapeValue((None,) * shape[0])


def _reshaped(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
    """Squeeze, Unsqueeze, Reshape, Flatten: the same elements; the recorded rank must be 0 or 1."""
    x, output = known.get(node.inputs[0]), node.outputs[0]
    if x is None or output.shape is None or output.shape.rank() > 1:
        return None
    rank = output.shape.rank()
    return ShapeValue(x.elements, rank) if rank == 1 or len(x.elements) == 1 else None


def _same(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
    return known.get(node.inputs[0])


def _cast(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
    to = node.attributes.get_int("to", 0)
    x = known.get(node.inputs[0])
    if x is None or to not in (ir.DataType.INT32, ir.DataType.INT64):
        return None
    fits = all(not isinstance(e, int) or abs(e) < 2**31 for e in x.elements)
    return x if fits else None


def _elementwise(function: Callable[..., int | str | None]) -> _Rule:
    def rule(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
        operands = [o for o in map(known.get, node.inputs) if o is not None]
        if len(operands) < len(node.inputs):
            return None
        length = max(len(o.elements) for o in operands)
        if any(len(o.elements) not in (1, length) for o in operands):
            return None
        rows = [o.elements * (length if len(o.elements) == 1 else 1) for o in operands]
        rank = max(o.rank for o in operands)
        return ShapeValue(tuple(function(*e) for e in zip(*rows, strict=True)), rank)

    return rule


def _bounded(number: int) -> int | None:
    return number if abs(number) < 2**31 else None  # shapes; what overflows int32 is left alone


def _add(a: int | str | None, b: int | str | None) -> int | str | None:
    if isinstance(a, int) and isinstance(b, int):
        return _bounded(a + b)
    return b if a == 0 else a if b == 0 else None


def _sub(a: int | str | None, b: int | str | None) -> int | str | None:
    if isinstance(a, int) and isinstance(b, int):
        return _bounded(a - b)
    return a if b == 0 else 0 if a == b and a is not None else None


def _mul(a: int | str | None, b: int | str | None) -> int | str | None:
    if isinstance(a, int) and isinstance(b, int):
        return _bounded(a * b)
    return b if a == 1 else a if b == 1 else None


def _div(a: int | str | None, b: int | str | None) -> int | str | None:
    if isinstance(a, int) and isinstance(b, int) and a >= 0 and b > 0:
        return a // b
    return a if b == 1 else None


def _equal(a: int | str | None, b: int | str | None) -> int | str | None:
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    if a == b and a is not None:
        return 1
    number = a if isinstance(a, int) else b
    named = a is not None and b is not None and (isinstance(a, str) != isinstance(b, str))
    return 0 if named and isinstance(number, int) and number < 0 else None  # a dimension is never negative


def _where(condition: int | str | None, a: int | str | None, b: int | str | None) -> int | str | None:
    if not isinstance(condition, int):
        return a if a == b else None
    return a if condition else b


def _constant_of_shape(known: ShapeValues, node: ir.Node) -> ShapeValue | None:
    shape = constant_ints(node.inputs[0])
    fill = node.attributes.get_tensor("value", None)
    if shape is None or len(shape) != 1 or shape[0] > _MAX_ELEMENTS or fill is None:
        return None
    array = fill.numpy().reshape(-1)
    return ShapeValue((int(array[0]),) * shape[0]) if array.dtype in _DTYPES else None


_Rule = Callable[[ShapeValues, ir.Node], "ShapeValue | None"]
_RULES: dict[str, _Rule] = {
    "Shape": _shape, "Size": _size, "ReduceProd": _reduce_prod, "Gather": _gather, "Slice": _slice, "Concat": _concat,
    "Unsqueeze": _reshaped, "Squeeze": _reshaped, "Reshape": _reshaped, "Identity": _same, "Cast": _cast,
    "Add": _elementwise(_add), "Sub": _elementwise(_sub), "Mul": _elementwise(_mul), "Div": _elementwise(_div),
    "Equal": _elementwise(_equal), "Where": _elementwise(_where), "ConstantOfShape": _constant_of_shape,
}  # fmt: skip
