"""Evaluate one standard ONNX node on constants: numpy for what graphs are full of, ONNX's reference for the rest.

Nothing is evaluated whose result another implementation might give differently: integer overflow, division by zero,
a float out of an integer's range, and element types narrower than 8 bits are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

Array = np.ndarray
Arrays = Sequence["Array | None"]
_Rule = Callable[[ir.Node, Arrays, int], Array]

FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE})
_DTYPES = FLOATS | {
    ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64,
    ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64,
}  # fmt: skip
_REFERENCE_BYTES = 1 << 20  # the reference works in Python loops for some operators


class Refused(Exception):  # noqa: N818 - a reason, not an error
    """The node is not evaluated; the text says why."""


def evaluate(node: ir.Node, inputs: Arrays, version: int) -> list[Array]:
    """The outputs of a deterministic standard node for given inputs (None for an absent one).

    Args:
        node: A node without subgraphs.
        inputs: One array per input.
        version: Opset of the standard domain.

    Raises:
        Refused: The result is not certain to be what a runtime computes.
    """
    for array in inputs:
        if array is not None and _dtype(array) not in _DTYPES:
            raise Refused(f"element type {array.dtype} is not evaluated")
    rule = _RULES.get(node.op_type)
    if rule is not None:
        return [_apply(rule, node, inputs, version)]
    return _reference(node, inputs, version)


def _apply(rule: _Rule, node: ir.Node, inputs: Arrays, version: int) -> Array:
    try:
        return np.asarray(rule(node, inputs, version))
    except (AssertionError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"{node.op_type} of these constants: {error}") from error


def _dtype(array: Array) -> ir.DataType | None:
    try:
        return ir.DataType.from_numpy(array.dtype)
    except TypeError:
        return None


def _is_signed(array: Array) -> bool:
    return array.dtype.kind == "i"


# Rules in numpy ---------------------------------------------------------------------------------------------------


def _axes(node: ir.Node, inputs: Arrays) -> tuple[int, ...] | None:
    """Axes from the second input (opset 13 and later) or the attribute."""
    if len(inputs) > 1 and inputs[1] is not None:
        return tuple(int(a) for a in inputs[1].reshape(-1))
    axes = node.attributes.get_ints("axes", None)
    return None if axes is None else tuple(axes)


def _arithmetic(function: Callable[[Array, Array], Array]) -> _Rule:
    def rule(node: ir.Node, inputs: Arrays, version: int) -> Array:
        a, b = _two(inputs)
        if _is_signed(a):
            _check_range(function(a.astype(np.float64), b.astype(np.float64)), a.dtype)
        with np.errstate(all="ignore"):
            return np.asarray(function(a, b), dtype=a.dtype)

    return rule


def _check_range(estimate: Array, dtype: np.dtype) -> None:
    info = np.iinfo(dtype)
    margin = 0 if info.bits < 53 else 2 ** (info.bits - 52)  # what float64 may be off near the ends of 64 bits
    if not bool(np.all((estimate <= info.max - margin) & (estimate >= info.min + margin))):
        raise Refused(f"integer overflow in {dtype}")


def _divide(node: ir.Node, inputs: Arrays, version: int) -> Array:
    a, b = _two(inputs)
    if a.dtype.kind in "iu":
        if not b.all():
            raise Refused("integer division by zero")
        if _is_signed(a) and bool(np.any((a == np.iinfo(a.dtype).min) & (b == -1))):
            raise Refused(f"integer overflow in {a.dtype}")
        quotient = a // b
        toward_zero = (a % b != 0) & ((a < 0) != (b < 0))
        return (quotient + toward_zero).astype(a.dtype)
    with np.errstate(all="ignore"):
        return np.asarray(a / b, dtype=a.dtype)


def _two(inputs: Arrays) -> tuple[Array, Array]:
    a, b = inputs
    assert a is not None and b is not None
    if a.dtype != b.dtype:
        raise Refused(f"operands of type {a.dtype} and {b.dtype}")
    return a, b


def _negate(node: ir.Node, inputs: Arrays, version: int) -> Array:
    (x,) = inputs
    assert x is not None
    if _is_signed(x) and bool(np.any(x == np.iinfo(x.dtype).min)):
        raise Refused(f"integer overflow in {x.dtype}")
    return -x


def _cast(node: ir.Node, inputs: Arrays, version: int) -> Array:
    x, to = inputs[0], ir.DataType(node.attributes["to"].as_int())
    assert x is not None
    if to not in _DTYPES:
        raise Refused(f"cast to {to.name} is not evaluated")
    target = to.numpy()
    if to == ir.DataType.BOOL:
        return x != 0
    if to in FLOATS:
        with np.errstate(over="ignore"):
            return x.astype(target)
    info = np.iinfo(target)
    whole = np.trunc(x.astype(np.float64)) if _dtype(x) in FLOATS else x
    inside = (whole >= info.min) & (whole <= info.max)
    if whole.dtype.kind == "f" and info.bits == 64:
        inside &= np.abs(whole) < 2.0**62  # float64 cannot tell the ends of 64 bits
    if not bool(np.all(inside)):
        raise Refused(f"value out of the range of {to.name}")
    return whole.astype(target)


def _reshape(node: ir.Node, inputs: Arrays, version: int) -> Array:
    x, shape = inputs
    assert x is not None and shape is not None
    target = [int(d) for d in shape.reshape(-1)]
    if not node.attributes.get_int("allowzero", 0):
        target = [x.shape[i] if d == 0 else d for i, d in enumerate(target)]
    return x.reshape(target)


def _unsqueeze(node: ir.Node, inputs: Arrays, version: int) -> Array:
    x, axes = inputs[0], _axes(node, inputs)
    assert x is not None and axes is not None
    return np.expand_dims(x, axes)


def _squeeze(node: ir.Node, inputs: Arrays, version: int) -> Array:
    x, axes = inputs[0], _axes(node, inputs)
    assert x is not None
    return np.squeeze(x, axes)


def _transpose(node: ir.Node, inputs: Arrays, version: int) -> Array:
    assert inputs[0] is not None
    return np.ascontiguousarray(np.transpose(inputs[0], node.attributes.get_ints("perm", None)))


def _concat(node: ir.Node, inputs: Arrays, version: int) -> Array:
    return np.concatenate([x for x in inputs if x is not None], axis=node.attributes["axis"].as_int())


def _gather(node: ir.Node, inputs: Arrays, version: int) -> Array:
    x, indices = inputs
    assert x is not None and indices is not None
    return np.take(x, indices.astype(np.int64), axis=node.attributes.get_int("axis", 0))


def _slice(node: ir.Node, inputs: Arrays, version: int) -> Array:
    x = inputs[0]
    assert x is not None
    if version < 10:
        read = [node.attributes.get_ints(name, None) for name in ("starts", "ends", "axes")]
        starts, ends, axes, steps = *read, None
    else:
        starts, ends, axes, steps = (
            None if i >= len(inputs) or (v := inputs[i]) is None else [int(e) for e in v.reshape(-1)]
            for i in range(1, 5)
        )
    assert starts is not None and ends is not None
    where = [slice(None)] * x.ndim
    for axis, start, end, step in zip(
        axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True
    ):
        where[axis] = _python_slice(x.shape[axis], start, end, step)
    return np.ascontiguousarray(x[tuple(where)])


def _python_slice(size: int, start: int, end: int, step: int) -> slice:
    """ONNX clamps bounds; Python reads an end of -1 after a backward clamp as "last"."""
    start = start + size if start < 0 else start
    end = end + size if end < 0 else end
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step)


def _constant_of_shape(node: ir.Node, inputs: Arrays, version: int) -> Array:
    assert inputs[0] is not None
    fill = node.attributes.get_tensor("value", None)
    element = np.zeros(1, np.float32) if fill is None else fill.numpy().reshape(-1)
    return np.full([int(d) for d in inputs[0].reshape(-1)], element[0], dtype=element.dtype)


def _expand(node: ir.Node, inputs: Arrays, version: int) -> Array:
    x, shape = inputs
    assert x is not None and shape is not None
    target = np.broadcast_shapes(x.shape, tuple(int(d) for d in shape.reshape(-1)))
    return np.ascontiguousarray(np.broadcast_to(x, target))


def _where(node: ir.Node, inputs: Arrays, version: int) -> Array:
    condition, a, b = inputs
    assert condition is not None and a is not None and b is not None
    return np.where(condition, a, b)


def _compare(function: Callable[[Array, Array], Array]) -> _Rule:
    def rule(node: ir.Node, inputs: Arrays, version: int) -> Array:
        return np.asarray(function(*_two(inputs)), dtype=np.bool_)

    return rule


def _shape(node: ir.Node, inputs: Arrays, version: int) -> Array:
    assert inputs[0] is not None
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    return np.array(inputs[0].shape, dtype=np.int64)[start:end]


def _size(node: ir.Node, inputs: Arrays, version: int) -> Array:
    assert inputs[0] is not None
    return np.array(inputs[0].size, dtype=np.int64)


def _identity(node: ir.Node, inputs: Arrays, version: int) -> Array:
    assert inputs[0] is not None
    return inputs[0]


_RULES: dict[str, _Rule] = {
    "Add": _arithmetic(np.add), "Sub": _arithmetic(np.subtract), "Mul": _arithmetic(np.multiply), "Div": _divide,
    "Neg": _negate, "Cast": _cast, "Reshape": _reshape, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze,
    "Transpose": _transpose, "Concat": _concat, "Gather": _gather, "Slice": _slice,
    "ConstantOfShape": _constant_of_shape, "Expand": _expand, "Where": _where, "Shape": _shape, "Size": _size,
    "Equal": _compare(np.equal), "Less": _compare(np.less), "Greater": _compare(np.greater), "Identity": _identity,
}  # fmt: skip


# ONNX's reference -------------------------------------------------------------------------------------------------

# Operators that copy, choose or compare integers: no arithmetic that could overflow.
_INTEGER_SAFE = frozenset({
    "And", "ArgMax", "ArgMin", "Ceil", "Clip", "Compress", "DepthToSpace", "EyeLike", "Flatten", "Floor",
    "GatherElements", "GatherND", "GreaterOrEqual", "IsInf", "IsNaN", "LessOrEqual", "Max", "Min", "NonZero", "Not",
    "OneHot", "Or", "Pad", "ReduceMax", "ReduceMin", "Round", "SpaceToDepth", "Sign", "Split", "Tile", "TopK", "Trilu",
    "Unique", "Xor",
})  # fmt: skip
# Operators whose integer result is compared with the same operator in float64: positions that carry the numbers.
_INTEGER_CHECKED = {
    "Abs": (0,),
    "CumSum": (0,),
    "Pow": (0, 1),
    "Range": (0, 1, 2),
    "ReduceProd": (0,),
    "ReduceSum": (0,),
}


def _reference(node: ir.Node, inputs: Arrays, version: int) -> list[Array]:
    if sum(x.nbytes for x in inputs if x is not None) > _REFERENCE_BYTES:
        raise Refused("inputs too large for the reference evaluator")
    if any(x is not None and _dtype(x) == ir.DataType.BFLOAT16 for x in inputs):
        raise Refused("bfloat16 arithmetic is not evaluated")
    results = _run(node, inputs, version)
    integer = any(r.dtype.kind in "iu" for r in results)
    if not integer or node.op_type in _INTEGER_SAFE:
        return results
    checked = _INTEGER_CHECKED.get(node.op_type)
    if checked is None:
        raise Refused(f"integer result of {node.op_type} is not checked for overflow")
    wide = [x.astype(np.float64) if x is not None and i in checked else x for i, x in enumerate(inputs)]
    if not all(np.array_equal(a, b) for a, b in zip(results, _run(node, wide, version), strict=True)):
        raise Refused(f"integer overflow in {node.op_type}")
    return results


def _run(node: ir.Node, inputs: Arrays, version: int) -> list[Array]:
    attributes = tuple(ir.serde.serialize_attribute(a).SerializeToString() for a in node.attributes.values())
    present = tuple(x is not None for x in inputs)
    evaluator = _evaluator(node.op_type, attributes, present, len(node.outputs), version)
    try:
        with np.errstate(all="ignore"):
            found = evaluator.run(None, {f"i{i}": x for i, x in enumerate(inputs) if x is not None})
    except Exception as error:  # noqa: BLE001 - the reference raises many types; the cause becomes the reason
        raise Refused(f"the reference evaluator failed: {type(error).__name__}: {error}") from error
    if not all(isinstance(x, (np.ndarray, np.generic)) for x in found):
        raise Refused(f"{node.op_type} gives something else than a tensor")
    return [np.asarray(x) for x in found]


@functools.lru_cache(maxsize=256)
def _evaluator(
    op_type: str, attributes: tuple[bytes, ...], present: tuple[bool, ...], outputs: int, version: int
) -> ReferenceEvaluator:
    names = [f"i{i}" if there else "" for i, there in enumerate(present)]
    made = [f"o{i}" for i in range(outputs)]
    proto = onnx.helper.make_node(op_type, names, made)
    proto.attribute.extend(onnx.AttributeProto.FromString(a) for a in attributes)
    graph = onnx.helper.make_graph(
        [proto],
        "one_node",
        [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.UNDEFINED, None) for n in names if n],
        [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.UNDEFINED, None) for n in made],
    )
    opset = onnx.helper.make_opsetid("", version)
    return ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=[opset]))
