"""Binding symbolic dimensions: every recorded shape becomes numbers."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ortgraph.graph.training_graph import TrainingGraph
from ortgraph.ops.infer import infer_node
from ortgraph.ops.spec import COMPOSITE, KERNELS, lookup


def is_dynamic(graph: TrainingGraph) -> bool:
    """Whether any graph input or node output has a dimension that is not a number."""
    values = [*graph.graph.inputs, *(o for node in graph.graph for o in node.outputs if o.name)]
    return any(v.shape is None or not v.shape.is_static() for v in values)


def bind_shapes(graph: TrainingGraph, dims: Mapping[str, int]) -> int:
    """Substitute sizes for named dimensions everywhere, in place.

    Args:
        graph: Rewritten in place.
        dims: Size by dimension name.

    Returns:
        The number of values whose shape changed.
    """
    known: dict[str, int | ir.SymbolicDim] = {}

    def bound(dim: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        if isinstance(dim, int) or dim.value is None:
            return dim
        if dim.value not in known:
            known[dim.value] = dim.evaluate(dims)
        return known[dim.value]

    changed = 0
    for value in _all_values(graph.graph):
        if value.shape is None or value.shape.is_static():
            continue
        shape = ir.Shape([bound(d) for d in value.shape])
        changed += shape != value.shape
        value.shape = shape
    for node in graph.graph.all_nodes():
        _write_shape(node)
    return changed


def _write_shape(node: ir.Node) -> None:
    """Give an operator the shape of its result, where it needs that and had none."""
    name = lookup(COMPOSITE if node.domain == KERNELS else node.domain, node.op_type).shape_attribute
    shape = node.outputs[0].shape if node.outputs else None
    if name and name not in node.attributes and shape is not None and shape.is_static():
        node.attributes[name] = ir.AttrInt64s(name, [int(d) for d in shape])  # type: ignore[arg-type]


def _all_values(graph: ir.Graph) -> list[ir.Value]:
    values = list(graph.inputs)
    for node in graph.all_nodes():
        values.extend(node.outputs)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                values.extend(attribute.as_graph().inputs)
    return values


def infer_unknown(graph: TrainingGraph) -> int:
    """Infer, in node order, outputs whose dtype or shape is not known in full. Returns how many changed."""
    changed = 0
    for node in graph.graph:
        before = [o.shape for o in node.outputs if o.name]
        if all(s is not None and s.is_static() for s in before):
            continue
        infer_node(node, graph.graph.opset_imports)
        changed += [o.shape for o in node.outputs if o.name] != before
    return changed
