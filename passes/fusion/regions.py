"""Regions: groups of nodes that one kernel can compute, found by merging along the values that this saves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.graph import TrainingGraph
from ortgraph.ops.generated.bodies import drawn_by, is_view
from ortgraph.ops.generated.forms import Form, form_of, operand_layout
from ortgraph.runtime.selection import committing_programs, wanted_outputs

MAX_INPUTS, MAX_OUTPUTS, MAX_NODES = 24, 12, 96  # a kernel's pointers should stay in registers and its code readable
_UNKNOWN = 64  # elements of a symbolic dimension
_PROGRAMS = ("loss", "evaluate", "gradients", "input_gradients")  # and those that replace values


class Regions:
    """Groups of a graph's nodes.

    Args:
        graph: Read only.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.nodes = list(graph.graph)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.forms: dict[ir.Node, Form] = {}
        self.reasons: dict[ir.Node, str] = {}
        for node in self.nodes:
            form = form_of(node) if not is_view(node) else "a view"
            if isinstance(form, Form):
                self.forms[node] = form
            else:
                self.reasons[node] = form
        self._group = {node: i for i, node in enumerate(self.nodes)}
        self.members: dict[int, list[ir.Node]] = {i: [node] for i, node in enumerate(self.nodes)}
        self._first = {i: i for i in range(len(self.nodes))}
        self._last = {i: i for i in range(len(self.nodes))}
        self._successors = self._edges()
        self._needed = self._programs()

    # -- what is asked ----------------------------------------------------------------------------------------------

    def origin(self, value: ir.Value) -> ir.Value:
        """The value whose elements a value shows."""
        node = value.producer()
        while is_view(node):
            source = node.inputs[0]  # type: ignore[union-attr]
            if source is None:
                break
            value, node = source, source.producer()
        return value

    def grow(self) -> list[list[ir.Node]]:
        """Merge what can be merged; the groups of more than one node, in graph order, nodes in graph order."""
        for node in self.nodes:
            for _, producer in sorted(self._saved(node), key=lambda found: (-found[0], self.index[found[1]])):
                self._merge(self._group[producer], self._group[node])
        for first, second in self._siblings():
            self._merge(self._group[first], self._group[second])
        found = [sorted(m, key=self.index.__getitem__) for m in self.members.values()]
        return sorted((m for m in found if len(m) > 1), key=lambda m: self.index[m[-1]])

    def outputs(self, group: Sequence[ir.Node], redrawn: set[ir.Node]) -> list[ir.Value]:
        """Values of a group that others read, in order of definition."""
        inside = set(group)
        found = []
        for node in group:
            for value in node.outputs:
                if value.name and self._leaves(value, inside, redrawn):
                    found.append(value)
        return found

    def _leaves(self, value: ir.Value, inside: set[ir.Node], redrawn: set[ir.Node]) -> bool:
        if value.is_graph_output():
            return True
        for use in value.uses():
            if use.node in inside or (use.node in redrawn and use.idx == 1):
                continue
            if is_view(use.node) and use.node.graph is self.graph.graph:
                if self._leaves(use.node.outputs[0], inside, redrawn):
                    return True
                continue
            return True
        return False

    def saved_bytes(self, group: Sequence[ir.Node], redrawn: set[ir.Node]) -> int:
        """Bytes that single operators would write and read, and a kernel for the group does not."""
        inside, outputs = set(group), set(self.outputs(group, redrawn))
        total = sum(bytes_of(o) for n in group for o in n.outputs if o.name and o not in outputs)
        seen: set[ir.Value] = set()
        for node in group:
            if node in redrawn and node.inputs[1] is not None:
                total += 2 * bytes_of(node.inputs[1])
            for value, source, alike in self._operands(node):
                if (alike and source.producer() in inside) or source in seen:
                    total += bytes_of(value)
                seen.add(source)
        return total

    def redraws(self, node: ir.Node) -> bool:
        """Whether the node is a DropoutGrad whose mask can be drawn again."""
        return node.op_type == "DropoutGrad" and node in self.forms and drawn_by(node, self.origin) is not None

    # -- edges ------------------------------------------------------------------------------------------------------

    def _edges(self) -> dict[ir.Node, set[ir.Node]]:
        """Readers of each node, views looked through."""
        found: dict[ir.Node, set[ir.Node]] = {node: set() for node in self.nodes}
        for node in self.nodes:
            if is_view(node):
                continue
            for value in values_read(node):
                producer = self.origin(value).producer()
                if producer is not None and producer in found:
                    found[producer].add(node)
        return found

    def _programs(self) -> dict[ir.Node, frozenset[str]]:
        """The programs of a session that need each node: a region that mixes them would make one do another's work."""
        needed: dict[ir.Node, set[str]] = {node: set() for node in self.nodes}
        if not self.graph.has_signature:
            return {node: frozenset() for node in self.nodes}
        outputs = {v.name: v for v in self.graph.graph.outputs}
        for kind in (*_PROGRAMS, *committing_programs(self.graph.signature)):
            names, _ = wanted_outputs(self.graph.signature, kind)
            stack = [outputs[n].producer() for n in names if n in outputs]
            while stack:
                node = stack.pop()
                if node is None or node not in needed or kind in needed[node]:
                    continue
                needed[node].add(kind)
                stack.extend(v.producer() for v in values_read(node))
        return {node: frozenset(kinds) for node, kinds in needed.items()}

    def _operands(self, node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value, bool]]:
        """(operand, its origin, whether it has every row to itself) of a node with a form."""
        form = self.forms[node]
        for position, (value, space) in enumerate(zip(node.inputs, form.spaces, strict=True)):
            if value is None or space is None or (position == 1 and self.redraws(node)):
                continue
            source = self.origin(value)
            producer = source.producer()
            inside = producer in self.forms and self._lies_alike(source, producer, value, space)
            yield value, source, inside

    def _lies_alike(self, source: ir.Value, producer: ir.Node, value: ir.Value, space: tuple) -> bool:
        layout = self.forms[producer].layouts[source.index()]  # type: ignore[index]
        if value is not source and sum(not isinstance(d, int) for d in value.shape or ()) > 1:
            return False  # a target of a reshape has one unknown at most
        return layout is not None and layout == operand_layout(value, space)

    def _saved(self, node: ir.Node) -> list[tuple[int, ir.Node]]:
        """(bytes, producer) for each operand that need not go through memory."""
        if node not in self.forms:
            return []
        found = []
        for value, source, inside in self._operands(node):
            if inside:
                found.append((bytes_of(value), source.producer()))
        return found  # type: ignore[return-value]

    def _siblings(self) -> Iterator[tuple[ir.Node, ir.Node]]:
        """Pairs of readers of one value that lie side by side."""
        readers: dict[ir.Value, list[ir.Node]] = {}
        for node in self.nodes:
            if node not in self.forms:
                continue
            for value, source, _ in self._operands(node):
                space = self.forms[node].spaces[list(node.inputs).index(value)]
                if space is not None and operand_layout(value, space) is not None:
                    readers.setdefault(source, []).append(node)
        for nodes in readers.values():
            for first, second in zip(nodes, nodes[1:], strict=False):
                if self._ready_before(second, first):
                    yield first, second

    def _ready_before(self, node: ir.Node, other: ir.Node) -> bool:
        """Whether all that the node's group reads from outside is there when the other's group runs."""
        group = set(self.members[self._group[node]])
        last = self._last[self._group[other]]
        for member in group:
            for value in values_read(member):
                producer = self.origin(value).producer()
                if producer is not None and producer not in group and self.index.get(producer, -1) > last:
                    return False
        return True

    # -- merging ----------------------------------------------------------------------------------------------------

    def _merge(self, a: int, b: int) -> bool:
        if a == b or self._refused(a, b):
            return False
        for node in self.members[b]:
            self._group[node] = a
        self.members[a] += self.members.pop(b)
        self._first[a] = min(self._first[a], self._first.pop(b))
        self._last[a] = max(self._last[a], self._last.pop(b))
        return True

    def _refused(self, a: int, b: int) -> bool:
        one, two = self.members[a][0], self.members[b][0]
        if one not in self.forms or two not in self.forms or self.forms[one].rows != self.forms[two].rows:
            return True
        if self._needed[one] != self._needed[two]:
            return True
        union = [*self.members[a], *self.members[b]]
        if len(union) > MAX_NODES or len(self._column_widths(union)) > 1:
            return True
        inside = set(union)
        if len(self._inputs(union, inside)) > MAX_INPUTS or len(self.outputs(union, set())) > MAX_OUTPUTS:
            return True
        return self._returns(a, b)

    def _column_widths(self, nodes: Sequence[ir.Node]) -> set[str]:
        found = set()
        for node in nodes:
            for output, layout in zip(node.outputs, self.forms[node].layouts, strict=True):
                if layout is None and output.name:
                    found.add(str((node.inputs[0].shape or (1,))[-1]))  # type: ignore[union-attr]
        return found

    def _inputs(self, nodes: Sequence[ir.Node], inside: set[ir.Node]) -> set[ir.Value]:
        return {
            value
            for node in nodes
            for value, source, alike in self._operands(node)
            if not (alike and source.producer() in inside)
        }

    def _returns(self, a: int, b: int) -> bool:
        """Whether a path leaves the two groups and comes back, other groups taken as one node each."""
        union, todo, seen = {a, b}, [a, b], {a, b}
        limit = max(self._last[a], self._last[b])
        while todo:
            group = todo.pop()
            for node in self.members[group]:
                for reader in self._successors[node]:
                    following = self._group[reader]
                    if following in union and (group not in union or not self._direct(node, reader)):
                        return True
                    if following not in seen and self._first[following] <= limit:
                        seen.add(following)
                        todo.append(following)
        return False

    def _direct(self, node: ir.Node, reader: ir.Node) -> bool:
        """Whether everything that a member reads of another one can stay inside a kernel."""
        outputs = set(node.outputs)
        return all(inside for _, source, inside in self._operands(reader) if source in outputs)


def bytes_of(value: ir.Value) -> int:
    """Bytes of a value; symbolic dimensions count as 64."""
    dims = [d if isinstance(d, int) else _UNKNOWN for d in value.shape or ()]
    return math.prod(dims) * (value.dtype.bitwidth if value.dtype is not None else 32) // 8
