"""From a legal forward graph and its loss to the joint graph: differentiate, and append the backward half."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.capture.data_path import needed_nodes
from ortgraph.capture.differentiate import differentiate
from ortgraph.capture.onnx_read import lift_weights
from ortgraph.errors import UnsupportedError
from ortgraph.graph import Names, stamp
from ortgraph.graph.edit import PHASE_KEY, add_constant, remove_node

BY = "differentiate"
_GRADIENT = re.compile(r"^v(\d+)_grad$")


@dataclasses.dataclass(frozen=True)
class Joint:
    """What differentiation added.

    Attributes:
        gradients: Per parameter name its gradient value (not yet a graph output).
        seed: The value that stands for d loss / d loss; read by the backward half, without producer.
        backward: The new nodes, in order.
    """

    gradients: dict[str, ir.Value]
    seed: ir.Value
    backward: tuple[ir.Node, ...]


def append_backward(
    model: ir.Model, loss: ir.Value, parameters: Sequence[str], names: Names, cut: Sequence[ir.Value] = ()
) -> Joint:
    """Differentiate ``loss`` by ``parameters`` and append the backward nodes to the graph.

    The forward nodes stay exactly as they are: the builder sees a copy whose values are called v0, v1, ... and whose
    nodes are called n0, n1, ..., so that no name in the user's model can collide with the builder's own.

    Args:
        model: Legal forward model with types on every value.
        loss: Scalar value of the graph.
        parameters: Initializers to differentiate by, each with a path to the loss.
        names: Name authority of the graph.
        cut: Values through which no gradient flows; the builder does not see how they are made.

    Raises:
        UnsupportedError: The builder refuses or dies.
    """
    values = _values(model.graph)
    proto, node_of = _copy_for_builder(model, loss, set(parameters), set(cut), values)
    index = {value: i for i, value in enumerate(values)}
    by_name = {str(v.name): v for v in model.graph.initializers.values()}
    try:
        joint = differentiate(proto, f"v{index[loss]}", [f"v{index[by_name[p]]}" for p in parameters])
    except UnsupportedError as error:
        raise UnsupportedError(_with_original_names(error.what, node_of, values), error.hint) from error
    return _append(model, joint, loss, [by_name[p] for p in parameters], values, node_of, names)


def _values(graph: ir.Graph) -> list[ir.Value]:
    found = dict.fromkeys([*graph.inputs, *graph.initializers.values()])
    for node in graph:
        found.update(dict.fromkeys(node.outputs))
    return list(found)


def _copy_for_builder(
    model: ir.Model, loss: ir.Value, parameters: set[str], cut: set[ir.Value], values: list[ir.Value]
) -> tuple[onnx.ModelProto, dict[str, ir.Node]]:
    """A renamed skeleton of the part that the loss needs, and the original node by its name in the copy."""
    twin = model.clone()
    graph = twin.graph
    copies = _values(graph)
    copy_of = dict(zip(values, copies, strict=True))
    node_of: dict[str, ir.Node] = {}
    for i, (original, copied) in enumerate(zip(list(model.graph), list(graph), strict=True)):
        copied.name, node_of[f"n{i}"] = f"n{i}", original
    graph.outputs[:] = [copy_of[loss]]  # why first: what is cut may be another output of the model
    free = {i: _detach(graph, copies[i]) for i, value in enumerate(values) if value in cut}
    keep_outputs(graph, [copy_of[loss]])
    lift_weights(graph, parameters)
    for value in graph.initializers.values():  # a tensor is renamed with its value; the user's stay as they are
        if value.const_value is not None:
            value.const_value = ir.tensor(np.array(value.const_value.numpy()), name=value.name)
    for i, value in enumerate(copies):
        value.name = f"~{i}"  # two steps: a model may itself call a value v3
        if value.type is None:
            value.shape = None  # nothing reads it; onnx_ir would warn that it cannot write it
    for i, value in enumerate(copies):
        value.name = f"hidden{i}" if i in free else f"v{i}"
    for i, value in free.items():
        value.name = f"v{i}"
    proto = ir.serde.serialize_model(twin)
    del proto.metadata_props[:]
    return proto, node_of


def keep_outputs(graph: ir.Graph, outputs: Sequence[ir.Value]) -> None:
    """Remove the nodes and initializers that none of ``outputs`` needs. Optional outputs of nodes stay."""
    needed = needed_nodes(*outputs)
    for node in reversed(graph):
        if node not in needed:
            remove_node(node)
    for name, initializer in list(graph.initializers.items()):
        if not initializer.uses() and initializer not in outputs:
            del graph.initializers[name]


def _detach(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Let the readers of ``value`` read a graph input instead, and return it."""
    free = ir.Value(name=f"{value.name}.cut", type=value.type, shape=value.shape)
    ir.convenience.replace_all_uses_with(value, free)
    graph.inputs.append(free)
    return free


def _with_original_names(text: str, node_of: dict[str, ir.Node], values: list[ir.Value]) -> str:
    text = re.sub(r"'(n\d+)'", lambda m: repr(node_of[m[1]].name) if m[1] in node_of else m[0], text)
    return re.sub(r"\bv(\d+)\b", lambda m: str(values[int(m[1])].name) if int(m[1]) < len(values) else m[0], text)


def _append(
    model: ir.Model,
    joint: onnx.ModelProto,
    loss: ir.Value,
    parameters: list[ir.Value],
    values: list[ir.Value],
    node_of: dict[str, ir.Node],
    names: Names,
) -> Joint:
    graph = model.graph
    known: dict[str, ir.Value] = {f"v{i}": v for i, v in enumerate(values)}
    seed_name = f"v{values.index(loss)}_grad"
    seed = ir.Value(name=names.fresh("loss_gradient"), type=loss.type, shape=loss.shape)
    known[seed_name] = seed
    types = {v.name: v for v in (*joint.graph.value_info, *joint.graph.output)}

    def value_of(name: str) -> ir.Value:
        if name not in known:
            known[name] = _new_value(name, types, values, names)
        return known[name]

    for tensor in joint.graph.initializer:
        if tensor.name not in known:
            known[tensor.name] = _constant(graph, _constant_array(tensor), names)
    backward = []
    for proto in joint.graph.node:
        if proto.name in node_of:
            continue
        node = _node(proto, value_of, names)
        origin = node_of.get(proto.name.split("_Grad/")[0].removeprefix("AccumulateGrad_"))
        stamp(node, BY, [origin] if origin is not None else [])
        node.metadata_props[PHASE_KEY] = "backward"
        graph.append(node)
        backward.append(node)
    for entry in joint.opset_import:
        if entry.domain == "com.microsoft":
            graph.opset_imports.setdefault(entry.domain, entry.version)
    gradients = {str(p.name): known[f"v{values.index(p)}_grad"] for p in parameters}
    return Joint(gradients, seed, tuple(backward))


def _constant_array(tensor: onnx.TensorProto) -> np.ndarray:
    """The builder writes its float constants as [1], which gives gradients of scalars one axis too many."""
    array = onnx.numpy_helper.to_array(tensor)
    return array.reshape(()) if array.shape == (1,) and array.dtype.kind == "f" else array


def _constant(graph: ir.Graph, array: np.ndarray, names: Names) -> ir.Value:
    return add_constant(graph, ir.tensor(array), names.fresh("constant"))


def _new_value(name: str, types: dict[str, onnx.ValueInfoProto], values: list[ir.Value], names: Names) -> ir.Value:
    gradient = _GRADIENT.match(name)
    base = f"{values[int(gradient[1])].name}.grad" if gradient else name.rsplit("/", 1)[-1]
    value = ir.Value(name=names.fresh(base))
    if gradient:
        value.type, value.shape = values[int(gradient[1])].type, values[int(gradient[1])].shape
    elif name in types:
        made = ir.serde.deserialize_value_info_proto(types[name], None)
        value.type, value.shape = made.type, made.shape
    return value


def _node(proto: onnx.NodeProto, value_of, names: Names) -> ir.Node:
    attributes = [ir.from_proto(a) for a in proto.attribute]
    inputs = [value_of(n) if n else None for n in proto.input]
    outputs = [value_of(n) if n else ir.Value(name="") for n in proto.output]
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    name = names.fresh_node(f"backward.{proto.op_type.lower()}")
    return ir.Node(domain, proto.op_type, inputs, attributes, outputs=outputs, name=name)
