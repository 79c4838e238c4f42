"""A loss over a slice of the scores, as causal language models shift: the same loss over all scores."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import onnx_ir as ir

from ortgraph.graph import Names, replace_value, static_shape
from ortgraph.graph.edit import remove_node, take_type
from ortgraph.manager.rewrite import op_key
from ortgraph.ops.builder import Builder
from ortgraph.ops.loss import DEFAULT_IGNORE
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.canonical.values import constant_ints
from ortgraph.passes.fusion.operands import producer_of
from ortgraph.passes.memory.loss_head import NotAHead


@dataclasses.dataclass(frozen=True)
class SlicedLoss:
    """CrossEntropy(Reshape(Slice(scores)), labels), and Pad(Reshape(its gradient)).

    Attributes:
        scores: What is sliced, [..., classes].
        pad: Puts the rows of the gradient back among zeros.
        forward: Nodes from the scores to the loss, last first.
        before, after: Places that the slice cuts off each dimension of the scores.
    """

    scores: ir.Value
    pad: ir.Node
    forward: tuple[ir.Node, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


def find_sliced(loss: ir.Node, gradient: ir.Node) -> SlicedLoss | None:
    """The slice between the scores and their loss, None when there is none.

    Raises:
        NotAHead: Forward and backward half do not cut the same rows.
    """
    view = producer_of(loss.inputs[0], "Reshape")
    cut = producer_of(view.inputs[0] if view is not None else loss.inputs[0], "Slice")
    if cut is None or cut.inputs[0] is None:
        return None
    whole, part = static_shape(cut.inputs[0]), static_shape(cut.outputs[0])
    constants = [constant_ints(v) for v in cut.inputs[1:]]
    if whole is None or part is None or any(c is None for c in constants) or len(constants) < 3:
        raise NotAHead(f"Slice {cut.name!r} before the loss is not understood")
    starts, _, axes = (c or () for c in constants[:3])
    if len(constants) > 3 and any(s != 1 for s in constants[3] or ()):
        raise NotAHead(f"Slice {cut.name!r} before the loss takes steps")
    before = [0] * len(whole)
    for start, axis in zip(starts, axes, strict=True):
        d = whole[axis]
        before[axis % len(whole)] = min(max(start + d if start < 0 else start, 0), d)
    after = [w - p - b for w, p, b in zip(whole, part, before, strict=True)]
    if before[-1] or after[-1]:
        raise NotAHead(f"Slice {cut.name!r} cuts the classes")
    forward = (cut,) if view is None else (view, cut)
    return SlicedLoss(cut.inputs[0], _pad(gradient, before, after), forward, tuple(before), tuple(after))


def _pad(gradient: ir.Node, before: list[int], after: list[int]) -> ir.Node:
    """The Pad that undoes the slice for the gradient."""
    value = gradient.outputs[0]
    node = _only_reader(value)
    if node.op_type == "Reshape":
        node = _only_reader(node.outputs[0])
    zeros = len(node.inputs) == 2 and attribute(node, "mode", "constant") in ("constant", b"constant")
    if op_key(node) != "Pad" or not zeros or constant_ints(node.inputs[1]) != (*before, *after):
        raise NotAHead("forward and backward half take the rows differently")
    return node


def _only_reader(value: ir.Value) -> ir.Node:
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        raise NotAHead("the gradient of the scores has several readers")
    return uses[0].node


def take_whole(
    graph: ir.Graph, by: str, loss: ir.Node, gradient: ir.Node, found: SlicedLoss
) -> tuple[ir.Node, ir.Node]:
    """Put the loss over all scores in place of the one over the slice: rows that were cut off are ignored.

    Returns:
        The new loss and its gradient.
    """
    names, ignore = Names(graph), attribute(loss, "ignore_index", DEFAULT_IGNORE)
    shape, labels = static_shape(found.scores), loss.inputs[1]
    assert shape is not None and labels is not None
    b = Builder(graph, by, before=loss, origins=(loss,), names=names)
    part = [d - low - high for d, low, high in zip(shape, found.before, found.after, strict=True)][:-1]
    pads = b.ints((*found.before[:-1], *found.after[:-1]))
    padded = b.op("Pad", b.op("Reshape", labels, b.ints(part)), pads, b.scalar(ignore, labels))
    rows = math.prod(shape[:-1])
    target = b.op("Reshape", padded, b.ints([rows]))
    scores = b.op("Reshape", found.scores, b.ints([rows, shape[-1]]))
    made = b.multi(
        loss.op_type, scores, target, *loss.inputs[2:], outputs=len(loss.outputs), domain=COMPOSITE,
        **_attributes(loss),
    )  # fmt: skip
    log_prob = loss.outputs[1]
    for old, new in ((loss.outputs[0], made[0]), *zip(loss.outputs[2:], made[2:], strict=True)):
        if old.uses() or old.is_graph_output():
            take_type(new, old)
            replace_value(old, new)
    late = Builder(graph, by, before=found.pad, origins=(gradient,), names=names)
    inputs = [{log_prob: made[1], labels: target}.get(v, v) if v is not None else None for v in gradient.inputs]
    slope = late.op(gradient.op_type, *inputs, domain=COMPOSITE, **_attributes(gradient))
    replace_value(found.pad.outputs[0], late.op("Reshape", slope, late.ints(shape)))
    back = found.pad.inputs[0]
    between = back.producer() if back is not None else None
    for node in dict.fromkeys((found.pad, between, gradient, loss, *found.forward)):
        if node is not None and node.graph is graph and not any(o.uses() or o.is_graph_output() for o in node.outputs):
            remove_node(node)
    whole_loss, whole_gradient = made[0].producer(), slope.producer()
    assert whole_loss is not None and whole_gradient is not None
    return whole_loss, whole_gradient


def _attributes(node: ir.Node) -> dict[str, Any]:
    return dict(node.attributes)
