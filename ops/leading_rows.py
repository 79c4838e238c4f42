"""Row rules for a set of rows chosen at run time: which inputs an operator reads row by row, and where zeros stay.

A value has its rows in its leading dimensions: ``[8, 128, 256]`` and ``[1024, 256]`` are both 1024 rows. Any set of rows
may be kept, so an operator that joins or shifts rows reads all. An operator without a rule reads all, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import COMPOSITE, spec_of

_GRADIENT_FIRST = frozenset({"GeluGrad", "SiluGrad", "ReluGrad", "TanhGrad", "SigmoidGrad", "DropoutGrad"})
_TRAILING_AXIS = frozenset({"Softmax", "LogSoftmax", "ortgraph.SoftmaxGrad", "ortgraph.LogSoftmaxGrad", "Concat"})
_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2"})
# Zero where their first input is.
_ZERO_OF_FIRST = frozenset(
    {
        "Neg", "Identity", "Cast", "Reshape", "Expand", "Slice", "ReduceSum", "ReduceMean", "Div", "MatMul", "Gemm",
        "ortgraph.SoftmaxGrad", "ortgraph.LogSoftmaxGrad", "ortgraph.LayerNormGrad", "ortgraph.Product",
        *(f"{COMPOSITE}.{name}" for name in _GRADIENT_FIRST),
    }
)  # fmt: skip
Inputs = frozenset[int]  # indices of the inputs that are read row by row; the others are read whole


@dataclasses.dataclass(frozen=True)
class LeadingRows:
    """The leading dimensions of a value that make up ``count`` rows."""

    count: int

    def axes(self, value: ir.Value | None) -> int | None:
        """How many leading dimensions are the rows; None when no such number is."""
        shape = static_shape(value) if value is not None else None
        size = 1
        for k, dim in enumerate(shape or ()):
            size *= dim
            if size == self.count:
                return k + 1
        return None

    def compact(self, value: ir.Value, rows: int) -> tuple[int, ...]:
        """The shape with ``rows`` rows in place of all, of the same rank."""
        k, shape = self.axes(value), static_shape(value)
        assert k is not None and shape is not None
        return (*(1,) * (k - 1), rows, *shape[k:])


def read_by_rows(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    """The inputs of which row i is all that row i of every output depends on; None when rows are joined.

    Outputs that are sums over rows (dScale and dBias of a norm) are left aside.
    """
    if not node.outputs or rows.axes(node.outputs[0]) is None or not spec_of(node).deterministic:
        return None
    rule = _RULES.get(_key(node))
    if rule is None and spec_of(node).elementwise and "node" not in node.attributes:
        rule = _elementwise
    inputs = None if rule is None else rule(node, rows)
    if inputs is None or any(rows.axes(node.inputs[i]) is None for i in inputs):
        return None
    return inputs


def kept_zero(node: ir.Node, zero: Callable[[ir.Value | None], bool], rows: LeadingRows) -> bool:
    """Whether the first output is zero in every row in which the inputs that ``zero`` names are."""
    key = _key(node)
    if not node.outputs or rows.axes(node.outputs[0]) is None:
        return False
    if key in ("Add", "Sub", "Sum", "Concat"):
        return bool(node.inputs) and all(zero(v) for v in node.inputs) and read_by_rows(node, rows) is not None
    if key == "Mul":
        return any(zero(v) for v in node.inputs) and read_by_rows(node, rows) is not None
    if key not in _ZERO_OF_FIRST or not node.inputs or not zero(node.inputs[0]):
        return False
    if key == "Gemm" and given(node, 2) is not None:
        return False
    if key == "ortgraph.Product" and not _is_plain_product(node):
        return False
    return read_by_rows(node, rows) is not None


def summed_by_rows(node: ir.Node, zero: Callable[[ir.Value | None], bool], rows: LeadingRows) -> Inputs | None:
    """For an operator that sums over all rows: the inputs of which rows without a share can be left out."""
    key = _key(node)
    if key in ("Gemm", "ortgraph.Product"):
        return _weight_gradient(node, zero, rows)
    if not node.inputs or not zero(node.inputs[0]):
        return None
    k = rows.axes(node.inputs[0])
    if key == "ReduceSum" and k is not None:
        axes = _axes(node)
        return frozenset({0}) if axes is not None and axes >= set(range(k)) else None
    if key == "ortgraph.EmbeddingGrad" and rows.axes(node.inputs[1]) is not None:
        return frozenset({0, 1})
    return None


def _weight_gradient(node: ir.Node, zero: Callable[[ir.Value | None], bool], rows: LeadingRows) -> Inputs | None:
    """A^T B with the rows in the first dimension of both."""
    a, b = node.inputs[:2]
    flat = all(v is not None and v.shape is not None and len(v.shape) == 2 for v in (a, b))
    if not flat or not attribute(node, "transA", 0) or attribute(node, "transB", 0):
        return None
    if rows.axes(a) != 1 or rows.axes(b) != 1:
        return None
    return frozenset({0, 1}) if zero(a) or zero(b) else None


def _key(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def _is_plain_product(node: ir.Node) -> bool:
    """Nothing is added to the product, and its activation keeps zero."""
    added = any(given(node, i) is not None for i in (2, 3))
    return not added and attribute(node, "activation", "none") in ("none", b"none")


def _axes(node: ir.Node) -> set[int] | None:
    """The axes of a reduction, not negative; None when not known."""
    shape = static_shape(node.inputs[0]) if node.inputs[0] is not None else None
    if shape is None:
        return None
    value = given(node, 1)
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    listed = attribute(node, "axes", None) if value is None else (None if tensor is None else tensor.numpy())
    return None if listed is None else {int(a) % len(shape) for a in listed}


def _elementwise(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    """An operand has all rows, or none of the leading dimensions at all."""
    out = static_shape(node.outputs[0])
    k = rows.axes(node.outputs[0])
    assert out is not None and k is not None
    found = set()
    for i, value in enumerate(node.inputs):
        if value is None:
            continue
        shape = static_shape(value)
        if shape is None or len(shape) > len(out):
            return None
        lead = ((1,) * (len(out) - len(shape)) + shape)[:k]
        if lead == out[:k]:
            found.add(i)
        elif math.prod(lead) != 1:
            return None
    return frozenset(found)


def _first(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    return frozenset({0})


def _expand(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    """Expand of trailing dimensions."""
    shape, out = static_shape(node.inputs[0]) if node.inputs[0] is not None else None, static_shape(node.outputs[0])
    k = rows.axes(node.outputs[0])
    return frozenset({0}) if shape and out and len(shape) == len(out) and shape[:k] == out[:k] else None


def _matmul(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    a, b, out = (static_shape(v) if v is not None else None for v in (*node.inputs[:2], node.outputs[0]))
    if a is None or b is None or out is None or len(b) != 2 or len(a) < 2 or a[:-1] != out[:-1]:
        return None
    return frozenset({0}) if (rows.axes(node.outputs[0]) or len(out)) < len(out) else None


def _gemm(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    """Gemm and Product: rows of the left operand, and of what is added where it has them."""
    if attribute(node, "transA", 0) or _matmul_like(node) is None or rows.axes(node.outputs[0]) != 1:
        return None
    found = {0}
    for i in (2, 3):
        value = given(node, i)
        shape = static_shape(value) if value is not None else ()
        if shape is None:
            return None
        if len(shape) == 2 and shape[0] != 1:
            found.add(i)
    return frozenset(found)


def _matmul_like(node: ir.Node) -> ir.Node | None:
    flat = all(v is not None and v.shape is not None and len(v.shape) == 2 for v in node.inputs[:2])
    return node if flat else None


def _product(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    if _matmul_like(node) is not None:
        return _gemm(node, rows)
    plain = not attribute(node, "transA", 0) and _is_plain_product(node) and not attribute(node, "transB", 0)
    return _matmul(node, rows) if plain and len(node.outputs) == 1 else None


def _layer_norm(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    shape = static_shape(node.inputs[0]) if node.inputs[0] is not None else None
    k = rows.axes(node.inputs[0])
    if shape is None or k is None or attribute(node, "axis", -1) % len(shape) < k:
        return None
    return frozenset(range(4)) if node.domain == COMPOSITE else frozenset({0})


def _along_axis(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    out, k = static_shape(node.outputs[0]), rows.axes(node.outputs[0])
    assert out is not None and k is not None
    if attribute(node, "axis", -1) % len(out) < k:
        return None
    return frozenset(i for i, v in enumerate(node.inputs) if v is not None)


def _reduce(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    axes, k = _axes(node), rows.axes(node.inputs[0])
    return frozenset({0}) if axes and k is not None and min(axes) >= k else None


def _slice(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    """Slice of trailing dimensions."""
    axes = given(node, 3)
    tensor = ir.convenience.get_const_tensor(axes) if axes is not None else None
    out, k = static_shape(node.outputs[0]), rows.axes(node.outputs[0])
    assert out is not None and k is not None
    if tensor is None or any(int(a) % len(out) < k for a in tensor.numpy()):
        return None
    return frozenset({0})


def _split(node: ir.Node, rows: LeadingRows) -> Inputs | None:
    shape, k = static_shape(node.inputs[0]) if node.inputs[0] is not None else None, rows.axes(node.inputs[0])
    if shape is None or k is None or attribute(node, "axis", 0) % len(shape) < k:
        return None
    return frozenset({0})


_RULES: dict[str, Callable[[ir.Node, LeadingRows], Inputs | None]] = {
    "Reshape": _first,  # rows are in leading dimensions before and after: memory is kept
    "Expand": _expand,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "ortgraph.Product": _product,
    "LayerNormalization": _layer_norm,
    "ortgraph.LayerNormGrad": _layer_norm,
    "Slice": _slice,
    "Split": _split,
    **{name: _reduce for name in _REDUCTIONS},
    **{name: _along_axis for name in _TRAILING_AXIS},
}
