"""The data path: what lies between the trainable weights and the loss, and whether it can be differentiated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from ortgraph.capture.onnx_roles import NO_GRADIENT_INPUTS
from ortgraph.errors import UnsupportedError

# Operators for which the gradient builder of onnxruntime-training 1.19.2 has an entry that the CPU runtime can run.
# fmt: off
STANDARD = frozenset(
    (
        "Abs", "Add", "AveragePool", "Cast", "Clip", "Concat", "Conv", "Cos", "Div", "Dropout", "Erf", "Exp", "Expand",
        "Flatten", "Gather", "GatherElements", "GatherND", "Gemm", "GlobalAveragePool", "Identity",
        "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "MatMul", "Max", "MaxPool", "Min", "Mul", "Neg", "Pad",
        "Pow", "Reciprocal", "ReduceL2", "ReduceLogSumExp", "ReduceMean", "ReduceSum", "Relu", "Reshape",
        "ScatterElements", "ScatterND", "Sigmoid", "Sin", "Slice", "Softmax", "SoftmaxCrossEntropyLoss", "Split",
        "Sqrt", "Squeeze", "Sub", "Tanh", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where",
        "SimplifiedLayerNormalization",
    )
)
# fmt: on
CONTRIB = frozenset({"BatchNormInternal"})
ZERO_GRADIENT = frozenset({"ArgMax", "ArgMin", "Ceil", "Floor", "Hardmax", "RandomUniformLike", "Round", "Sign"})
_DECOMPOSED_STOPS = frozenset({"Clip"})  # their decomposition differentiates by these inputs too


def data_path(graph: ir.Graph, loss: ir.Value, parameters: Collection[str]) -> list[ir.Node]:
    """Nodes on a differentiable path from a parameter to the loss, in graph order."""
    carrying: set[ir.Value] = {graph.initializers[n] for n in parameters if n in graph.initializers}
    forward: set[ir.Node] = set()
    for node in graph:
        if _carries(node, carrying):
            forward.add(node)
            carrying.update(o for o in node.outputs if _is_float(o))
    needed: set[ir.Value] = {loss}
    path = []
    for node in reversed(graph):
        if node in forward and any(o in needed and o in carrying for o in node.outputs):
            path.append(node)
            needed.update(v for i, v in enumerate(node.inputs) if v is not None and not _stops(node, i))
            needed.update(captured(node))
    return path[::-1]


def reached_parameters(path: Sequence[ir.Node], parameters: Sequence[str]) -> set[str]:
    """The parameters that some node of the data path reads along a differentiable input."""
    wanted = set(parameters)
    read: set[str] = set()
    for node in path:
        names = {v.name for i, v in enumerate(node.inputs) if v is not None and not _stops(node, i)}
        read.update(str(n) for n in names if n in wanted)
    return read


def _is_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()


def _stops(node: ir.Node, index: int) -> bool:
    return node.domain in ("", "ai.onnx") and index in NO_GRADIENT_INPUTS.get(node.op_type, ())


def _carries(node: ir.Node, carrying: set[ir.Value]) -> bool:
    if node.op_type in ZERO_GRADIENT and node.domain in ("", "ai.onnx"):
        return False
    if any(v in carrying and not _stops(node, i) for i, v in enumerate(node.inputs) if v is not None):
        return True
    return any(v in carrying for v in captured(node))


def captured(node: ir.Node) -> list[ir.Value]:
    """Outer values that the node's subgraphs read."""
    found: dict[ir.Value, None] = {}
    for attribute in node.attributes.values():
        bodies = []
        if attribute.type == ir.AttributeType.GRAPH:
            bodies = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            bodies = list(attribute.as_graphs())
        for body in bodies:
            own = {*body.inputs, *body.initializers.values()}
            for inner in body.all_nodes():
                own.update(inner.outputs)
            reads = [v for inner in body.all_nodes() for v in inner.inputs if v is not None]
            found.update(dict.fromkeys(v for v in (*reads, *body.outputs) if v not in own))
    return list(found)


def has_gradient(node: ir.Node) -> bool:
    """Whether the gradient builder knows the operator."""
    known = STANDARD if node.domain in ("", "ai.onnx") else CONTRIB if node.domain == "com.microsoft" else ()
    return node.op_type in known


def receives_gradient(value: ir.Value, path: Collection[ir.Node]) -> bool:
    """Whether a node of the data path reads the value along a differentiable input."""
    return any(use.node in path and not _stops(use.node, use.idx) for use in value.uses())


def refuse_lost_gradients(graph: ir.Graph, loss: ir.Value, parameters: Collection[str]) -> None:
    """Refuse a graph in which a float value that depends on a weight enters an input without gradient.

    Raises:
        UnsupportedError: Names the node and the input: the gradient would silently miss a term.
    """
    carrying: set[ir.Value] = {graph.initializers[n] for n in parameters if n in graph.initializers}
    for node in graph:
        if _carries(node, carrying):
            carrying.update(o for o in node.outputs if _is_float(o))
    needed = needed_nodes(loss)
    for node in graph:
        if node not in needed or node.domain not in ("", "ai.onnx"):
            continue
        for i, value in enumerate(node.inputs):
            if value is not None and value in carrying and _stops(node, i) and node.op_type not in _DECOMPOSED_STOPS:
                raise UnsupportedError(
                    f"node {node.name!r}: input {i} of {node.op_type} depends on a trainable weight "
                    f"(%{value.name}) and has no gradient there",
                    "freeze the weights that it depends on with trainable=[...]",
                )


def needed_nodes(*values: ir.Value) -> set[ir.Node]:
    """The nodes that ``values`` are computed by."""
    needed: set[ir.Node] = set()
    stack = list(values)
    while stack:
        node = stack.pop().producer()
        if node is None or node in needed:
            continue
        needed.add(node)
        stack += [v for v in (*node.inputs, *captured(node)) if v is not None]
    return needed


def check_differentiable(path: Sequence[ir.Node]) -> None:
    """Refuse a graph with an operator on the data path that has no gradient.

    Raises:
        UnsupportedError: Names the first such node, its operator and the reason.
    """
    for node in path:
        reason = _reason(node)
        if reason is not None:
            raise UnsupportedError(
                f"node {node.name!r} lies between a trainable weight and the loss: {reason}",
                "replace it in the model, or freeze the weights before it with trainable=[...]",
            )


def _reason(node: ir.Node) -> str | None:
    """Why the node has no right gradient; None when it has one."""
    if node.domain == "com.microsoft" and not has_gradient(node):
        return f"the operator com.microsoft.{node.op_type} is made for inference and has no gradient"
    if not has_gradient(node):
        operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        return f"the operator {operator} has no gradient"
    if node.op_type == "AveragePool" and (
        node.attributes.get_int("ceil_mode", 0) != 0 or any(d != 1 for d in node.attributes.get_ints("dilations", []))
    ):
        return "AveragePool with ceil_mode or dilations has no gradient"
    if node.op_type in ("ScatterElements", "ScatterND") and node.attributes.get_string("reduction", "none") != "none":
        return f"{node.op_type} with a reduction has no gradient"
    if node.op_type == "Pad" and node.attributes.get_string("mode", "constant") != "constant":
        return f"Pad with mode {node.attributes.get_string('mode')!r} has no gradient"
    return None
