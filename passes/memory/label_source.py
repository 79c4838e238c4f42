"""Where the labels of a loss come from: the data input, and the nodes between it and the loss."""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.graph import TrainingGraph
from ortgraph.ops.shapes import attribute, given
from ortgraph.passes.fusion.operands import scalar
from ortgraph.passes.memory.loss_head import NotAHead

_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose", "Slice"})
_MOST_NODES = 64  # behind labels stand a shift and a mask, not a network


def label_source(labels: ir.Value | None, ignore: int, graph: TrainingGraph) -> ir.Value:
    """The data input of which every label that counts is an element, each element at most once.

    So the labels that count in the input are at least as many as those that reach the loss.

    Raises:
        NotAHead: With the reason.
    """
    inputs = set(graph.signature.inputs)
    nodes = needed_for(labels)
    read = {v for node in nodes for v in values_read(node) if v.is_graph_input() and not v.is_initializer()}
    other = sorted(v.name or "" for v in read if v.name not in inputs)
    if other:
        raise NotAHead(f"the labels depend on %{other[0]}, which is no data input")
    if any(node.op_type.startswith("Random") or "node" in node.attributes for node in nodes):
        raise NotAHead("the labels are drawn")
    value = labels
    while value is not None and (node := value.producer()) is not None:
        value = _behind(node, ignore)
    if value is None or value.name not in inputs:
        raise NotAHead("the labels are no part of a data input")
    return value


def needed_for(labels: ir.Value | None) -> list[ir.Node]:
    """The nodes that the labels are computed by, in graph order.

    Raises:
        NotAHead: They are many.
    """
    assert labels is not None
    found: set[ir.Node] = set()
    todo = [labels.producer()]
    while todo:
        node = todo.pop()
        if node is None or node in found:
            continue
        found.add(node)
        if len(found) > _MOST_NODES:
            raise NotAHead("the labels are computed by many nodes")
        todo.extend(v.producer() for v in values_read(node))
    first = labels.producer()
    graph = first.graph if first is not None else None
    return [] if graph is None else [n for n in graph if n in found]


def _behind(node: ir.Node, ignore: int) -> ir.Value | None:
    """The operand that the labels behind a node are elements of, each at most once; what else there is, is ignored."""
    if node.domain not in ("", "ai.onnx"):
        raise NotAHead(f"the labels come from {node.domain}.{node.op_type} {node.name!r}")
    if node.op_type in _VIEWS:
        return node.inputs[0]
    if node.op_type == "Cast" and node.outputs[0].dtype in (ir.DataType.INT64, ir.DataType.INT32):
        return node.inputs[0]
    if node.op_type == "Pad" and attribute(node, "mode", "constant") in ("constant", b"constant"):
        fill = given(node, 2)
        if fill is not None and scalar(fill) == ignore:
            return node.inputs[0]
    if node.op_type == "Where":
        for kept, other in ((1, 2), (2, 1)):
            if scalar(node.inputs[other]) == ignore and _same_size(node.inputs[kept], node.outputs[0]):
                return node.inputs[kept]
    if node.op_type == "Gather" and attribute(node, "axis", 0) == 0 and _distinct(node.inputs[1]):
        return node.inputs[0]
    if node.op_type == "Concat":
        free = [v for v in node.inputs if v is not None and not _all_ignored(v, ignore)]
        if len(free) == 1:
            return free[0]
    raise NotAHead(f"the labels come from {node.op_type} {node.name!r}")


def _distinct(index: ir.Value | None) -> bool:
    """Positions that TopK gives (``remove-padding`` packs rows by them)."""
    maker = index.producer() if index is not None else None
    return maker is not None and maker.op_type == "TopK" and index is maker.outputs[1]


def _same_size(value: ir.Value | None, other: ir.Value) -> bool:
    return value is not None and value.shape is not None and other.shape is not None and value.shape == other.shape


def _all_ignored(value: ir.Value, ignore: int) -> bool:
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and bool((tensor.numpy() == ignore).all())
