"""Liveness: which steps each piece of memory lives through, with aliases and values read by subgraphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops.spec import spec_of

_NOT_DENSE = (ir.DataType.STRING, ir.DataType.UNDEFINED)


def nbytes(value: ir.Value) -> int | None:
    """Bytes of a dense tensor value; None when dtype or shape is not known, or the value is no dense tensor."""
    shape = static_shape(value)
    if shape is None or value.dtype is None or value.dtype in _NOT_DENSE:
        return None
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        return None
    count = 1
    for d in shape:
        count *= d
    return -(-count * value.dtype.bitwidth // 8)


def values_read(node: ir.Node) -> Iterable[ir.Value]:
    """Everything that a node reads: its inputs, and the outer values that its subgraphs read at any depth."""
    for value in node.inputs:
        if value is not None:
            yield value
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from _captured(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            for body in attribute.as_graphs():
                yield from _captured(body)


def _captured(body: ir.Graph) -> Iterable[ir.Value]:
    inside: set[ir.Value] = {*body.inputs, *body.initializers.values()}
    for node in body:
        inside.update(node.outputs)
    for node in body:
        yield from (v for v in values_read(node) if v not in inside)
    yield from (v for v in body.outputs if v not in inside)


class Liveness:
    """Lifetimes of the *storages* of a graph in one order of its nodes.

    A storage is a set of values that are the same bytes: a value and what Reshape-like operators make of it, by the
    alias facts of the operator table. Step t is the run of node t. Constants (initializers) are the runtime's own
    memory; an alias of one is a copy and a storage of its own. So is a wanted alias of a graph input: the input's
    memory may be overwritten before the value is read.

    Args:
        graph: The graph; only its nodes in ``order`` count.
        order: Node order; the graph's own order when None.
        wanted: Values that are read after the last node; the graph's outputs when None.
    """

    def __init__(
        self, graph: ir.Graph, order: Sequence[ir.Node] | None = None, wanted: Collection[ir.Value] | None = None
    ) -> None:
        self.order: tuple[ir.Node, ...] = tuple(graph if order is None else order)
        self.end = len(self.order)
        self._root: dict[ir.Value, ir.Value] = {}
        self._members: dict[ir.Value, list[ir.Value]] = {}
        self.readers: dict[ir.Value, list[int]] = {}
        self.position: dict[ir.Node, int] = {}
        self.wanted = frozenset(graph.outputs if wanted is None else wanted)
        self.constants = frozenset(graph.initializers.values())
        self.persistent = frozenset(v for v in graph.inputs if v not in self.constants)
        for value in (*graph.inputs, *graph.initializers.values()):
            self._add(value, value)
        for t, node in enumerate(self.order):
            self.position[node] = t
            for value in dict.fromkeys(values_read(node)):
                self.readers.setdefault(value, []).append(t)
            self._add_outputs(node)

    def _add(self, value: ir.Value, root: ir.Value) -> None:
        self._root[value] = root
        self._members.setdefault(root, []).append(value)

    def _add_outputs(self, node: ir.Node) -> None:
        aliases = {o: i for i, o in spec_of(node).alias}
        for o, value in enumerate(node.outputs):
            if not value.name:
                continue  # an optional output that is absent
            i = aliases.get(o)
            source = node.inputs[i] if i is not None and i < len(node.inputs) else None
            if source is not None and self._shares(source, value):
                self._add(value, self._root[source])
            else:
                self._add(value, value)

    def _shares(self, source: ir.Value, value: ir.Value) -> bool:
        if source in self.constants or source not in self._root:
            return False
        if value in self.wanted and self._root[source] in self.persistent:
            return False
        size = nbytes(value)
        return size is not None and size == nbytes(source) and value.dtype == source.dtype

    def storage(self, value: ir.Value) -> ir.Value:
        """The value that stands for the storage of ``value`` (the first one in it)."""
        return self._root[value]

    def members(self, storage: ir.Value) -> Sequence[ir.Value]:
        """All values in a storage, in order of definition."""
        return self._members[storage]

    def storages(self) -> Iterable[ir.Value]:
        """All storages that nodes write, in order of definition; inputs and constants left out."""
        return (r for r in self._members if r not in self.persistent and r not in self.constants)

    def born(self, storage: ir.Value) -> int:
        """The step that writes the storage; -1 for graph inputs and constants."""
        node = storage.producer()
        return -1 if node is None else self.position[node]

    def last(self, storage: ir.Value) -> int:
        """The last step that reads the storage, ``end`` when it is read after the run; at least ``born``."""
        last = self.born(storage)
        for value in self._members[storage]:
            if value in self.wanted:
                return self.end
            readers = self.readers.get(value)
            if readers:
                last = max(last, readers[-1])
        return last

    def reading_steps(self, storage: ir.Value) -> list[int]:
        """All steps that read the storage by any of its values, sorted."""
        return sorted({t for value in self._members[storage] for t in self.readers.get(value, ())})
