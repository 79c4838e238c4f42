"""The verifier: a table of small named rules. docs/invariants.md is the page to read; ids are the same there."""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from ortgraph.errors import VerificationError
from ortgraph.graph.text import node_text
from ortgraph.graph.training_graph import TrainingGraph

LEVELS = ("structure", "signature", "types", "runtime", "numerics")
_CONTEXT_LINES = 8
_MORE_RULES = ("ortgraph.manager.rules", "ortgraph.manager.draws")  # rules that need facts about operators and plans


@dataclasses.dataclass(frozen=True)
class Violation:
    """One broken invariant: which rule, what about it, and the node or value where it shows."""

    rule: str
    what: str
    node: ir.Node | None = None


Check = Callable[[TrainingGraph], Iterator[Violation]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """An invariant with the function that checks it."""

    id: str
    level: str
    doc: str
    check: Check


RULES: list[Rule] = []


def rule(id: str, level: str, doc: str) -> Callable[[Callable], Check]:
    """Register a check under an id. The check yields (what, node) pairs."""

    def wrap(check: Callable) -> Check:
        def run(graph: TrainingGraph) -> Iterator[Violation]:
            for what, node in check(graph):
                yield Violation(id, what, node)

        RULES.append(Rule(id, level, doc, run))
        return run

    return wrap


Found = Iterator[tuple[str, "ir.Node | None"]]


@rule("unique-names", "structure", "Every value that is read or returned has a name of its own; so has every node.")
def _unique_names(graph: TrainingGraph) -> Found:
    g = graph.graph
    values: dict[str, ir.Value] = {}
    for value in (*g.inputs, *g.initializers.values(), *(o for n in g for o in n.outputs)):
        if value.name in (None, ""):
            if value.uses() or value.is_graph_output():
                yield "a value that is read has no name", value.producer()
            continue
        if values.setdefault(value.name, value) is not value:
            yield f"two values are called %{value.name}", value.producer()
    nodes: set[str] = set()
    for node in g:
        if node.name and node.name in nodes:
            yield f"two nodes are called {node.name!r}", node
        nodes.add(node.name or "")


@rule("defined-before-use", "structure", "A node reads only graph inputs, initializers and outputs of earlier nodes.")
def _defined_before_use(graph: TrainingGraph) -> Found:
    g = graph.graph
    defined = {*g.inputs, *g.initializers.values()}
    for node in g:
        for value in reads(node):
            if value not in defined:
                yield f"%{value.name} is read before it is defined, or its producer is gone", node
        defined.update(node.outputs)
    for value in g.outputs:
        if value not in defined:
            yield f"graph output %{value.name} has no producer in the graph", value.producer()


@rule("constants-have-values", "structure", "Every initializer that is read has a tensor.")
def _constants(graph: TrainingGraph) -> Found:
    for value in graph.graph.initializers.values():
        if value.const_value is None and (value.uses() or value.is_graph_output()):
            yield f"initializer %{value.name} has no value", None


@rule("inputs-are-named", "signature", "Graph inputs are exactly those of the signature.")
def _inputs(graph: TrainingGraph) -> Found:
    yield from _names(
        "input", [v.name or "" for v in graph.graph.inputs], [n for _, n in graph.signature.graph_inputs()]
    )


@rule("outputs-are-named", "signature", "Graph outputs are exactly those of the signature, under their names.")
def _outputs(graph: TrainingGraph) -> Found:
    wanted = [n for _, n in graph.signature.graph_outputs()]
    yield from _names("output", [v.name or "" for v in graph.graph.outputs], list(dict.fromkeys(wanted)))


def _names(kind: str, got: list[str], wanted: list[str]) -> Found:
    for name in sorted(set(wanted) - set(got)):
        yield f"graph {kind} %{name} of the signature is missing", None
    for name in sorted(set(got) - set(wanted)):
        yield f"graph {kind} %{name} is not in the signature", None
    for name in sorted(n for n, count in Counter(got).items() if count > 1):
        yield f"graph {kind} %{name} stands twice", None


@rule(
    "persistent-inputs-are-no-constants",
    "signature",
    "Parameters, buffers, states and data inputs have no initializer.",
)
def _no_constants(graph: TrainingGraph) -> Found:
    for role, name in graph.signature.graph_inputs():
        if name in graph.graph.initializers:
            yield f"{role} %{name} is an initializer: a pass could fold, merge or bake it", None


@rule(
    "trainable-has-gradient",
    "signature",
    "Every trainable parameter that the loss reaches has a gradient of its shape and dtype.",
)
def _gradients(graph: TrainingGraph) -> Found:
    values = {v.name: v for v in (*graph.graph.inputs, *graph.graph.outputs)}
    unreached = set(graph.signature.metadata.get("unreached", "").split("\n"))
    for p in graph.signature.trainable:
        if p.gradient is None:
            if p.name not in unreached:
                yield f"trainable parameter %{p.name} has no gradient", None
            continue
        yield from _same_type(f"gradient %{p.gradient} of %{p.name}", values.get(p.name), values.get(p.gradient))
    for source, target in graph.signature.pairs():
        yield from _same_type(f"new value %{target} of %{source}", values.get(source), values.get(target))


def _same_type(what: str, a: ir.Value | None, b: ir.Value | None) -> Found:
    if a is None or b is None or a.shape is None or b.shape is None:
        return
    if list(a.shape) != list(b.shape) or a.dtype != b.dtype:
        yield f"{what} is {b.dtype}{list(b.shape)}, expected {a.dtype}{list(a.shape)}", b.producer()


@rule("opset-window", "runtime", "ONNX opset 13 to 21 and IR version at most 10: what both runtimes take.")
def _opset(graph: TrainingGraph) -> Found:
    version = graph.graph.opset_imports.get("", 18)
    if not 13 <= version <= 21:
        yield f"opset {version} is outside 13..21", None
    if graph.model.ir_version > 10:
        yield f"IR version {graph.model.ir_version} is above 10", None
    for node in graph.graph:
        if node.domain not in ("", "ai.onnx") and node.domain not in graph.graph.opset_imports:
            yield f"domain {node.domain!r} of {node.op_type} is not imported", node


@rule(
    "no-racing-scatter",
    "runtime",
    "No ScatterND with an additive reduction: ONNX Runtime's kernel races on repeated indices.",
)
def _scatter(graph: TrainingGraph) -> Found:
    for node in graph.graph:
        if node.op_type == "ScatterND" and node.attributes.get_string("reduction", "none") != "none":
            yield "ScatterND(reduction) adds without atomics: wrong sums with repeated indices and two threads", node


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """Values that a node reads, those captured by its subgraphs included."""
    yield from (v for v in node.inputs if v is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from _captured(attribute.as_graph())


def _captured(body: ir.Graph) -> Iterator[ir.Value]:
    inside = {*body.inputs, *body.initializers.values(), *(o for n in body for o in n.outputs)}
    for node in body:
        yield from (v for v in reads(node) if v not in inside)
    yield from (v for v in body.outputs if v not in inside)


def check(graph: TrainingGraph, level: str = "signature") -> list[Violation]:
    """All violations up to ``level`` (``structure`` < ``signature`` < ``types`` < ``runtime``).

    ``numerics`` needs two graphs and a batch: see ``ortgraph.manager.numerics.compare``.
    """
    upto = LEVELS.index(level)
    for name in _MORE_RULES:
        importlib.import_module(name)
    found: list[Violation] = []
    for at in LEVELS[: upto + 1]:
        for r in RULES:
            if r.level == at and (graph.has_signature or r.level != "signature"):
                found.extend(r.check(graph))
        if found and at == "structure":
            break  # the other rules rely on it
    return found


def verify(graph: TrainingGraph, level: str = "signature", by: str = "") -> None:
    """Raise VerificationError for the first violation, with the rule, the pass and the lines around it."""
    found = check(graph, level)
    if found:
        raise VerificationError(describe(graph, found, by), "run with --bisect, or report the pass with its reproducer")


def describe(graph: TrainingGraph, found: list[Violation], by: str = "") -> str:
    first = found[0]
    after = f" after pass {by}" if by else ""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    text = f"invariant {first.rule} is broken{after}: {first.what}{more}"
    if first.node is not None and first.node.graph is graph.graph:
        nodes = list(graph.graph)
        at = nodes.index(first.node)
        low = max(0, at - _CONTEXT_LINES // 2)
        lines = [
            ("> " if i == at else "  ") + node_text(nodes[i]) for i in range(low, min(len(nodes), low + _CONTEXT_LINES))
        ]
        text += "\n" + "\n".join(lines)
    return text


def live_nodes(graph: TrainingGraph) -> set[ir.Node]:
    """Nodes with a path to a graph output."""
    return producers(graph.graph.outputs)


def producers(values: Iterable[ir.Value]) -> set[ir.Node]:
    """Nodes of the main graph that ``values`` are computed by."""
    found: set[ir.Node] = set()
    stack = [p for v in values if (p := v.producer()) is not None]
    graph = stack[0].graph if stack else None
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        stack.extend(p for v in reads(node) if (p := v.producer()) is not None and p.graph is graph)
    return found
