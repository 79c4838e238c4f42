"""Binding symbolic dimensions: every shape becomes numbers, and what only computed shapes becomes constants."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.graph.edit import Names, replace_value, static_shape
from ortgraph.graph.training_graph import TrainingGraph
from ortgraph.ops.infer import infer_node
from ortgraph.ops.spec import spec_of

logger = logging.getLogger(__name__)
MAX_FOLDED = 1024  # elements of a result worth storing in the graph; larger ones are computed


def is_dynamic(graph: TrainingGraph) -> bool:
    """Whether any graph input or node output has a dimension that is not a number."""
    values = [*graph.graph.inputs, *(o for node in graph.graph for o in node.outputs)]
    return any(v.shape is None or not v.shape.is_static() for v in values)


def bind_shapes(graph: TrainingGraph, dims: Mapping[str, int]) -> int:
    """Substitute sizes for named dimensions everywhere, in place, and infer what is still unknown.

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
    return changed


def _all_values(graph: ir.Graph) -> list[ir.Value]:
    values = list(graph.inputs)
    for node in graph.all_nodes():
        values.extend(node.outputs)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                values.extend(attribute.as_graph().inputs)
    return values


def fold_shapes(graph: TrainingGraph) -> int:
    """Replace by constants, in place: shapes of static values, and small results of constants only.

    Unknown shapes after a folded value are inferred again. Operators that are not deterministic, values read by
    subgraphs, graph inputs and large results stay. Returns the number of folded nodes.
    """
    g = graph.graph
    names = Names(g)
    folded = 0
    for node in tuple(g):
        if any(o.shape is None or not o.shape.is_static() for o in node.outputs):
            infer_node(node, g.opset_imports)
        array = _shape_constant(node)
        if array is None:
            array = _evaluated(node, g.opset_imports)
        if array is None or node.outputs[0].is_graph_output():
            continue
        old = node.outputs[0]
        name = names.fresh(f"{old.name}.value")
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        g.register_initializer(value)
        replace_value(old, value)
        g.remove(node, safe=True)
        folded += 1
    return folded


def _shape_constant(node: ir.Node) -> np.ndarray | None:
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Shape", "Size"):
        return None
    source = node.inputs[0]
    shape = None if source is None else static_shape(source)
    if shape is None:
        return None
    if node.op_type == "Size":
        return np.array(int(np.prod(shape, dtype=np.int64)), dtype=np.int64)
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(shape))
    return np.array(shape[start:end], dtype=np.int64)


def _evaluated(node: ir.Node, opset_imports: Mapping[str, int]) -> np.ndarray | None:
    """The only output of a small deterministic standard operator on constants; None when it is not one."""
    spec = spec_of(node)
    if node.domain not in ("", "ai.onnx") or not spec.deterministic or len(node.outputs) != 1:
        return None
    constants = [None if v is None else ir.convenience.get_const_tensor(v) for v in node.inputs]
    if any(v is not None and c is None for v, c in zip(node.inputs, constants, strict=True)):
        return None
    if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
        return None
    shape = static_shape(node.outputs[0])
    if (
        shape is None
        or int(np.prod(shape, dtype=np.int64)) > MAX_FOLDED
        or any(c is not None and c.size > MAX_FOLDED for c in constants)
    ):
        return None
    proto = ir.serde.serialize_node(node)
    del proto.metadata_props[:]
    feeds = {v.name: c.numpy() for v, c in zip(node.inputs, constants, strict=True) if v is not None and c is not None}
    types = {n: int(ir.DataType.from_numpy(a.dtype)) for n, a in feeds.items()}
    inputs = [onnx.helper.make_tensor_value_info(n, types[n], a.shape) for n, a in feeds.items()]
    outputs = [onnx.helper.make_empty_tensor_value_info(proto.output[0])]
    graph = onnx.helper.make_graph([proto], "one", inputs, outputs)
    version = opset_imports.get("", opset_imports.get("ai.onnx", 18))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])
    from onnx.reference import ReferenceEvaluator

    try:
        (array,) = ReferenceEvaluator(model).run(None, feeds)
    except (NotImplementedError, ValueError, TypeError, RuntimeError, IndexError) as error:
        logger.debug("%s %s is left to the runtime: %s", node.op_type, node.name, error)
        return None
    want = node.outputs[0].dtype
    array = np.asarray(array)
    return array if want is None or array.dtype == want.numpy() else None
