"""Functions and control flow: what is constant is inlined, the rest is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common

from ortgraph.errors import UnsupportedError
from ortgraph.graph import Names, replace_value, static_shape
from ortgraph.graph.edit import remove_node

logger = logging.getLogger(__name__)
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_MAX_DEPTH = 64  # nodes between a condition and its constants


def inline_functions(model: ir.Model) -> None:
    """Inline model-local functions. Initializers, inputs and outputs keep their names.

    Raises:
        UnsupportedError: A function calls itself, or cannot be inlined.
    """
    if not model.functions:
        return
    try:
        common.InlinePass()(model)
    except Exception as error:  # noqa: BLE001 - the pass wraps every cause in an error of its own kind
        cause = error.__cause__ or error
        raise UnsupportedError(
            f"a model-local function cannot be inlined: {cause}", "inline it before export"
        ) from error


def inline_constant_ifs(model: ir.Model) -> int:
    """Replace each If whose condition is known by the branch that it takes. Returns how many.

    A condition is known when it follows from integer and boolean constants and static shapes; a float initializer
    is a parameter and never a constant.
    """
    count = 0
    names = Names(model.graph)
    while True:
        found = next(((n, c) for n in model.graph if n.op_type == "If" and (c := _condition(n)) is not None), None)
        if found is None:
            return count
        node, condition = found
        _inline_branch(model.graph, node, "then_branch" if condition else "else_branch", names)
        count += 1


def _condition(node: ir.Node) -> bool | None:
    value = node.inputs[0]
    known = None if value is None else constant_value(value)
    return None if known is None or known.size != 1 else bool(known.reshape(()))


def _inline_branch(graph: ir.Graph, node: ir.Node, branch: str, names: Names) -> None:
    body = node.attributes[branch].as_graph()
    for name, value in list(body.initializers.items()):
        del body.initializers[name]
        if name in graph.initializers:
            value.name = names.fresh(name)
        graph.register_initializer(value)
    inner = list(body)
    results = list(body.outputs)
    body.outputs.clear()
    for moved in inner:
        body.remove(moved)
        moved.name = names.fresh_node(moved.name or moved.op_type.lower())
        for output in moved.outputs:
            output.name = names.fresh(output.name or moved.op_type.lower())
        graph.insert_before(node, moved)
    for old, new in zip(node.outputs, results, strict=True):
        if new.type is None:
            new.type, new.shape = old.type, old.shape
        replace_value(old, new)
    remove_node(node)


def constant_value(value: ir.Value, depth: int = 0) -> np.ndarray | None:
    """The value when it follows from integer and boolean constants and static shapes, else None."""
    tensor = value.const_value
    if tensor is not None:
        fixed = value.producer() is not None or not tensor.dtype.is_floating_point()
        return tensor.numpy() if fixed else None
    node = value.producer()
    if node is None or depth > _MAX_DEPTH:
        return None
    if node.op_type == "Constant":
        made = ir.convenience.get_const_tensor(value)
        return None if made is None else made.numpy()
    if node.op_type in ("Shape", "Size") and node.inputs[0] is not None:
        return shape_value(node)
    inputs = [None if v is None else constant_value(v, depth + 1) for v in node.inputs]
    if not inputs or node.domain not in ("", "ai.onnx") or any(a is None for a in inputs):
        return None
    results = evaluate_node(node, inputs)
    return results[value.index() or 0] if results else None


def shape_value(node: ir.Node) -> np.ndarray | None:
    assert node.inputs[0] is not None
    shape = static_shape(node.inputs[0])
    if shape is None:
        return None
    if node.op_type == "Size":
        return np.array(int(np.prod(shape)), dtype=np.int64)
    start = node.attributes.get_int("start", 0)
    end = node.attributes.get_int("end", len(shape))
    return np.array(shape[start:end], dtype=np.int64)


def evaluate_node(node: ir.Node, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """Run one small standard operator with ONNX's reference implementation. Empty when it cannot be run."""
    if node.domain not in ("", "ai.onnx") or any(
        a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()
    ):
        return []
    version = node.graph.opset_imports.get("", 18) if isinstance(node.graph, ir.Graph) else 18
    proto = ir.serde.serialize_node(node)
    constants = [onnx.numpy_helper.from_array(a, n) for n, a in zip(proto.input, inputs, strict=True) if a is not None]
    results = [onnx.helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    graph = onnx.helper.make_graph([proto], "constant", [], results, constants)
    opsets = [onnx.helper.make_opsetid("", version)]
    try:
        made = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets)).run(None, {})
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        logger.debug("constant %s is not evaluated: %s", node.name, error)
        return []
    return list(made)


def refuse_control_flow(path: list[ir.Node]) -> None:
    """Refuse dynamic control flow on the data path.

    Raises:
        UnsupportedError: Names the first such node.
    """
    for node in path:
        if node.op_type in CONTROL_FLOW and node.domain in ("", "ai.onnx"):
            raise UnsupportedError(
                f"node {node.name!r}: {node.op_type} with a condition or length that is not constant lies between a "
                f"trainable weight and the loss; control flow has no gradient",
                "export with constant control flow, or freeze the weights before it with trainable=[...]",
            )
