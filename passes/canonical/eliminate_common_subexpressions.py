"""EliminateCommonSubexpressions: compute equal things once."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Hashable
from typing import ClassVar

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import PHASE_KEY
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.ops.precision import is_low
from ortgraph.ops.spec import OpSpec, spec_of
from ortgraph.passes.canonical.values import BEFORE_PLAN, Edit, bodies


@dataclasses.dataclass(frozen=True)
class EliminateCommonSubexpressions(GraphPass):
    """f(x), f(x): keep the first, for every operator that the operator table calls deterministic.

    Nodes are equal when operator, inputs (the first two in any order if commutative), attributes (defaults filled in,
    tensors by content) and present outputs are equal; forward and backward nodes may merge. Equal constants of at
    most ``max_bytes`` merge first. Counted as ``merged`` (nodes) and ``constants``.

    Attributes:
        max_bytes: Constants above this size are not compared.

    Refuses when:
        - the operator is not deterministic (draws from hidden state) or unknown, has effects or carries a subgraph;
        - the equal values are parameters, buffers or other graph inputs: only constants merge;
        - two outputs of the graph would become one value;
        - they widen a low-precision value in different halves: float32 would be kept from one to the other.
    """

    name: ClassVar[str] = "eliminate-common-subexpressions"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN
    max_bytes: int = 1 << 20

    def run(self, graph: TrainingGraph) -> Changes:
        g = graph.graph
        edit = Edit(g)
        changes = Changes()
        changes.counts["constants"] = _merge_constants(g, edit, self.max_bytes)
        first: dict[Hashable, ir.Node] = {}
        gone = []
        for node in g:
            spec = spec_of(node)
            if not spec.deterministic or spec.effects or not node.outputs or next(bodies(node), None) is not None:
                continue
            key = _key(node, spec, g.opset_imports)
            leader = first.setdefault(key, node) if key is not None else node
            if leader is node:
                continue
            pairs = list(zip(node.outputs, leader.outputs, strict=True))
            kept = next((pair for pair in pairs if not _can_redirect(edit, *pair)), None)
            if kept is not None:
                reason = f"graph output %{kept[0].name} equals %{kept[1].name}; both names stay"
                changes.refusals.append(Refusal(node.name or "", reason))
                continue
            for old, new in pairs:
                edit.redirect(old, new)
            gone.append(node)
        changes.counts["merged"] = edit.remove(gone)
        return changes


def _can_redirect(edit: Edit, old: ir.Value, new: ir.Value) -> bool:
    if old.name in edit.pinned:
        return False
    return not old.is_graph_output() or not (new.is_graph_output() or new.name in edit.pinned)


def _merge_constants(g: ir.Graph, edit: Edit, max_bytes: int) -> int:
    first: dict[Hashable, ir.Value] = {}
    merged = 0
    for name, value in tuple(g.initializers.items()):
        tensor = value.const_value
        if tensor is None or value.is_graph_input() or value.is_graph_output() or tensor.nbytes > max_bytes:
            continue
        if not edit.is_read(value):
            continue
        leader = first.setdefault(_tensor_key(tensor), value)
        if leader is value or not edit.redirect(value, leader):
            continue
        del g.initializers[name]
        merged += 1
    return merged


def _key(node: ir.Node, spec: OpSpec, opsets: dict[str, int]) -> Hashable | None:
    """What an equal node has in common with this one; None when it cannot be told."""
    inputs: list[Hashable] = [0 if v is None else id(v) for v in node.inputs]
    view = _view_shape(node)
    if view is not None:
        return spec.domain, node.op_type, inputs[0], view
    while inputs and inputs[-1] == 0:
        inputs.pop()
    if spec.commutative and len(inputs) > 1:
        inputs[:2] = sorted(inputs[:2])  # type: ignore[type-var]
    attributes = dict(_defaults(node.domain, node.op_type, opsets.get(node.domain, 0)))
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            return None
        attributes[name] = _attribute_key(attribute)
    if node.op_type == "Cast" and is_low(node.inputs[0]):
        attributes[PHASE_KEY] = node.metadata_props.get(PHASE_KEY)
    present = tuple(bool(o.name) for o in node.outputs)
    return spec.domain, node.op_type, node.overload, tuple(inputs), tuple(sorted(attributes.items())), present


def _view_shape(node: ir.Node) -> tuple[int, ...] | None:
    """The recorded shape of a Reshape's result, one unknown dimension as -1: all that any spelling of it can say."""
    if node.op_type != "Reshape" or node.domain not in ("", "ai.onnx") or node.outputs[0].shape is None:
        return None
    shape = tuple(d if isinstance(d, int) else -1 for d in node.outputs[0].shape)
    return None if shape.count(-1) > 1 or 0 in shape else shape


def _attribute_key(attribute: ir.Attr) -> Hashable:
    kind = int(attribute.type)
    if attribute.type == ir.AttributeType.TENSOR:
        return kind, _tensor_key(attribute.as_tensor())
    if attribute.type == ir.AttributeType.TENSORS:
        return kind, tuple(_tensor_key(t) for t in attribute.as_tensors())
    if attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
        # Bytes, since 0.0 == -0.0 and nan != nan.
        return kind, np.asarray(attribute.value, dtype=np.float64).tobytes()
    if attribute.type in (ir.AttributeType.INTS, ir.AttributeType.STRINGS):
        return kind, tuple(attribute.value)
    if attribute.type in (ir.AttributeType.INT, ir.AttributeType.STRING):
        return kind, attribute.value
    return kind, id(attribute)


def _tensor_key(tensor: ir.TensorProtocol) -> Hashable:
    shape = tuple(tensor.shape.numpy())
    if tensor.dtype == ir.DataType.STRING:
        return int(tensor.dtype), shape, tuple(tensor.numpy().reshape(-1).tolist())
    data = np.ascontiguousarray(tensor.numpy()).tobytes()
    return int(tensor.dtype), shape, data if len(data) <= 64 else hashlib.sha256(data).digest()


@functools.lru_cache(maxsize=1024)
def _defaults(domain: str, op_type: str, version: int) -> tuple[tuple[str, Hashable], ...]:
    """Default attribute values of a standard operator, so that a spelled default equals an absent one."""
    if domain not in ("", "ai.onnx") or not version:
        return ()
    try:
        schema = onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:  # an operator that this opset does not have
        return ()
    given = ((name, a.default_value) for name, a in sorted(schema.attributes.items()))
    return tuple(
        (name, _attribute_key(ir.serde.deserialize_attribute(d))) for name, d in given if d is not None and d.name
    )
