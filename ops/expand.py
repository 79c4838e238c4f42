"""Reference expansions at work: a composite is replaced by the standard operators that define it."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from ortgraph.errors import UnsupportedError
from ortgraph.graph.edit import Names, is_used, replace_value
from ortgraph.graph.training_graph import TrainingGraph
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import operator
from ortgraph.ops.spec import COMPOSITE, spec_of

MIN_OPSET, MAX_OPSET = 18, 21


def can_expand(node: ir.Node) -> bool:
    """Whether the node's operator has a reference expansion."""
    return spec_of(node).expand is not None


def expand_node(node: ir.Node, names: Names | None = None, by: str = "expand") -> None:
    """Replace one composite (or com.microsoft training operator) by its reference expansion, in place.

    Args:
        node: A node of a graph whose inputs carry dtype and shape.
        names: Shared name authority of the graph; one per pass run saves reading the graph again.
        by: Name of the pass, stamped on every new node.

    Raises:
        UnsupportedError: The operator has no expansion, the graph's opset is outside 18 to 21, or the expansion needs
            a static shape and the graph still has a symbolic dimension there. The graph is then unchanged.
    """
    spec = spec_of(node)
    if spec.expand is None:
        raise UnsupportedError(
            f"{operator(node)} {node.name!r} has no reference expansion",
            "keep it for a runtime that has a kernel for it",
        )
    graph = node.graph
    assert isinstance(graph, ir.Graph), "the node is not in a graph"
    opset = _opset(graph)
    if not MIN_OPSET <= opset <= MAX_OPSET:
        raise UnsupportedError(
            f"{operator(node)} {node.name!r}: expansions are written for opset {MIN_OPSET} to {MAX_OPSET}, "
            f"the graph imports {opset}",
            "convert the graph to opset 18 first",
        )
    untyped = next((v for v in node.inputs if v is not None and (v.dtype is None or v.shape is None)), None)
    if untyped is not None and node.domain == COMPOSITE:
        raise UnsupportedError(
            f"{operator(node)} {node.name!r}: the type or the rank of its input %{untyped.name} is not known",
            "run shape inference on the graph first",
        )
    build = Builder(graph, by, before=node, origins=[node], names=names)
    try:
        values = spec.expand(build, node)
    except UnsupportedError:
        _undo(graph, build)
        raise
    values = [*values, *[None] * (len(node.outputs) - len(values))]
    missing = next((i for i, old in enumerate(node.outputs) if values[i] is None and is_used(old)), None)
    if missing is not None:
        _undo(graph, build)
        raise UnsupportedError(
            f"{operator(node)} {node.name!r}: the expansion does not make output {missing}, which is read",
            "keep the node for a runtime that has a kernel for it",
        )
    for old, new in zip(node.outputs, values, strict=False):
        if new is not None:
            _take_type(new, old)
            replace_value(old, new)
    graph.remove(node, safe=True)


def _undo(graph: ir.Graph, build: Builder) -> None:
    for made in reversed(build.made):
        graph.remove(made, safe=True)
    for constant in build.constants:
        if not is_used(constant):
            del graph.initializers[str(constant.name)]


def _opset(graph: ir.Graph) -> int:
    imports = graph.opset_imports
    return imports.get("", imports.get("ai.onnx", MIN_OPSET))


def _take_type(new: ir.Value, old: ir.Value) -> None:
    if new.dtype is None and old.dtype is not None:
        new.dtype = old.dtype
    known = new.shape is not None and all(isinstance(d, int) or d.value is not None for d in new.shape)
    if not known and old.shape is not None and new.producer() is not None:
        new.shape = old.shape.copy()


def expand_composites(graph: TrainingGraph, only: Collection[str] | None = None, by: str = "expand") -> int:
    """Expand composites until none is left; an expansion may itself contain composites. Returns how many.

    Args:
        graph: Rewritten in place, subgraphs included.
        only: Operators to expand: ``Gelu`` is the composite, ``com.microsoft.GeluGrad`` a contrib operator. None: every
            composite and no contrib operator.
        by: Name of the pass, stamped on every new node.
    """
    names = Names(graph.graph)
    count = 0
    while True:
        found = [node for node in graph.graph.all_nodes() if _selected(node, only)]
        if not found:
            return count
        for node in found:
            expand_node(node, names, by)
        count += len(found)


def _selected(node: ir.Node, only: Collection[str] | None) -> bool:
    if only is None:
        return node.domain == COMPOSITE
    return operator(node) in only or (node.domain == COMPOSITE and node.op_type in only)
