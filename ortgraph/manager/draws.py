"""Random nodes of a graph: what each draws, what shows it, and whose gradient reads which draw."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.graph.fingerprint import Draws
from ortgraph.graph.verify import Found, reads, rule
from ortgraph.ops import generated
from ortgraph.ops.kernels.table import base_name
from ortgraph.ops.shapes import given
from ortgraph.ops.spec import COMPOSITE, GENERATED, KERNELS, spec_of

_OURS = (COMPOSITE, KERNELS)
_BEFORE_LOWERING = ("captured", "optimized", "cast", "stepped")  # later a mask may be drawn by standard operators

_Functions = Mapping[ir.OperatorIdentifier, ir.Function]


def draws_in(graph: TrainingGraph) -> Draws:
    """What ``fingerprint`` asks about the random nodes of a graph, those in subgraphs and local functions included."""
    functions = graph.model.functions
    return Draws(
        of=lambda node: _drawn_in(node, functions),
        shown_by=lambda value: _shown(value, functions),
        undone_by=lambda node: tuple(d for n, call in _inner(node, functions) for d in _undone(n, call, functions)),
    )


def _drawn_in(node: ir.Node, functions: _Functions) -> tuple[str, ...]:
    return tuple(d for n, call in _inner(node, functions) for d in _drawn(n, call))


def _inner(
    node: ir.Node, functions: _Functions, call: ir.Node | None = None
) -> Iterator[tuple[ir.Node, ir.Node | None]]:
    """The node, or the nodes that it holds, each with the call of a local function that gives its attributes."""
    body = functions.get(node.op_identifier()) if node.domain != GENERATED else None
    if body is not None:
        for n in body:
            yield from _inner(n, functions, node)
        return
    yield node, call
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            for n in attribute.as_graph():
                yield from _inner(n, functions, call)


def _drawn(node: ir.Node, call: ir.Node | None) -> tuple[str, ...]:
    """The numbers of a composite, a kernel or a fused region, else the operator; none for what draws nothing."""
    if node.domain == GENERATED:
        return tuple(f"Dropout#{number}" for number in generated.draws_of(node))
    if node.domain in _OURS and "node" in node.attributes:
        if node.op_type.startswith("AttentionGrad"):
            return ()  # the forward half's draw, made again
        drawn = "Dropout" if node.op_type.startswith("Attention") else base_name(node.op_type)
        return (f"{drawn}#{_number(node, 'node', call)}",)
    spec = spec_of(node)
    return (node.op_type,) if spec.known and not spec.deterministic else ()


def _undone(node: ir.Node, call: ir.Node | None, functions: _Functions) -> tuple[str, ...]:
    """The draws whose gradient a node computes."""
    if node.domain == GENERATED:
        return tuple(sorted(_undone_in(node, functions)))
    if node.domain not in _OURS:
        return ()
    name = {"DropoutGrad": "draw", "AttentionGrad": "node"}.get(base_name(node.op_type), "")
    if name in node.attributes:
        return (f"Dropout#{_number(node, name, call)}",)
    if base_name(node.op_type) != "DropoutGrad" or len(node.inputs) < 2:
        return ()
    return tuple(sorted(_drawn_for(node.inputs[1], functions)))


def _undone_in(node: ir.Node, functions: _Functions) -> set[str]:
    """The draws whose gradient a fused region computes, by a mask that it reads or draws itself."""
    body = generated.body_of(node.op_type)
    found: set[str] = set()
    if body is None:
        return found
    inputs = {v: i for i, v in enumerate(body.inputs)}
    stack = [n.inputs[1] for n in body if base_name(n.op_type) == "DropoutGrad" and len(n.inputs) > 1]
    while stack:
        value = stack.pop()
        if value is None:
            continue
        if value in inputs:
            found |= _drawn_for(node.inputs[inputs[value]], functions)
            continue
        maker = value.producer()
        number = None if maker is None else maker.attributes.get("node")
        if number is not None:
            found.add(f"Dropout#{_number(maker, 'node', node)}")  # type: ignore[arg-type]
        elif maker is not None:
            stack.extend(maker.inputs)
    return found


def _number(node: ir.Node, name: str, call: ir.Node | None) -> object:
    found = node.attributes[name]
    if found.is_ref() and call is not None:
        found = call.attributes.get(found.ref_attr_name or "", found)
    return found.value


def _shown(output: ir.Value, functions: _Functions) -> tuple[str, ...]:
    """What was drawn for an output of a drawing node; nothing for a mask, which alone makes no noise."""
    node = output.producer()
    if node is None or (base_name(node.op_type) == "Dropout" and output.index() != 0):
        return ()
    if node.domain != GENERATED:
        return _drawn_in(node, functions)
    return tuple(f"Dropout#{node.attributes[name].as_int()}" for name in _shown_in(node.op_type)[output.index() or 0])


@functools.lru_cache(maxsize=1024)
def _shown_in(op_type: str) -> tuple[tuple[str, ...], ...]:
    """For each output of a fused region the attributes that number the draws it is computed from."""
    body = generated.body_of(op_type)
    if body is None:
        return ()
    known: dict[ir.Value, frozenset[str]] = {}
    for node in body:
        found = frozenset[str]().union(*(known.get(v, frozenset()) for v in node.inputs if v is not None))
        for output in node.outputs:
            known[output] = found
        number = node.attributes.get("node")
        if number is not None and number.is_ref() and node.outputs:
            known[node.outputs[0]] = found | {number.ref_attr_name or ""}
    return tuple(tuple(sorted(known.get(v, ()))) for v in body.outputs)


def _drawn_for(value: ir.Value | None, functions: _Functions) -> set[str]:
    """What the nearest drawing nodes behind a value draw."""
    found: set[str] = set()
    seen: set[ir.Node | None] = {None}
    stack = [None if value is None else value.producer()]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        drawn = _drawn_in(node, functions)
        found.update(drawn)
        if not drawn and node.op_type not in ("Shape", "Size"):  # no element of what they read
            stack.extend(v.producer() for v in reads(node))
    return found


@rule(
    "draws-are-undone-by-their-own",
    "signature",
    "The gradient of a draw reads the mask, or redraws the number, of its forward half.",
)
def _own_masks(graph: TrainingGraph) -> Found:
    early = graph.has_signature and graph.stage in _BEFORE_LOWERING
    for node in graph.graph:
        if node.domain not in _OURS:
            continue
        if base_name(node.op_type) == "DropoutGrad" and "draw" in node.attributes:
            yield from _mask(node, early, graph.model.functions)
        elif node.op_type.startswith("AttentionGrad") and "node" in node.attributes:
            yield from _halves(node)


def _mask(node: ir.Node, early: bool, functions: _Functions) -> Found:
    (want,) = _undone(node, None, functions)
    got = _drawn_for(given(node, 1), functions)
    if got != {want} and (got or early):
        read = f"the mask of {_listed(got)}" if got else "a mask that nobody draws"
        yield f"the gradient of {want} reads {read}", node


def _halves(node: ir.Node) -> Found:
    for value in node.inputs[4:6]:
        forward = None if value is None else value.producer()
        if forward is None or forward.domain not in _OURS or not forward.op_type.startswith("Attention"):
            continue
        want, got = _undone(node, None, {}), _drawn(forward, None)
        if want != got:
            yield f"the gradient of {_listed(want)} reads the result of attention that draws {_listed(got)}", node


def _listed(draws: Iterable[str]) -> str:
    return ", ".join(sorted(draws)) or "nothing"
