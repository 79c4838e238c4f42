"""RewritePass: match, check and rewrite as three functions over the nodes of a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import onnx_ir as ir

from ortgraph.graph import Names, TrainingGraph, replace_value
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.ops.builder import Builder


@dataclasses.dataclass(frozen=True)
class Match:
    """Nodes to be replaced and the values that take part.

    Attributes:
        nodes: All matched nodes, in graph order; the last one is where new nodes are inserted.
        outputs: Values whose readers will read the rewrite's results instead.
        values: Named inputs of the pattern, for ``check`` and ``rewrite``.
        count: Name under which the rewrite is counted.
        at: New nodes go before this node instead of the last one.
    """

    nodes: tuple[ir.Node, ...]
    outputs: tuple[ir.Value, ...]
    values: dict[str, ir.Value | None] = dataclasses.field(default_factory=dict)
    facts: dict[str, object] = dataclasses.field(default_factory=dict)
    count: str = "rewritten"
    at: ir.Node | None = None


@dataclasses.dataclass(frozen=True)
class RewritePass(GraphPass):
    """A pass that looks at each node as a possible root.

    Subclasses give ``match`` (is this the pattern? pure), ``check`` (is it safe? a reason when not) and ``rewrite``
    (build the replacement; never touch old nodes). Inner values that others read are treated as ``shared_inner``
    says: ``refuse`` leaves the whole match alone; ``keep`` rewrites the outputs and leaves shared nodes in place.
    """

    roots: ClassVar[frozenset[str]] = frozenset()  # "Op" or "domain.Op"; empty: every node
    shared_inner: ClassVar[str] = "refuse"

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        """The match rooted at ``node``; None when it is another kind of node; a Refusal when it nearly matches."""
        raise NotImplementedError

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        """A reason not to rewrite, or None."""
        return None

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        """Build the replacement of ``match.outputs``, in that order."""
        raise NotImplementedError

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        """Try every node as a root. ``accept`` is asked with the index of each rewrite (bisection limits them)."""
        sweep = Sweep(self, graph, accept)
        for node in tuple(graph.graph):
            if node.graph is None or (self.roots and op_key(node) not in self.roots):
                continue
            found = self.match(node, graph)
            if isinstance(found, Match):
                reason = self._inner_reason(found) or self.check(found, graph)
                found = Refusal(node.name or "", reason) if reason else found
            sweep.take(found)
        return sweep.changes

    def _inner_reason(self, match: Match) -> str | None:
        if self.shared_inner == "keep":
            return None
        inside, kept = set(match.nodes), set(match.outputs)
        for node in match.nodes:
            for value in node.outputs:
                if value in kept:
                    continue
                if value.is_graph_output():
                    return f"inner value %{value.name} is a graph output"
                reader = next((u.node for u in value.uses() if u.node not in inside), None)
                if reader is not None:
                    return f"inner value %{value.name} is also read by {reader.op_type} {reader.name!r}"
        return None


class Sweep:
    """One run of a RewritePass over a graph: takes what was found, one after the other, and keeps count.

    Args:
        fusion: Its ``rewrite`` builds the replacements.
        graph: Rewritten in place.
        accept: Asked with the index of each rewrite (bisection limits them).
    """

    def __init__(self, fusion: RewritePass, graph: TrainingGraph, accept: Callable[[int], bool]) -> None:
        self.changes = Changes()
        self._fusion, self._graph, self._accept = fusion, graph.graph, accept
        self._names = Names(graph.graph)
        self._next = 0

    def take(self, found: Match | Refusal | None, at: ir.Node | None = None) -> None:
        """Rewrite a match, with its new nodes before ``at``; note a refusal."""
        if isinstance(found, Refusal):
            self.changes.refusals.append(found)
        if not isinstance(found, Match):
            return
        self._next += 1
        if not self._accept(self._next - 1):
            return
        before, origins = at or found.at or found.nodes[-1], found.nodes[::-1]
        build = Builder(self._graph, self._fusion.name, before=before, origins=origins, names=self._names)
        apply(found, self._fusion.rewrite(build, found))
        self.changes.counts[found.count] += 1


def op_key(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def apply(match: Match, replacements: Sequence[ir.Value]) -> None:
    """Redirect readers, then remove matched nodes that nobody reads any more, last first."""
    for old, new in zip(match.outputs, replacements, strict=True):
        if old is not new:
            replace_value(old, new)
    for node in reversed(match.nodes):
        if node.graph is not None and not any(o.uses() or o.is_graph_output() for o in node.outputs):
            node.graph.remove(node, safe=True)
