"""The last product of a classifier, its cross-entropy and their gradients: recognised as one unit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.graph import static_shape
from ortgraph.manager.rewrite import op_key
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.canonical.values import constant_ints
from ortgraph.passes.fusion.operands import axes_of, permutation, producer_of, scalar

_VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity")
GRADIENT = f"{COMPOSITE}.CrossEntropyGrad"


class NotAHead(Exception):  # noqa: N818 - not an error: it carries the reason of a refusal
    """Why the nodes around a loss are no head that can be computed in chunks."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A gradient that the backward half makes from the gradient of the scores.

    Attributes:
        value: The gradient as it stands in the graph.
        kind: ``hidden``, ``weight`` or ``bias``.
        path: Nodes between the gradient of the scores and the product, in order (row views and pads of zero rows).
        transposed: For ``weight``: laid out as [depth, classes].
    """

    value: ir.Value
    kind: str
    path: tuple[ir.Node, ...] = ()
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class LossHead:
    """scores = rows(hidden W + bias); loss = CrossEntropy(scores); gradients of hidden, W and bias.

    Attributes:
        loss: The CrossEntropy node.
        gradient: Its CrossEntropyGrad.
        product: The MatMul or Gemm that makes the scores.
        hidden: Left operand, [.., depth].
        weight: Right operand with transposes looked through.
        classes_first: ``weight`` is [classes, depth].
        bias: [classes], or None.
        forward: Nodes between the product and the loss: bias, row views and slices of rows.
        rows: Rows that reach the loss.
        classes: Number of classes.
        depth: Width of ``hidden``.
        results: The gradients made from the gradient of the scores.
        nodes: Everything that the loss head consists of, in no particular order.
    """

    loss: ir.Node
    gradient: ir.Node
    product: ir.Node
    hidden: ir.Value
    weight: ir.Value
    classes_first: bool
    bias: ir.Value | None
    forward: tuple[ir.Node, ...]
    rows: int
    classes: int
    depth: int
    results: tuple[Result, ...]
    nodes: tuple[ir.Node, ...]


@dataclasses.dataclass(frozen=True)
class _Product:
    """left right + addend, both operands as they are after looking through transposes."""

    left: ir.Value
    left_transposed: bool
    right: ir.Value
    right_transposed: bool
    addend: ir.Value | None


def find_head(loss: ir.Node) -> LossHead:
    """The head that belongs to a CrossEntropy node.

    Raises:
        NotAHead: With the reason.
    """
    scores = loss.inputs[0]
    shape = None if scores is None else static_shape(scores)
    if scores is None or shape is None:
        raise NotAHead("the number of rows and classes is not known: bind the symbolic dimensions first")
    if len(shape) != 2:
        raise NotAHead("the scores are not [rows, classes]")
    product_node, forward, bias = _forward(scores)
    product = _product(product_node)
    made = _static(product_node.outputs[0])
    right = _static(product.right)
    if len(right) != 2 or product.left_transposed:
        raise NotAHead(f"{product_node.op_type} {product_node.name!r} is no product of rows with a matrix")
    if bias is not None and product.addend is not None:
        raise NotAHead("two biases are added")
    bias = bias or product.addend
    if bias is not None and not _static(bias)[-1:] == (math.prod(_static(bias)),) == (shape[1],):
        raise NotAHead("what is added to the scores is no bias of one number per class")
    head_rows = math.prod(made[:-1])
    selected = _follow(np.arange(head_rows).reshape(made[:-1]), forward, made[-1])
    gradient = _gradient(loss)
    results, path = _backward(gradient, product_node, product, selected, head_rows)
    return LossHead(
        loss, gradient, product_node, product.left, product.right, product.right_transposed, bias, forward,
        shape[0], shape[1], _static(product.left)[-1], results,
        (product_node, *forward, loss, gradient, *path),
    )  # fmt: skip


def _static(value: ir.Value | None) -> tuple[int, ...]:
    shape = None if value is None else static_shape(value)
    if shape is None:
        name = "an operand" if value is None else f"%{value.name}"
        raise NotAHead(f"the shape of {name} is not known: bind the symbolic dimensions first")
    return shape


def _forward(scores: ir.Value) -> tuple[ir.Node, tuple[ir.Node, ...], ir.Value | None]:
    """(product, nodes from it to the scores, bias added on the way)."""
    path: list[ir.Node] = []
    bias, value = None, scores
    while True:
        node = value.producer()
        if node is None or node.domain not in ("", "ai.onnx"):
            break
        if node.op_type in ("MatMul", "Gemm"):
            return node, tuple(reversed(path)), bias
        if node.op_type == "Add" and bias is None:
            source = next((v for v in node.inputs if producer_of(v, "MatMul") is not None), None)
            if source is None:
                break
            bias = node.inputs[1] if source is node.inputs[0] else node.inputs[0]
        elif node.op_type in (*_VIEWS, "Slice"):
            source = node.inputs[0]
        else:
            break
        path.append(node)
        assert source is not None
        value = source
    made_by = "a graph input" if value.producer() is None else f"{value.producer().op_type}"  # type: ignore[union-attr]
    raise NotAHead(f"the scores come from {made_by}, not from a matrix product")


def _plain(value: ir.Value | None) -> tuple[ir.Value, bool]:
    """(source, whether the value is its transpose) of a matrix."""
    assert value is not None
    node, flipped = producer_of(value, "Transpose"), False
    while node is not None and permutation(node) == (1, 0) and node.inputs[0] is not None:
        value, flipped = node.inputs[0], not flipped
        node = producer_of(value, "Transpose")
    return value, flipped


def _product(node: ir.Node) -> _Product:
    left, left_flipped = _plain(node.inputs[0])
    right, right_flipped = _plain(node.inputs[1])
    if node.op_type == "MatMul":
        return _Product(left, left_flipped, right, right_flipped, None)
    addend = given(node, 2)
    if attribute(node, "alpha", 1.0) != 1.0 or (addend is not None and attribute(node, "beta", 1.0) != 1.0):
        raise NotAHead(f"Gemm {node.name!r} scales its product or its addend")
    flips = bool(attribute(node, "transA", 0)), bool(attribute(node, "transB", 0))
    return _Product(left, left_flipped != flips[0], right, right_flipped != flips[1], addend)


def _gradient(loss: ir.Node) -> ir.Node:
    log_prob = loss.outputs[1] if len(loss.outputs) > 1 else None
    found = [] if log_prob is None else [u.node for u in log_prob.uses() if op_key(u.node) == GRADIENT]
    if len(found) != 1:
        raise NotAHead("the loss has no gradient" if not found else "the loss has more than one gradient")
    (node,) = found
    same = ("reduction", "mean"), ("ignore_index", -100)
    if node.inputs[1] is not log_prob or any(attribute(node, k, d) != attribute(loss, k, d) for k, d in same):
        raise NotAHead("the loss and its gradient are of different kinds")
    if node.inputs[2] is not loss.inputs[1] or given(node, 3) is not given(loss, 2):
        raise NotAHead("the loss and its gradient read different labels or weights")
    mean = attribute(loss, "reduction", "mean") == "mean"
    if mean and (len(loss.outputs) < 3 or given(node, 4) is not loss.outputs[2]):
        raise NotAHead("the gradient is normalised by another number than the loss")
    return node


def _follow(rows: np.ndarray, path: tuple[ir.Node, ...], width: int) -> np.ndarray:
    """What row views, slices and pads of rows make of an array of row numbers; the last dimension stays whole."""
    for node in path:
        shape = _static(node.outputs[0])
        if not shape or shape[-1] != width:
            raise NotAHead(f"{node.op_type} {node.name!r} cuts the classes")
        if node.op_type == "Slice":
            rows = _sliced(rows, node)
        elif node.op_type == "Pad":
            rows = _padded(rows, node)
        elif node.op_type != "Add":
            rows = rows.reshape(shape[:-1])
        if rows.shape != shape[:-1]:
            raise NotAHead(f"{node.op_type} {node.name!r} is not understood")
    return rows.reshape(-1)


def _sliced(rows: np.ndarray, node: ir.Node) -> np.ndarray:
    starts, ends = (constant_ints(node.inputs[i]) for i in (1, 2))
    if starts is None or ends is None:
        raise NotAHead(f"Slice {node.name!r} depends on data")
    axes = tuple(range(len(starts))) if given(node, 3) is None else constant_ints(node.inputs[3])
    steps = (1,) * len(starts) if given(node, 4) is None else constant_ints(node.inputs[4])
    if axes is None or steps is None or any(s < 1 for s in steps):
        raise NotAHead(f"Slice {node.name!r} depends on data or runs backwards")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= rows.ndim + 1
        if axis == rows.ndim:
            raise NotAHead(f"Slice {node.name!r} cuts the classes")
        rows = rows[(slice(None),) * axis + (slice(start, end, step),)]
    return rows


def _padded(rows: np.ndarray, node: ir.Node) -> np.ndarray:
    pads = constant_ints(node.inputs[1])
    fill = given(node, 2)
    if (
        pads is None
        or given(node, 3) is not None
        or attribute(node, "mode", "constant") not in ("constant", b"constant")
    ):
        raise NotAHead(f"Pad {node.name!r} is not understood")
    if (fill is not None and scalar(fill) != 0) or min(pads) < 0:
        raise NotAHead(f"Pad {node.name!r} does not add zeros")
    n = rows.ndim + 1
    return np.pad(rows, [(pads[i], pads[i + n]) for i in range(n - 1)], constant_values=-1)


def _backward(
    gradient: ir.Node, head: ir.Node, product: _Product, selected: np.ndarray, head_rows: int
) -> tuple[tuple[Result, ...], list[ir.Node]]:
    """The gradients made of dScores, and all nodes on the way. Every reader must be understood."""
    results: list[Result] = []
    nodes: list[ir.Node] = []
    start = gradient.outputs[0]
    width = _static(start)[-1]
    todo: list[tuple[ir.Value, tuple[ir.Node, ...], bool]] = [(start, (), False)]
    while todo:
        value, path, flipped = todo.pop()
        if value.is_graph_output():
            raise NotAHead(f"the gradient of the scores is graph output %{value.name}")
        for node in dict.fromkeys(u.node for u in value.uses()):
            nodes.append(node)
            if node.domain not in ("", "ai.onnx") or node.graph is not gradient.graph:
                raise NotAHead(f"the gradient of the scores is read by {op_key(node)} {node.name!r}")
            if node.op_type == "Transpose" and permutation(node) == (1, 0):
                todo.append((node.outputs[0], path, not flipped))
            elif node.op_type in (*_VIEWS, "Pad") and node.inputs[0] is value and not flipped:
                todo.append((node.outputs[0], (*path, node), False))
            else:
                result = _result(node, value, flipped, product, path)
                back = _follow(np.arange(len(selected)).reshape(_static(start)[:-1]), path, width)
                expected = np.full(head_rows, -1)
                expected[selected] = np.arange(len(selected))
                if not np.array_equal(back, expected):
                    raise NotAHead("forward and backward half take the rows differently")
                results.append(result)
    if not results:
        raise NotAHead("nothing reads the gradient of the scores")
    return tuple(results), nodes


def _result(node: ir.Node, value: ir.Value, flipped: bool, product: _Product, path: tuple[ir.Node, ...]) -> Result:
    made = node.outputs[0]
    if node.op_type == "ReduceSum" and not flipped:
        rank = len(_static(value))
        if axes_of(node) == tuple(range(rank - 1)):
            return Result(made, "bias", path)
    if node.op_type in ("MatMul", "Gemm"):
        found = _product(node)
        scores, _ = _plain(value)
        by_weight = found.right is product.right and found.right_transposed != product.right_transposed
        if found.addend is None and found.left is scores and not found.left_transposed and by_weight:
            return Result(made, "hidden", path)
        first = found.left is scores and found.left_transposed and not found.right_transposed
        if found.addend is None and first and _same_rows(found.right, product.left):
            return Result(made, "weight", path)
        second = found.right is scores and found.left_transposed and not found.right_transposed
        if found.addend is None and second and _same_rows(found.left, product.left):
            return Result(made, "weight", path, transposed=True)
    raise NotAHead(f"the gradient of the scores is also read by {op_key(node)} {node.name!r}")


def _same_rows(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are views of one array of rows with the same width."""
    return _root(a) is _root(b) and len(_static(a)) == 2 and _static(a)[-1] == _static(b)[-1]


def _root(value: ir.Value) -> ir.Value:
    node = producer_of(value, *_VIEWS)
    while node is not None and node.inputs[0] is not None:
        value = node.inputs[0]
        node = producer_of(value, *_VIEWS)
    return value


def scores_of(head: LossHead) -> tuple[ir.Value, ...]:
    """The values with a row of classes in the forward half: scores in every view, and log-probabilities."""
    return (*head.product.outputs, *(n.outputs[0] for n in head.forward), head.loss.outputs[1])


def reaches(start: ir.Value, graph: ir.Graph, stop: set[ir.Node]) -> Iterator[ir.Node | ir.Value]:
    """What depends on ``start``: nodes of ``stop`` or of subgraphs that are met, and graph outputs."""
    seen: set[ir.Node] = set()
    todo = [start]
    while todo:
        value = todo.pop()
        if value.is_graph_output():
            yield value
        for use in value.uses():
            if use.node in seen:
                continue
            seen.add(use.node)
            if use.node in stop or use.node.graph is not graph:  # what a subgraph does with it is not looked at
                yield use.node
                continue
            todo.extend(use.node.outputs)


def sources(value: ir.Value, free: ir.Value | None = None) -> set[ir.Node]:
    """All nodes that ``value`` depends on, without looking behind ``free``."""
    found: set[ir.Node] = set()
    todo = [value]
    while todo:
        at = todo.pop()
        node = at.producer()
        if at is free or node is None or node in found:
            continue
        found.add(node)
        todo.extend(values_read(node))
    return found
