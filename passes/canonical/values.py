"""What the canonical passes ask about values, and how they edit: constants, equal shapes, redirecting, pruning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.graph import STAGES, replace_value, stamp
from ortgraph.graph.edit import add_constant

BEFORE_PLAN = STAGES[:-1]  # a planned graph has its order and places fixed: canonical passes come before


def is_standard(node: ir.Node, *op_types: str) -> bool:
    """Whether the node is one of these operators of the ONNX standard domain."""
    return node.domain in ("", "ai.onnx") and node.op_type in op_types


def bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """The subgraphs that a node carries (branches of If, body of Loop and Scan)."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a genuine constant: an initializer that is no graph input, or the output of a Constant node.

    Parameters, buffers and states are graph inputs and never constants, whatever their value. An initializer that is
    also a graph input is a default that a caller may override, so it is no constant either.
    """
    if value is None or value.is_graph_input():
        return None
    if value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is None or not is_standard(node, "Constant") or len(node.attributes) != 1:
        return None
    attribute = next(iter(node.attributes.values()))
    if attribute.is_ref() or attribute.name == "sparse_value":
        return None
    return _constant_attribute(attribute)


def _constant_attribute(attribute: ir.Attr) -> ir.TensorProtocol | None:
    if attribute.name == "value":
        return attribute.as_tensor()
    if attribute.name in ("value_int", "value_ints"):
        return ir.tensor(np.array(attribute.value, dtype=np.int64))
    if attribute.name in ("value_float", "value_floats"):
        return ir.tensor(np.array(attribute.value, dtype=np.float32))
    return None  # strings: no pass computes with them


def constant_array(value: ir.Value | None, max_elements: int = 1 << 20) -> np.ndarray | None:
    """The elements of a genuine constant of at most ``max_elements`` elements, else None."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size > max_elements or tensor.dtype == ir.DataType.STRING:
        return None
    return tensor.numpy()


def constant_ints(value: ir.Value | None) -> tuple[int, ...] | None:
    """The elements of a small constant integer tensor (axes, shapes, steps), else None."""
    array = constant_array(value, 1024)
    if array is None or array.dtype.kind not in "iu":
        return None
    return tuple(int(e) for e in array.reshape(-1))


def dims(value: ir.Value | None) -> tuple[int | str, ...] | None:
    """The recorded shape when each dimension is a number or has a name; None if one is unknown.

    Two unnamed dimensions compare equal in onnx_ir, so a shape with one of them is equal to nothing.
    """
    if value is None or value.shape is None:
        return None
    found = tuple(d if isinstance(d, int) else d.value for d in value.shape)
    return None if any(d is None for d in found) else found  # type: ignore[return-value]


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether both shapes are recorded and equal, dimension by dimension."""
    shape = dims(a)
    return shape is not None and shape == dims(b)


def behind(node: ir.Node, op_type: str) -> ir.Node | None:
    """For a standard ``op_type`` node: the node of the same operator, in the same graph, whose result it reads."""
    if not is_standard(node, op_type) or node.inputs[0] is None:
        return None
    inner = node.inputs[0].producer()
    if inner is None or inner.graph is not node.graph or not is_standard(inner, op_type):
        return None
    return inner if inner.inputs[0] is not None else None


class Edit:
    """Edits of one graph by one pass run: linear in the number of edits, safe for subgraphs and output names.

    A branch of If may name an outer value as its own output without a node that reads it. Such values keep their
    names and producers.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.pinned = frozenset(_names_returned_by_bodies(graph))

    def is_read(self, value: ir.Value) -> bool:
        """Whether a node, a subgraph or a graph output reads the value."""
        return value.is_graph_output() or value.name in self.pinned or bool(value.uses())

    def redirect(self, old: ir.Value, new: ir.Value) -> bool:
        """Let all readers of ``old`` read ``new``; graph outputs keep their name.

        Returns False, and changes nothing, when ``old`` must stay: it is a graph output and ``new`` cannot take over
        its name (a graph input, a constant, another output), or a branch returns it by name.
        """
        if old.name in self.pinned:
            return False
        if not old.is_graph_output():
            refine(new, old)
            for use in old.uses():
                use.node.replace_input_with(use.idx, new)
            return True
        producer = new.producer()
        if producer is None or producer.graph is not self.graph or new.is_graph_output() or new.name in self.pinned:
            return False
        replace_value(old, new)
        return True

    def prune(self, nodes: Iterable[ir.Node]) -> int:
        """Remove those of ``nodes`` that nothing reads, and what only they read among ``nodes``. Returns how many."""
        return self.remove(self.dead(nodes))

    def dead(self, nodes: Iterable[ir.Node]) -> list[ir.Node]:
        """The nodes, each listed after its readers, that would be unread if all of them went."""
        candidates = dict.fromkeys(n for n in nodes if n.graph is self.graph)
        unread_uses: dict[ir.Value, int] = {}
        work = [n for n in candidates if n.outputs and not any(self.is_read(o) for o in n.outputs)]
        found: dict[ir.Node, None] = {}
        while work:
            node = work.pop()
            if node in found:
                continue
            found[node] = None
            touched: dict[ir.Node, None] = {}
            for value in _reads(node):
                unread_uses[value] = unread_uses.get(value, 0) + 1
                producer = value.producer()
                if producer is not None and producer in candidates:
                    touched[producer] = None
            work += [p for p in touched if all(self._dies(o, unread_uses) for o in p.outputs)]
        return list(found)

    def _dies(self, value: ir.Value, unread_uses: dict[ir.Value, int]) -> bool:
        if value.is_graph_output() or value.name in self.pinned:
            return False
        return len(value.uses()) == unread_uses.get(value, 0)

    def remove(self, nodes: Sequence[ir.Node]) -> int:
        """Remove nodes whose outputs nothing else reads, in one call (each call reads all graph outputs)."""
        for node in nodes:
            for body in bodies(node):
                _empty(body)
        if nodes:
            self.graph.remove(nodes, safe=True)
        return len(nodes)

    def constant(self, array: np.ndarray | ir.TensorProtocol, name: str) -> ir.Value:
        """Register a constant under a name that is free."""
        tensor = ir.tensor(array) if isinstance(array, np.ndarray) else array
        return add_constant(self.graph, tensor, name)

    def become_identity(self, node: ir.Node, source: ir.Value, by: str) -> None:
        """Turn a node with one output, a graph output that keeps its name, into Identity of ``source``."""
        node.op_type, node.domain = "Identity", ""
        node.attributes.clear()
        node.resize_inputs(1)
        node.replace_input_with(0, source)
        stamp(node, by)


def refine(kept: ir.Value, other: ir.Value) -> None:
    """Record on ``kept``, a node's output, the type and shape of an equal value where it has none."""
    if kept.producer() is None:
        return
    if kept.dtype is None and other.dtype is not None:
        kept.dtype = other.dtype
    if dims(kept) is None and other.shape is not None and dims(other) is not None:
        kept.shape = other.shape.copy()


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """Every use of a value by the node and its subgraphs, repeated as often as it is used."""
    yield from (v for v in node.inputs if v is not None)
    for body in bodies(node):
        for inner in body:
            yield from _reads(inner)


def _empty(body: ir.Graph) -> None:
    for node in body:
        for inner in bodies(node):
            _empty(inner)
    body.outputs.clear()
    body.remove(tuple(body), safe=True)


def _names_returned_by_bodies(graph: ir.Graph) -> Iterator[str]:
    for node in graph:
        for body in bodies(node):
            made = {*body.inputs, *body.initializers.values()}
            yield from (o.name for o in body.outputs if o.producer() is None and o not in made and o.name)
            yield from _names_returned_by_bodies(body)
