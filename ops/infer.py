"""Types and shapes of node outputs: our rules first, ONNX's own inference for the rest of the standard operators."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx import shape_inference

from ortgraph.ops.spec import Shape, Typed, spec_of

logger = logging.getLogger(__name__)
# A type that the schema does not list is one of them: Conv on bfloat16, which a kernel runs, or casts around it.
_NOT_INFERRED = (
    onnx.onnx_cpp2py_export.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    onnx.defs.SchemaError,
    ValueError,
)
_MAX_DATA = 1024  # elements of a constant that inference may look at (shapes, axes)


def infer_node(node: ir.Node, opset_imports: dict[str, int]) -> bool:
    """Set dtype and shape of every output where a rule knows them. Returns whether all outputs are known."""
    rule = spec_of(node).infer
    types = rule(node) if rule is not None else None
    if types is None:  # no rule, or a rule that leaves this case to ONNX
        types = _standard(node, opset_imports) if node.domain in ("", "ai.onnx") else []
    for output, typed in zip(node.outputs, types, strict=False):
        if typed is None:
            continue
        dtype, shape = typed
        if output.dtype != dtype:
            output.type = ir.TensorType(dtype)  # its own: clones share type objects, and setting dtype writes into them
        if shape is not None:
            output.shape = ir.Shape(shape)
    return all(o.dtype is not None and o.shape is not None for o in node.outputs if o.name or o.uses())


def _standard(node: ir.Node, opset_imports: dict[str, int]) -> Sequence[Typed | None]:
    version = opset_imports.get("", 18)
    inputs, data = {}, {}
    proto = onnx.NodeProto(op_type=node.op_type)
    for i, value in enumerate(node.inputs):
        if value is None:
            proto.input.append("")
            continue
        name = f"i{i}"
        proto.input.append(name)
        if value.dtype is None:
            return []
        dims = None if value.shape is None else [_dim(d) for d in value.shape]
        inputs[name] = onnx.helper.make_tensor_type_proto(int(value.dtype), dims)
        constant = ir.convenience.get_const_tensor(value)
        if constant is not None and constant.size <= _MAX_DATA:
            data[name] = ir.serde.serialize_tensor(constant)
    proto.output.extend(f"o{i}" for i in range(len(node.outputs)))
    proto.attribute.extend(ir.serde.serialize_attribute(a) for a in node.attributes.values())
    try:
        schema = onnx.defs.get_schema(node.op_type, version, "")
        found = shape_inference.infer_node_outputs(
            schema, proto, inputs, input_data=data, opset_imports=[onnx.helper.make_opsetid("", version)]
        )
    except _NOT_INFERRED as error:
        logger.debug("no inferred type for %s (%s): %s", node.name, node.op_type, error)
        return []
    result: list[Typed | None] = []
    for name in proto.output:
        type_proto = found.get(name)
        if type_proto is None or not type_proto.HasField("tensor_type"):
            result.append(None)
            continue
        tensor = type_proto.tensor_type
        shape: Shape | None = None
        if tensor.HasField("shape"):
            shape = tuple(
                d.dim_value if d.HasField("dim_value") else ir.SymbolicDim(d.dim_param or None)
                for d in tensor.shape.dim
            )
        result.append((ir.DataType(tensor.elem_type), shape))
    return result


def _dim(d: int | ir.SymbolicDim) -> int | str | None:
    return d if isinstance(d, int) else d.value


def infer_graph(graph: ir.Graph) -> list[ir.Node]:
    """Infer in node order, keeping what is recorded where a rule knows nothing. Returns the nodes left unknown."""
    return [node for node in graph if not infer_node(node, graph.opset_imports)]
