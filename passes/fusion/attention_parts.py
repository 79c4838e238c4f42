"""What fuse-attention sees: products over heads, whatever views and transposes stand around them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import CONTRIB
from ortgraph.passes.fusion.operands import (
    axes_of,
    permutation,
    producer_of,
    rank,
    reshape_dims,
    same_shape,
    scalar,
    with_constant,
    with_lead,
)

Dim = int | ir.SymbolicDim
_SWAP = (0, 1, 3, 2)


@dataclasses.dataclass(frozen=True)
class Heads:
    """An operand [batch, heads, rows, columns]: ``source`` in the shape ``view`` (its own if None), transposed by perm."""

    source: ir.Value
    perm: tuple[int, ...] = (0, 1, 2, 3)
    view: tuple[Dim, ...] | None = None

    def swapped(self) -> Heads:
        """The same with rows and columns exchanged."""
        return dataclasses.replace(self, perm=tuple(self.perm[i] for i in _SWAP))

    @property
    def shape(self) -> tuple[Dim, ...]:
        dims = self.view or tuple(self.source.shape)  # type: ignore[arg-type]
        return tuple(dims[i] for i in self.perm)

    def build(self, b: Builder) -> ir.Value:
        """The operand as a value of four dimensions."""
        value = self.source
        if self.view is not None:
            value = with_lead(b, value, self.view[:2])
        return value if self.perm == (0, 1, 2, 3) else b.op("Transpose", value, perm=list(self.perm))


def heads(value: ir.Value | None, lead: tuple[Dim, Dim] | None = None) -> Heads | None:
    """The operand that a value is, seen through transposes and views of [batch heads, rows, columns].

    Args:
        value: Of three or four dimensions.
        lead: Batch and heads, for a value of three dimensions that no view makes.
    """
    if value is None or value.shape is None:
        return None
    turn = producer_of(value, "Transpose")
    if rank(value) == 4:
        inner = heads(turn.inputs[0]) if turn is not None and rank(turn.inputs[0]) == 4 else None
        if turn is None or inner is None:
            return Heads(value)
        perm = permutation(turn) or ()
        return dataclasses.replace(inner, perm=tuple(inner.perm[i] for i in perm))
    if rank(value) != 3:
        return None
    if turn is not None and permutation(turn) == (0, 2, 1):
        inner = heads(turn.inputs[0], lead)
        return None if inner is None else inner.swapped()
    view = producer_of(value, "Reshape")
    if view is not None and is_batch_view(view.inputs[0], value):
        return heads(view.inputs[0])
    if lead is None or reshape_dims(lead) is None:
        return None
    return Heads(value, view=(*lead, *list(value.shape)[1:]))


def unscaled(operand: Heads) -> tuple[Heads, float]:
    """The operand before a product with a constant, and that constant."""
    node = operand.source.producer()
    if operand.view is not None or node is None or node.op_type == "Reshape" or rank(operand.source) != 4:
        return operand, 1.0
    factor = passes(node)
    inner = heads(carried_by(node)) if factor else None
    if inner is None or not factor:
        return operand, 1.0
    return dataclasses.replace(inner, perm=tuple(inner.perm[i] for i in operand.perm)), factor


def is_batch_view(four: ir.Value | None, three: ir.Value | None) -> bool:
    """Whether [batch, heads, M, N] and [batch heads, M, N] are views of each other."""
    if four is None or three is None or rank(four) != 4 or rank(three) != 3:
        return False
    return list(four.shape)[2:] == list(three.shape)[1:]  # type: ignore[arg-type]


def passes(node: ir.Node) -> float | None:
    """The factor of a node that hands scores on: a batch view (1), or a product with a constant; None for others."""
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Reshape":
        a, b = node.inputs[0], node.outputs[0]
        return 1.0 if is_batch_view(a, b) or is_batch_view(b, a) else None
    if node.op_type in ("Mul", "Div"):
        found = with_constant(node)
        if found is None or not same_shape(found[0], node.outputs[0]) or (node.op_type == "Div" and found[2] != 1):
            return None
        return found[1] if node.op_type == "Mul" else 1.0 / found[1] if found[1] else None
    return None


@dataclasses.dataclass(frozen=True)
class Product:
    """left [b, h, m, k] times right [b, h, k, n], times a factor."""

    node: ir.Node
    left: Heads
    right: Heads
    factor: float

    @property
    def result(self) -> ir.Value:
        return self.node.outputs[0]


def product(node: ir.Node | None, lead: tuple[Dim, Dim] | None) -> Product | None:
    """The product over heads that a MatMul or FusedMatMul is."""
    if node is None or node.op_type not in ("MatMul", "FusedMatMul"):
        return None
    if node.domain not in (("", "ai.onnx") if node.op_type == "MatMul" else (CONTRIB,)):
        return None
    if attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0):
        return None
    left, right = (heads(v, lead) for v in node.inputs[:2])
    if left is None or right is None or rank(node.outputs[0]) not in (3, 4):
        return None
    left = left.swapped() if attribute(node, "transA", 0) else left
    right = right.swapped() if attribute(node, "transB", 0) else right
    return Product(node, left, right, float(attribute(node, "alpha", 1.0)))


def repeated(operand: Heads) -> tuple[ir.Value, int] | None:
    """(value [B, G, T, D], how often) when the operand is it with each head repeated in place."""
    four = operand.view or tuple(operand.source.shape or ())
    view = producer_of(operand.source, "Reshape")
    wide = producer_of(view.inputs[0], "Expand") if view is not None else None
    narrow = producer_of(wide.inputs[0], "Reshape", "Unsqueeze") if wide is not None else None
    source = narrow.inputs[0] if narrow is not None else None
    if view is None or wide is None or source is None or rank(source) != 4 or rank(wide.outputs[0]) != 5:
        return None
    a, b = list(wide.inputs[0].shape or ()), list(wide.outputs[0].shape or ())  # type: ignore[union-attr]
    groups, share = b[1], b[2]
    whole = [b[0], groups, *b[3:]] == list(source.shape)  # type: ignore[arg-type]
    if not (isinstance(groups, int) and isinstance(share, int) and whole and a == [*b[:2], 1, *b[3:]]):
        return None
    return (source, share) if list(four) == [b[0], groups * share, *b[3:]] else None


def summed_groups(value: ir.Value, swapped: bool, shape: tuple, share: int) -> tuple[ir.Node, ...] | None:
    """The nodes from a gradient of repeated heads to the sum over each group, None when there is no such chain."""
    nodes: list[ir.Node] = []
    wide = [*shape[:2], share, *shape[2:]]
    while True:
        used = list(value.uses())
        if len(used) != 1 or value.is_graph_output() or value.shape is None:
            return None
        node = used[0].node
        nodes.append(node)
        if node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "ReduceSum":
            return tuple(nodes) if axes_of(node) == (2,) and list(value.shape) == wide and not swapped else None
        if node.op_type == "Transpose":
            n = rank(value) or 0
            if permutation(node) != (*range(n - 2), n - 1, n - 2):
                return None
            swapped = not swapped
        elif node.op_type != "Reshape" or list(node.outputs[0].shape or ())[-2:] != list(value.shape)[-2:]:
            return None
        value = node.outputs[0]


@dataclasses.dataclass(frozen=True)
class Scores:
    """softmax(factor Q K^T + masks): what stands above a softmax.

    Attributes:
        product: Q K^T.
        factor: On the product, its own included.
        masks: Added to it; values, or (condition, number where it holds, number where not).
        nodes: All nodes from the product down to the softmax, the latter excluded.
    """

    product: Product
    factor: float
    masks: tuple[ir.Value | tuple[ir.Value, float, float], ...]
    nodes: tuple[ir.Node, ...]


def scores_above(value: ir.Value | None, lead: tuple[Dim, Dim] | None) -> Scores | str | None:
    """The scores that a softmax reads; a reason when they are nearly that, None for something else."""
    node = value.producer() if value is not None else None
    if value is None or node is None:
        return None
    found = product(node, lead)
    if found is not None:
        return Scores(found, found.factor, (), (node,))
    factor = passes(node)
    if factor is not None:
        inner = scores_above(carried_by(node), lead)
        if not isinstance(inner, Scores):
            return inner
        if factor != 1.0 and inner.masks:
            return "the scores are scaled after the mask"
        return dataclasses.replace(inner, factor=inner.factor * factor, nodes=(*inner.nodes, node))
    if node.domain not in ("", "ai.onnx"):
        return None
    reason: str | None = None
    for carried, mask in _masked(node):
        inner = scores_above(carried, lead)
        if isinstance(inner, Scores):
            return dataclasses.replace(inner, masks=(*inner.masks, mask), nodes=(*inner.nodes, node))
        reason = reason or inner
    return reason


def carried_by(node: ir.Node) -> ir.Value | None:
    """The operand of a node for which ``passes`` holds that is not the constant."""
    found = with_constant(node) if node.op_type in ("Mul", "Div") else None
    return node.inputs[0] if found is None else found[0]


def _masked(node: ir.Node) -> list[tuple[ir.Value, ir.Value | tuple[ir.Value, float, float]]]:
    """(scores, mask) pairs that a node may be: a sum, or a choice between scores and a low number."""
    out = node.outputs[0]
    if node.op_type == "Add":
        a, b = node.inputs[0], node.inputs[1]
        pairs = [(x, y) for x, y in ((a, b), (b, a)) if x is not None and y is not None]
        return [(x, y) for x, y in pairs if same_shape(x, out) and _fits(y, out)]
    if node.op_type != "Where":
        return []
    condition, chosen, other = node.inputs[:3]
    if condition is None or chosen is None or other is None or not _fits(condition, out):
        return []
    low = [_low(v) for v in (chosen, other)]
    if low[1] is not None and same_shape(chosen, out):
        return [(chosen, (condition, 0.0, low[1]))]
    if low[0] is not None and same_shape(other, out):
        return [(other, (condition, low[0], 0.0))]
    return []


def _low(value: ir.Value) -> float | None:
    """A constant beside which every score vanishes."""
    number = scalar(value)
    return number if number is not None and number <= -1e30 else None


def _fits(mask: ir.Value, scores: ir.Value) -> bool:
    """Whether the mask broadcasts to the scores without making them larger."""
    if mask.shape is None or scores.shape is None or len(mask.shape) > len(scores.shape):
        return False
    tail = list(scores.shape)[len(scores.shape) - len(mask.shape) :]
    return all(
        m == 1 or (m == s and (isinstance(m, int) or m.value is not None))
        for m, s in zip(mask.shape, tail, strict=True)
    )


def safe_softmax(p: ir.Value, scores: ir.Value | None) -> tuple[ir.Value, list[ir.Node]]:
    """(P with rows of no key set to 0, the nodes of that), or P as it is: PyTorch's softmax in its own attention."""
    chosen = [u.node for u in p.uses() if u.node.op_type == "Where" and u.idx == 2 and u.node.domain in ("", "ai.onnx")]
    if len(chosen) != 1 or len(list(p.uses())) != 1 or scalar(chosen[0].inputs[1]) != 0.0:
        return p, []
    equal = producer_of(chosen[0].inputs[0], "Equal")
    highest = producer_of(equal.inputs[0], "ReduceMax") if equal is not None else None
    if equal is None or highest is None or highest.inputs[0] is not scores or scalar(equal.inputs[1]) != -math.inf:
        return p, []
    last = (rank(scores) or 0) - 1
    if axes_of(highest) != (last,) or not attribute(highest, "keepdims", 1) or not same_shape(p, chosen[0].outputs[0]):
        return p, []
    return chosen[0].outputs[0], [highest, equal, chosen[0]]


def is_causal(array: np.ndarray, rows: Dim, keys: Dim) -> bool:
    """Whether a constant mask hides exactly the keys behind each query."""
    if not isinstance(rows, int) or not isinstance(keys, int) or array.shape[-2:] != (rows, keys) or not array.size:
        return False
    seen = np.tri(rows, keys, dtype=bool)
    each = array.reshape(-1, rows, keys)  # the same for every sample and head
    return bool((each[:, seen] == 0).all() and (each[:, ~seen] <= -1e30).all())


def readers_below(value: ir.Value) -> tuple[dict[ir.Value, float], list[ir.Node], list[ir.Node]]:
    """(values that carry ``value`` with their factors, the nodes between, all other readers in order)."""
    carried, between, others = {value: 1.0}, [], []
    todo = [value]
    while todo:
        at = todo.pop(0)
        for node in dict.fromkeys(use.node for use in at.uses()):
            factor = passes(node)
            turn = node.op_type == "Transpose" and node.domain in ("", "ai.onnx")
            if factor is None and not turn:
                others.append(node)
                continue
            between.append(node)
            todo.append(node.outputs[0])
            if at in carried and factor is not None:  # what lies behind a transpose is seen by heads(), or not at all
                carried[node.outputs[0]] = carried[at] * factor
    return carried, between, list(dict.fromkeys(others))


def lead_of(values: Sequence[ir.Value | None]) -> tuple[Dim, Dim] | None:
    """Batch and heads from the first value of four dimensions; 1 and the batch of one with three."""
    for value in values:
        if value is not None and rank(value) == 4:
            return tuple(value.shape)[:2]  # type: ignore[return-value, arg-type]
    first = next((v for v in values if v is not None and rank(v) == 3), None)
    return None if first is None else (1, first.shape[0])  # type: ignore[index]


def close(a: float, b: float) -> bool:
    """Equal up to the rounding of float32 attributes and constants."""
    return math.isclose(a, b, rel_tol=1e-6)
