"""The runtime's version window: IR at most 10, opset 18 to 21."""

from __future__ import annotations

import logging
import re
from typing import Any

import onnx
import onnx_ir as ir
from onnx import version_converter
from onnx_ir.passes import common

from ortgraph.capture.onnx_read import infer_forward, restore, skeleton
from ortgraph.errors import InputError, UnsupportedError
from ortgraph.graph import Names, is_used, replace_value
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder

logger = logging.getLogger(__name__)
MIN_OPSET, MAX_OPSET, MAX_IR = 18, 21, 10
_BATCH_NORM_OF_THREE = 14  # the opset from which BatchNormalization has three outputs, not five
_EXPANDED = "ortgraph.expanded"  # domain of function bodies on their way to being inlined
_UPDATE = f"export with opset_version={MAX_OPSET} or lower"


def convert_opset(model: ir.Model, opset: int | None) -> ir.Model:
    """The model at an opset of the window (``opset``, or the nearest to its own), and at an IR version of it.

    Raises:
        InputError: ``opset`` is outside the window, or the model names no ONNX opset.
        UnsupportedError: An operator cannot be converted; names the first one and the newest supported version.
    """
    imports = model.graph.opset_imports
    if "ai.onnx" in imports:
        imports.setdefault("", imports.pop("ai.onnx"))
    own = imports.get("")
    if own is None:
        raise InputError("the model imports no ONNX opset", "export it again")
    if opset is not None and not MIN_OPSET <= opset <= MAX_OPSET:
        raise InputError(f"opset={opset} is outside what the runtimes take", f"{MIN_OPSET} to {MAX_OPSET}")
    newest = onnx.defs.onnx_opset_version()
    if own > newest:
        raise UnsupportedError(
            f"the model is at opset {own}; the installed onnx package knows up to {newest}, "
            f"ONNX Runtime training up to {MAX_OPSET}",
            _UPDATE,
        )
    if own < _BATCH_NORM_OF_THREE:
        _drop_saved_statistics(model)
    target = opset if opset is not None else min(max(own, MIN_OPSET), MAX_OPSET)
    if own > target:
        _expand_newer(model, own, target)
    if own != target:
        model = _convert(model, own, target)
    model.ir_version = min(model.ir_version or MAX_IR, MAX_IR)
    return model


def _drop_saved_statistics(model: ir.Model) -> None:
    """Outputs 2 to 5 of an old BatchNormalization mark training mode; the converter refuses them, read or not.

    Raises:
        UnsupportedError: One of them is read.
    """
    for node in model.graph.all_nodes():
        if node.op_type != "BatchNormalization" or node.domain not in ("", "ai.onnx") or len(node.outputs) == 1:
            continue
        read = next((o for o in node.outputs[1:] if is_used(o)), None)
        if read is not None:
            raise UnsupportedError(
                f"node {node.name!r}: the statistics of BatchNormalization (%{read.name}) are read or are an output",
                "leave that output out of the model",
            )
        node.resize_outputs(1)


def _convert(model: ir.Model, own: int, target: int) -> ir.Model:
    for node in model.graph.all_nodes():
        if node.domain == "ai.onnx":
            node.domain = ""
    proto, lifted = skeleton(model)
    proto.ir_version = min(proto.ir_version, MAX_IR)
    try:
        converted = version_converter.convert_version(proto, target)
    except (RuntimeError, version_converter.ConvertError) as error:
        raise _refusal(model, own, target, str(error)) from error
    if target < own:
        _check_types(converted, target)
    logger.info("converted the model from opset %d to %d", own, target)
    return restore(converted, lifted)


def _refusal(model: ir.Model, own: int, target: int, said: str) -> UnsupportedError:
    """Name the operator that the converter stumbled on."""
    newest = f"the newest supported opset is {MAX_OPSET}"
    found = re.search(r"operator '(\w+)' is unallowed", said) or re.search(
        r"(?:Version of |for |adapter for )(\w+)", said
    )
    op_type = found[1] if found else ""
    node = next((n for n in model.graph.all_nodes() if n.op_type == op_type), None)
    if node is None:
        reason = said.strip().splitlines()[0]
        return UnsupportedError(
            f"the model cannot be converted from opset {own} to {target} ({reason}); {newest}", _UPDATE
        )
    return UnsupportedError(
        f"node {node.name!r}: operator {op_type} of opset {own} cannot be converted to opset {target}; {newest}",
        _UPDATE if own > target else f"export with opset_version={MIN_OPSET} to {MAX_OPSET}",
    )


def _check_types(proto: onnx.ModelProto, target: int) -> None:
    """A newer version may allow types or attributes that the older one does not."""
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UnsupportedError(
            f"converted to opset {target} the model is no longer valid: {lines[0]}; "
            f"the newest supported opset is {MAX_OPSET}",
            _UPDATE,
        ) from error


def _expand_newer(model: ir.Model, own: int, target: int) -> None:
    """Inline the function bodies of operators that do not exist at ``target`` (RMSNormalization, Attention, ...)."""
    newer = [n for n in model.graph.all_nodes() if n.domain in ("", "ai.onnx") and _since(n.op_type, target) is None]
    if not newer:
        return
    infer_forward(model)
    names = Names(model.graph)
    for i, node in enumerate(newer):
        if node.op_type == "RMSNormalization" and node.graph is model.graph:
            _expand_rms_norm(node, names)
            continue
        body = _function_body(node, own)
        if body is None:
            raise UnsupportedError(
                f"node {node.name!r}: operator {node.op_type} of opset {own} does not exist at opset {target} and "
                f"has no expansion; the newest supported opset is {MAX_OPSET}",
                _UPDATE,
            )
        body.domain, body.name = _EXPANDED, f"{node.op_type}_{i}"
        for entry in body.opset_import:
            entry.version = own if entry.domain in ("", "ai.onnx") else entry.version
        made = {name for inner in body.node for name in inner.output}
        absent = [j for j, name in enumerate(body.output) if name not in made]
        if any(j < len(node.outputs) and is_used(node.outputs[j]) for j in absent):
            raise UnsupportedError(f"node {node.name!r}: an output of {node.op_type} has no expansion", _UPDATE)
        kept = [name for name in body.output if name in made]
        del body.output[:]
        body.output.extend(kept)
        function = ir.serde.deserialize_function(body)
        model.functions[function.identifier()] = function
        node.domain, node.op_type = _EXPANDED, body.name
    model.graph.opset_imports[_EXPANDED] = 1
    common.InlinePass()(model)
    del model.graph.opset_imports[_EXPANDED]


def _since(op_type: str, opset: int) -> int | None:
    try:
        return onnx.defs.get_schema(op_type, opset, "").since_version
    except onnx.defs.SchemaError:
        return None


def _expand_rms_norm(node: ir.Node, names: Names) -> None:
    """RMSNormalization(X, Scale) = X / sqrt(mean(X^2) + epsilon) * Scale, over the axes from ``axis`` on."""
    x, scale = node.inputs[0], node.inputs[1]
    if x is None or scale is None or x.shape is None:
        raise UnsupportedError(f"node {node.name!r}: the rank of RMSNormalization's input is not known", _UPDATE)
    assert isinstance(node.graph, ir.Graph)
    build = Builder(node.graph, "legalize", before=node, origins=[node], names=names)
    axis = node.attributes.get_int("axis", -1)
    axes = build.ints(list(range(axis % len(x.shape), len(x.shape))))
    mean = build.op("ReduceMean", build.op("Mul", x, x), axes, keepdims=1)
    root = build.op("Sqrt", build.op("Add", mean, build.scalar(node.attributes.get_float("epsilon", 1e-5), x)))
    replace_value(node.outputs[0], build.op("Mul", build.op("Div", x, root), scale))
    remove_node(node)


def _function_body(node: ir.Node, opset: int) -> onnx.FunctionProto | None:
    schema: Any = onnx.defs.get_schema(node.op_type, opset, "")  # onnx's stub knows nothing of its functions
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            node.attributes[name] = ir.serde.deserialize_attribute(attribute.default_value)
    body = onnx.FunctionProto()
    if schema.has_context_dependent_function:
        types = [_type_bytes(v) for v in node.inputs]
        proto = ir.serde.serialize_node(node)
        body.ParseFromString(schema.get_context_dependent_function(proto.SerializeToString(), types))
        return body
    if schema.has_function:
        body.CopyFrom(schema.function_body)
        return body
    return None


def _type_bytes(value: ir.Value | None) -> bytes:
    if value is None or value.type is None:
        return onnx.TypeProto().SerializeToString()
    proto = onnx.ValueInfoProto()
    ir.serde.serialize_value_into(proto, value)
    return proto.type.SerializeToString()
