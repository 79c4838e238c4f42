"""Canonical text of a training graph: stable across runs, readable in review, hashable for "did it change"."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ortgraph.graph.edit import PASS_KEY

if TYPE_CHECKING:
    from ortgraph.graph.training_graph import TrainingGraph

_SHOWN_ELEMENTS = 8


def shape_text(value: ir.Value) -> str:
    dtype = value.dtype.short_name() if value.dtype is not None else "?"
    if value.shape is None:
        return f"{dtype}[?]"
    return f"{dtype}[{','.join('?' if d is None or str(d) == 'None' else str(d) for d in value.shape)}]"


def _tensor_text(tensor: ir.TensorProtocol) -> str:
    array = tensor.numpy()
    if array.size <= _SHOWN_ELEMENTS:
        return str(array.tolist())
    return f"sha256:{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]}"


def _attribute_text(attribute: ir.Attr, names: dict[ir.Value, str]) -> str:
    if attribute.ref_attr_name:
        return f"@{attribute.ref_attr_name}"
    if attribute.type == ir.AttributeType.TENSOR:
        return _tensor_text(attribute.as_tensor())
    if attribute.type == ir.AttributeType.GRAPH:
        body = attribute.as_graph()
        return "{" + "; ".join(node_text(n, names, provenance=False) for n in body) + "}"
    return repr(list(attribute.value)) if isinstance(attribute.value, (tuple, list)) else repr(attribute.value)


def node_text(node: ir.Node, names: dict[ir.Value, str] | None = None, provenance: bool = True) -> str:
    """One line: ``%y f32[2,3] = ortgraph.Gelu(%x) {approximate='none'}  # fuse-gelu``."""
    names = names or {}

    def say(v: ir.Value | None) -> str:
        return "_" if v is None else "%" + names.get(v, v.name or "?")

    outputs = ", ".join(f"{say(o)} {shape_text(o)}" for o in node.outputs)
    kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    line = f"{outputs} = {kind}({', '.join(say(i) for i in node.inputs)})"
    if node.attributes:
        inside = ", ".join(f"{k}={_attribute_text(a, names)}" for k, a in sorted(node.attributes.items()))
        line += f" {{{inside}}}"
    made_by = node.metadata_props.get(PASS_KEY)
    return f"{line}  # {made_by}" if provenance and made_by else line


def to_text(graph: TrainingGraph, provenance: bool = True) -> str:
    """The whole graph: stage, inputs with roles, constants, nodes in order, outputs with roles.

    Intermediate values are numbered in order of definition, so renaming one does not change the text.
    """
    g = graph.graph
    lines = []
    in_roles: dict[str, str] = {}
    out_roles: dict[str, list[str]] = {}
    if graph.has_signature:
        signature = graph.signature
        in_roles = {name: role for role, name in signature.graph_inputs()}
        for role, name in signature.graph_outputs():
            out_roles.setdefault(name, []).append(role)
        lines.append(f"stage {signature.stage}")
    lines.append("opset " + ", ".join(f"{d or 'ai.onnx'}={v}" for d, v in sorted(g.opset_imports.items())))
    lines += [f"in  %{v.name} {shape_text(v)}  {in_roles.get(v.name or '', '')}".rstrip() for v in g.inputs]
    names: dict[ir.Value, str] = {}
    outputs = set(g.outputs)
    for node in g:
        for o in node.outputs:
            if o not in outputs:
                names[o] = str(len(names))
    used = [v for v in g.initializers.values() if v.uses() or v.is_graph_output()]
    for i, v in enumerate(sorted(used, key=lambda v: _first_use(v, names))):
        names[v] = f"c{i}"
        tensor = v.const_value
        lines.append(f"const %c{i} {shape_text(v)} = {_tensor_text(tensor) if tensor is not None else '?'}")
    lines += [node_text(n, names, provenance) for n in g]
    lines += [
        f"out %{names.get(v, v.name or '?')} {shape_text(v)}  {'+'.join(out_roles.get(v.name or '', []))}".rstrip()
        for v in g.outputs
    ]
    for function in sorted(graph.model.functions.values(), key=lambda f: f.identifier()):
        lines += _function_lines(function)
    return "\n".join(lines) + "\n"


def _function_lines(function: ir.Function) -> list[str]:
    """A function of the model: its name with inputs, its nodes, its outputs."""
    formals = ", ".join(f"%{v.name} {shape_text(v)}" for v in function.inputs)
    lines = [f"function {function.domain}.{function.name}({formals})"]
    lines += [f"  {node_text(n, provenance=False)}" for n in function]
    return [*lines, f"  return {', '.join(f'%{v.name}' for v in function.outputs)}"]


def _first_use(value: ir.Value, names: dict[ir.Value, str]) -> tuple[int, int]:
    first = (1 << 60, 0)
    for use in value.uses():
        for o in use.node.outputs:
            name = names.get(o)
            if name is not None:
                first = min(first, (int(name), use.idx))
    return first


def text_hash(graph: TrainingGraph) -> str:
    """SHA-256 of the canonical text without provenance: equal when nothing a runtime sees has changed."""
    return hashlib.sha256(to_text(graph, provenance=False).encode()).hexdigest()
