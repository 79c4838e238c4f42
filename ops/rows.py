"""Row rules: which rows of an operator's inputs some rows of its outputs depend on, and where zero rows stay zero.

A value is seen in memory as ``[outer, n, inner]``; ``Rows`` is a run of the middle axis. Reshapes keep it, since they
keep memory; other operators map it to their inputs by the rules of this table. An operator without a rule reads all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops.spec import COMPOSITE, spec_of

# Composites whose first input, an incoming gradient, is a factor of every element of the first output.
_GRADIENT_FIRST = frozenset({"GeluGrad", "SiluGrad", "ReluGrad", "TanhGrad", "SigmoidGrad", "DropoutGrad"})
_SAME_AXIS = frozenset({"Softmax", "LogSoftmax", "ortgraph.SoftmaxGrad", "ortgraph.LogSoftmaxGrad"})


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows ``start`` to ``start + length`` of ``n``, for each of ``outer`` blocks of a value in row-major memory.

    ``swapped`` marks the 2-D transpose of such a value: the rows are columns there.
    """

    outer: int
    n: int
    start: int
    length: int
    swapped: bool = False

    def axis(self, shape: tuple[int, ...]) -> tuple[int, bool] | None:
        """(axis, whole): the axis that holds the rows, and whether it holds nothing else. None: shape cuts them."""
        before = 1
        if self.swapped:
            found = dataclasses.replace(self, swapped=False).axis(shape[::-1]) if len(shape) == 2 else None
            return None if found is None or found[0] != 0 else (1, found[1])
        for k, d in enumerate(shape):
            if before == self.outer and d == self.n:
                return k, True
            if before * d == self.outer * self.n and self.outer % before == 0:
                return k, False
            before *= d
        return None

    def compact(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with only these rows."""
        found = self.axis(shape)
        assert found is not None
        k = found[0]
        return (*shape[:k], shape[k] // self.n * self.length, *shape[k + 1 :])

    def moved(self, outer: int) -> Rows:
        return dataclasses.replace(self, outer=outer)


Needs = dict[int, Rows]  # input index -> rows; inputs that are not named are needed whole


def needs(node: ir.Node, rows: Rows) -> Needs | None:
    """Rows of the inputs that give ``rows`` of every output; None when the operator needs more or is unknown."""
    if rows.swapped:
        plain = dataclasses.replace(rows, swapped=False)
        turned = _key(node) == "Transpose" and plain.axis(_shape(node.inputs[0])) is not None
        return {0: plain} if turned and len(_shape(node.inputs[0])) == 2 else None
    rule = _NEEDS.get(_key(node))
    if rule is None and spec_of(node).elementwise and "node" not in node.attributes:
        rule = _elementwise
    return None if rule is None else rule(node, rows)


def kept_zero(node: ir.Node, zero_outside: Callable[[ir.Value | None], Rows | None]) -> Rows | None:
    """The rows outside of which the first output is zero, given those of the inputs; None when not known.

    The answer implies that ``needs(node, answer)`` describes the node.
    """
    rows = [zero_outside(v) for v in node.inputs]
    key = _key(node)
    if key in ("Add", "Sub", "Sum"):
        same = bool(rows) and rows[0] is not None and all(r == rows[0] for r in rows) and _same_shapes(node)
        return rows[0] if same else None
    if key == "Mul":
        return next(
            (r for r, v in zip(rows, node.inputs, strict=True) if r and _shape(v) == _shape(node.outputs[0])), None
        )
    if not rows or rows[0] is None:
        return None
    first = rows[0]
    if key in ("Neg", "Identity", "Cast", "Reshape"):
        return first if not first.swapped and first.axis(_shape(node.outputs[0])) else None
    if key == "Div":
        return first if _shape(node.inputs[0]) == _shape(node.outputs[0]) else None
    if key == "Transpose":
        return _transposed(node, first)
    if key in ("MatMul", "Gemm") and needs(node, first) is not None:
        zero_c = key == "MatMul" or len(node.inputs) < 3 or node.inputs[2] is None
        return first if zero_c else None
    if key in ("ortgraph.SoftmaxGrad", "ortgraph.LogSoftmaxGrad") or key.removeprefix("ortgraph.") in _GRADIENT_FIRST:
        return first if needs(node, first) is not None else None
    if key in ("ortgraph.LayerNormGrad", "ortgraph.AttentionGrad"):
        return first if needs(node, first) is not None else None
    return None


def sums_rows(node: ir.Node, zero_outside: Callable[[ir.Value | None], Rows | None]) -> Needs | None:
    """For operators that sum over rows: the rows of the inputs that carry anything, when the rest is zero."""
    key = _key(node)
    if key == "MatMul" and all(len(_shape(v)) == 2 for v in node.inputs):
        left, right = (zero_outside(v) for v in node.inputs)
        if left is not None and left.swapped:
            plain = dataclasses.replace(left, swapped=False)
            return (
                {0: left, 1: plain}
                if plain.axis(_shape(node.inputs[1])) == plain.axis(_shape(node.inputs[0])[::-1])
                else None
            )
        if right is not None and not right.swapped and (right.axis(_shape(node.inputs[1])) or (1, True))[0] == 0:
            return {0: dataclasses.replace(right, swapped=True), 1: right}
        return None
    if key == "MatMul":
        return _batched_sum(node, zero_outside)
    first = zero_outside(node.inputs[0]) if node.inputs else None
    if first is None or first.swapped:
        return None
    if key == "ReduceSum" and len(node.inputs) > 1:
        axes = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
        found = first.axis(_shape(node.inputs[0]))
        rank = len(_shape(node.inputs[0]))
        if axes is not None and found is not None and found[0] in {int(a) % rank for a in axes.numpy()}:
            return {0: first}
    if key == "ortgraph.EmbeddingGrad" and first.axis(_shape(node.inputs[1])) is not None:
        return {0: first, 1: first}
    return None


def _batched_sum(node: ir.Node, zero_outside: Callable[[ir.Value | None], Rows | None]) -> Needs | None:
    """A [..., M, K] times B [..., K, N] where A or B is zero outside some of the K."""
    a, b = (_shape(v) for v in node.inputs)
    if len(a) != len(b) or a[:-2] != b[:-2]:
        return None
    left, right = (zero_outside(v) for v in node.inputs)
    at = len(a) - 1
    if right is not None and not right.swapped and right.axis(b) == (at - 1, True):
        return {0: right.moved(math.prod(a[:-1])), 1: right}
    if left is not None and not left.swapped and left.axis(a) == (at, True):
        return {0: left, 1: left.moved(math.prod(b[:-2]))}
    return None


def reads_rows(node: ir.Node) -> Rows | None:
    """For Gather by a constant index and Slice along one axis: the rows of the first input that are read."""
    shape = static_shape(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
    if shape is None or not shape:
        return None
    if _key(node) == "Gather":
        index = _constant(node.inputs[1])
        if index is None or index.size != 1:
            return None
        axis = node.attributes.get_int("axis", 0) % len(shape)
        return Rows(math.prod(shape[:axis]), shape[axis], int(index.reshape(-1)[0]) % shape[axis], 1)
    if _key(node) == "Slice" and len(node.inputs) >= 4:
        starts, ends, axes = (_constant(v) for v in node.inputs[1:4])
        steps = _constant(node.inputs[4]) if len(node.inputs) > 4 else None
        if starts is None or ends is None or axes is None or axes.size != 1 or (steps is not None and steps[0] != 1):
            return None
        axis = int(axes[0]) % len(shape)
        low, high, _ = slice(int(starts[0]), int(ends[0])).indices(shape[axis])
        return Rows(math.prod(shape[:axis]), shape[axis], low, high - low) if high > low else None
    return None


def pads_rows(node: ir.Node) -> Rows | None:
    """For Pad with zeros along one axis: the rows of the output outside of which it is zero."""
    if _key(node) != "Pad" or node.attributes.get_string("mode", "constant") != "constant" or len(node.inputs) > 3:
        return None
    value = node.inputs[2] if len(node.inputs) > 2 else None
    pads, fill = _constant(node.inputs[1]), (None if value is None else _constant(value))
    shape = static_shape(node.outputs[0])
    if pads is None or shape is None or (value is not None and (fill is None or float(fill) != 0.0)):
        return None
    rank = len(shape)
    padded = [k for k in range(rank) if pads[k] or pads[k + rank]]
    if len(padded) != 1 or pads.min() < 0:
        return None
    k = padded[0]
    return Rows(math.prod(shape[:k]), shape[k], int(pads[k]), shape[k] - int(pads[k]) - int(pads[k + rank]))


def _key(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def _constant(value: ir.Value | None):
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    shape = static_shape(value) if value is not None else None
    return (-1,) if shape is None else shape  # matches nothing


def _same_shapes(node: ir.Node) -> bool:
    return all(_shape(v) == _shape(node.outputs[0]) for v in node.inputs)


def _elementwise(node: ir.Node, rows: Rows) -> Needs | None:
    out = _shape(node.outputs[0])
    found = rows.axis(out)
    if found is None:
        return None
    k, wanted = found[0], {}
    for i, value in enumerate(node.inputs):
        if value is None:
            continue
        shape = _shape(value)
        at = k - (len(out) - len(shape))
        if -1 in shape:
            return None
        if at < 0 or shape[at] == 1:
            continue
        wanted[i] = rows.moved(math.prod(shape[:at]) * (rows.outer // math.prod(out[:k])))
    return wanted


def _reshape(node: ir.Node, rows: Rows) -> Needs | None:
    return {0: rows} if rows.axis(_shape(node.inputs[0])) and rows.axis(_shape(node.outputs[0])) else None


def _transpose(node: ir.Node, rows: Rows) -> Needs | None:
    shape, found = _shape(node.inputs[0]), rows.axis(_shape(node.outputs[0]))
    perm = node.attributes.get_ints("perm", tuple(reversed(range(len(shape)))))
    if found is None or not found[1] or -1 in shape:
        return None
    return {0: rows.moved(math.prod(shape[: perm[found[0]]]))}


def _transposed(node: ir.Node, rows: Rows) -> Rows | None:
    """Rows of the input of a Transpose in terms of its output."""
    shape, out = _shape(node.inputs[0]), _shape(node.outputs[0])
    perm = list(node.attributes.get_ints("perm", tuple(reversed(range(len(shape))))))
    found = rows.axis(shape)
    if found is None or rows.swapped:
        return None
    if perm == [1, 0] and found[0] == 0:
        return dataclasses.replace(rows, swapped=True)
    return rows.moved(math.prod(out[: perm.index(found[0])])) if found[1] else None


def _matmul(node: ir.Node, rows: Rows) -> Needs | None:
    a, b, out = _shape(node.inputs[0]), _shape(node.inputs[1]), _shape(node.outputs[0])
    found = rows.axis(out)
    if found is None or found[0] >= len(out) - 1 or len(a) != len(out):
        return None
    if len(b) == 2:
        return {0: rows} if a[:-1] == out[:-1] else None
    if len(b) != len(out) or a[:-2] != b[:-2] or not found[1]:
        return None
    return {0: rows} if found[0] == len(out) - 2 else {0: rows, 1: rows}


def _gemm(node: ir.Node, rows: Rows) -> Needs | None:
    found = rows.axis(_shape(node.outputs[0]))
    if found is None or found[0] != 0 or node.attributes.get_int("transA", 0) != 0:
        return None
    wanted = {0: rows}
    if len(node.inputs) > 2 and node.inputs[2] is not None and _shape(node.inputs[2]) == _shape(node.outputs[0]):
        wanted[2] = rows
    return wanted


def _layer_norm(node: ir.Node, rows: Rows) -> Needs | None:
    shape = _shape(node.inputs[0])
    found = rows.axis(shape)
    axis = node.attributes.get_int("axis", -1) % len(shape)
    if found is None or found[0] >= axis:
        return None
    return {i: rows for i in range(4 if node.domain == COMPOSITE else 1)}


def _along_axis(node: ir.Node, rows: Rows) -> Needs | None:
    shape = _shape(node.outputs[0])
    found = rows.axis(shape)
    if found is None or found[0] == node.attributes.get_int("axis", -1) % len(shape):
        return None
    return {i: rows for i in range(len(node.inputs))}


def _attention(node: ir.Node, rows: Rows) -> Needs | None:
    """Rows are query positions. Keys and values are needed whole. Dropout is drawn for all rows together."""
    gradient = node.op_type == "AttentionGrad"
    query, mask = (1, 6) if gradient else (0, 3)
    if len(node.inputs) > mask + 1 or node.attributes.get_string("layout", "bhsd") != "bhsd":
        return None
    shape = _shape(node.inputs[query])
    if rows.axis(shape) != (2, True) or node.attributes.get_int("is_causal", 0) != 0:
        return None
    wanted = {i: rows for i in ((0, 1, 4, 5) if gradient else (0,))}
    value = node.inputs[mask] if len(node.inputs) > mask else None
    if value is not None and len(_shape(value)) >= 2 and _shape(value)[-2] == rows.n:
        wanted[mask] = rows.moved(math.prod(_shape(value)[:-2]))
    return wanted


_NEEDS: dict[str, Callable[[ir.Node, Rows], Needs | None]] = {
    "Reshape": _reshape,
    "Transpose": _transpose,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "ortgraph.LayerNormGrad": _layer_norm,
    "ortgraph.Attention": _attention,
    "ortgraph.AttentionGrad": _attention,
    **{f"ortgraph.{name}": _elementwise for name in (*_GRADIENT_FIRST, "Gelu", "Silu")},
    **{name: _along_axis for name in _SAME_AXIS},
}
