"""The joint graph of a caller that goes backward from the loss alone: tangents of all other results are zero."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node


def without_tangents(module: GraphModule, arguments: int, gone: Collection[int]) -> GraphModule:
    """A copy of a joint graph without some tangents, as if each were zero.

    What autograd computes is linear in all tangents together: a value that depends on zero tangents alone is zero. Sums
    lose such a term, other readers get a tensor of zeros.

    Args:
        module: Placeholders are arguments, then tangents. Not changed.
        arguments: Number of arguments.
        gone: Positions of the tangents that go.
    """
    graph = _copy(module.graph)
    tangents = graph.find_nodes(op="placeholder")[arguments:]
    zero: set[Node] = {tangents[i] for i in gone}
    late: dict[Node, None] = dict.fromkeys(tangents)
    for node in list(graph.nodes):
        if node.op == "placeholder" or not any(n in late for n in node.all_input_nodes):
            continue
        late[node] = None
        if node.op != "output" and all(n in zero for n in node.all_input_nodes if n in late):
            zero.add(node)
        else:
            _without_zeros(graph, node, zero)
    for node in reversed(late):
        if not node.users and node in zero:
            graph.erase_node(node)
    return GraphModule(module, graph)


def _copy(graph: Graph) -> Graph:
    made = Graph()
    nodes: dict[Node, Node] = {}
    results = made.graph_copy(graph, nodes)
    made.output(results).meta = dict(graph.output_node().meta)
    return made


def _without_zeros(graph: Graph, node: Node, zero: Collection[Node]) -> None:
    """Take the zero operands from a node that has others."""
    others = [n for n in node.all_input_nodes if n not in zero]
    if len(others) < len(node.all_input_nodes) and _is_sum(node) and len(others) == 1 and _same_type(others[0], node):
        node.replace_all_uses_with(others[0])
        graph.erase_node(node)
        return
    for operand in [n for n in node.all_input_nodes if n in zero]:
        node.replace_input_with(operand, _zeros(graph, operand, node))


def _is_sum(node: Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor and not node.kwargs


def _same_type(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.dtype == y.dtype


def _zeros(graph: Graph, like: Node, before: Node) -> Node:
    value = like.meta["val"]
    with graph.inserting_before(before):
        made = graph.call_function(
            torch.ops.aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": value.device}
        )
    made.meta = {k: v for k, v in like.meta.items() if k in ("val", "tensor_meta")}
    made.meta["partitioner_tag"] = "is_backward"
    return made
