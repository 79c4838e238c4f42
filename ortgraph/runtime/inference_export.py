"""The model in evaluation mode: the forward half without dropout, with running statistics, for any runtime."""

from __future__ import annotations

import base64
import dataclasses
import logging
import os
import pathlib
import tempfile
import zlib
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.graph import Names, Signature, TrainingGraph, replace_value
from ortgraph.graph.edit import MODULE_KEY, SOURCE_KEY, take_type, trim_inputs
from ortgraph.graph.writing import writing
from ortgraph.ops.builder import Builder
from ortgraph.ops.expand import can_expand, expand_composites, expand_node
from ortgraph.ops.spec import COMPOSITE, CONTRIB, GENERATED
from ortgraph.runtime.ort_session import MAX_IR_VERSION
from ortgraph.runtime.program import needed_nodes

logger = logging.getLogger(__name__)
METADATA_KEY = "ortgraph.evaluation"
BY = "evaluation-form"
_LOWERED = ("lowered", "planned")


def evaluation_form(graph: TrainingGraph) -> TrainingGraph:
    """The forward half in evaluation mode: no Dropout, BatchNorm by running statistics. The graph is not changed.

    A lowered graph is traced back to the form that ``keep_evaluation_form`` stored. Without one its own forward half
    serves, if no training-only operator can be in it.

    Raises:
        InputError: The graph was lowered without keeping the form, and draws random numbers or updates buffers.
    """
    stored = graph.model.metadata_props.get(METADATA_KEY)
    if stored is not None and (graph.stage in _LOWERED or "precision" in graph.signature.metadata or _is_fused(graph)):
        model = ir.from_proto(onnx.load_from_string(zlib.decompress(base64.b64decode(stored))))
        return TrainingGraph(model, values=graph.values)
    signature = graph.signature
    if graph.stage in _LOWERED and (
        any(b.update for b in signature.buffers) or any(s.kind == "random_key" for s in signature.states)
    ):
        raise InputError(
            "this graph was lowered without its evaluation form, and it trains with dropout or batch statistics",
            "use the graph before lowering, or call keep_evaluation_form(graph) before it is lowered",
        )
    form = graph.clone()
    g = form.graph
    for key in (METADATA_KEY, "ortgraph.plan", "ortgraph.budget"):
        form.model.metadata_props.pop(key, None)
    names = Names(g)
    for node in tuple(g):
        if node.op_type == "Dropout" and node.domain in ("", "ai.onnx", COMPOSITE):
            if node.domain != COMPOSITE and len(node.inputs) > 2:
                node.replace_input_with(2, None)  # why: a mask that is read is all true from here on
            replace_value(node.outputs[0], node.inputs[0])  # type: ignore[arg-type]
        elif node.op_type == "Attention" and node.domain == COMPOSITE:
            node.resize_inputs(min(len(node.inputs), 4))  # without Key and Step nothing is dropped
            for name in ("ratio", "node"):
                node.attributes.pop(name, None)
        elif uses_batch_statistics(node):
            _normalize_by_running_statistics(node, names)
    form.signature = _forward_signature(signature)
    _keep_outputs(g, {signature.loss, *signature.outputs})
    return form


def _is_fused(graph: TrainingGraph) -> bool:
    """Whether regions are kernels, which may hold dropout."""
    return any(function.domain == GENERATED for function in graph.model.functions.values())


def uses_batch_statistics(node: ir.Node) -> bool:
    """Whether a node normalizes by its batch in training, and by running statistics in evaluation."""
    if node.domain == COMPOSITE:
        # A layer that keeps no running statistics normalizes by its batch always: capture leaves their outputs out.
        return node.op_type == "BatchNorm" and any(o.name for o in node.outputs[1:3])
    if node.domain == CONTRIB:
        return node.op_type == "BatchNormInternal" and bool(node.attributes.get_int("training_mode", 1))
    return node.op_type == "BatchNormalization" and bool(node.attributes.get_int("training_mode", 0))


def _normalize_by_running_statistics(node: ir.Node, names: Names) -> None:
    build = Builder(node.graph, BY, before=node, origins=[node], names=names)  # type: ignore[arg-type]
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    statistics = kept_statistics(node)
    result = build.op("BatchNormalization", *node.inputs[:3], *statistics, epsilon=epsilon, name=node.name or "")
    take_type(result, node.outputs[0])
    replace_value(node.outputs[0], result)


def drawn(form: TrainingGraph) -> str | None:
    """The node of an evaluation form that draws from the random state, in words; None when none does.

    Only Dropout is known to be switched off in evaluation. What else draws (Dropout2d, AlphaDropout, noise that a
    module adds while it trains) is part of the form.
    """
    states = {s.input for s in form.signature.states if s.kind == "random_key"}
    key = next((v for v in form.graph.inputs if v.name in states), None)
    if key is None:
        return None
    reader = next((use.node for use in key.uses()), None)
    if reader is None:
        return str(key.name)
    at = [reader.metadata_props[k] for k in (MODULE_KEY, SOURCE_KEY) if k in reader.metadata_props]
    return f"{reader.op_type} {reader.name!r} ({', '.join(at)})" if at else f"{reader.op_type} {reader.name!r}"


def kept_statistics(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """Running mean and variance as they are before the step: where a layer is applied twice, the second application
    trains on what the first has updated."""
    found = []
    for i in (3, 4):
        value = node.inputs[i]
        while value is not None and (maker := value.producer()) is not None and uses_batch_statistics(maker):
            if value.index() != i - 2:
                break
            value = maker.inputs[i]
        found.append(value)
    return found[0], found[1]


def _forward_signature(s: Signature) -> Signature:
    return Signature(
        loss=s.loss,
        stage=s.stage,
        inputs=s.inputs,
        parameters=tuple(dataclasses.replace(p, trainable=False, gradient=None, update=None) for p in s.parameters),
        buffers=tuple(dataclasses.replace(b, update=None) for b in s.buffers),
        outputs=s.outputs,
        states=tuple(dataclasses.replace(x, output=None) for x in s.states if x.kind in ("random_key", "random_step")),
    )


def _keep_outputs(graph: ir.Graph, names: set[str]) -> None:
    """Drop all other outputs, and the nodes, inputs and constants that only those needed."""
    kept = [v for v in graph.outputs if v.name in names]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    needed = set(needed_nodes(graph, kept))
    graph.remove([n for n in graph if n not in needed], safe=True)
    for name, value in tuple(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
    signature_inputs = [v for v in graph.inputs if v.uses() or v.is_graph_output()]
    graph.inputs.clear()
    graph.inputs.extend(signature_inputs)


def keep_evaluation_form(graph: TrainingGraph) -> bool:
    """Store the evaluation form in the model's metadata, so that a lowered graph still evaluates and exports.

    Returns whether something was stored: not for a graph that is lowered already, or has the form.
    """
    if graph.stage in _LOWERED or METADATA_KEY in graph.model.metadata_props:
        return False
    proto = ir.to_proto(evaluation_form(graph).model)
    packed = base64.b64encode(zlib.compress(proto.SerializeToString(deterministic=True), 6)).decode()
    graph.model.metadata_props[METADATA_KEY] = packed
    return True


def export_inference(
    graph: TrainingGraph, values: Mapping[str, np.ndarray], path: str | os.PathLike[str]
) -> pathlib.Path:
    """Write a standard ONNX model that computes what ``module.eval()`` computes.

    Parameters and buffers become initializers under their original names, outputs keep their names; the loss and
    inputs that only it needs (labels) are left out. A model whose only output is its loss keeps that.

    Args:
        graph: At any stage (see ``evaluation_form``).
        values: Parameters and buffers by name.
        path: An .onnx file; beyond 2 GB the weights go into a file beside it.

    Raises:
        InputError: The path is no .onnx file in an existing folder, an operator has no standard form, or random numbers
            are drawn by anything but Dropout.
    """
    path = pathlib.Path(path)
    if path.suffix != ".onnx" or not path.absolute().parent.is_dir():
        raise InputError(
            f"{path}: an inference model is an .onnx file in an existing folder", f"{path.with_suffix('.onnx')}"
        )
    form = evaluation_form(graph)
    g = form.graph
    outputs = set(form.signature.outputs)
    if not outputs:
        logger.warning("the model has no output but its loss; the exported model computes the loss")
        outputs = {form.signature.loss}
    elif form.signature.loss in outputs and len(outputs) == 1:
        logger.info("the loss is the only output")
    _keep_outputs(g, outputs)
    if (drawing := drawn(form)) is not None:
        raise InputError(
            f"an output of the model depends on random numbers: {drawing}",
            "switch that layer off with module.eval() before capture; nn.Dropout itself is left out",
        )
    expand_composites(form, by=BY)
    for node in [n for n in g.all_nodes() if n.domain not in ("", "ai.onnx")]:
        if not can_expand(node):
            raise InputError(
                f"{node.domain}.{node.op_type} {node.name!r} has no form in standard operators",
                "export before lowering",
            )
        expand_node(node, by=BY)
    expand_composites(form, by=BY)
    for value in tuple(g.inputs):
        array = values.get(value.name or "")
        if array is not None:
            _make_initializer(g, value, array)
    _keep_outputs(g, outputs)
    for domain in [d for d in g.opset_imports if d not in ("", "ai.onnx")]:
        del g.opset_imports[domain]
    trim_inputs(g)
    form.model.metadata_props.clear()
    form.model.ir_version = min(form.model.ir_version, MAX_IR_VERSION)
    _write(form.model, path)
    return path


def _make_initializer(graph: ir.Graph, value: ir.Value, array: np.ndarray) -> None:
    graph.inputs.remove(value)
    value.const_value = ir.tensor(array.copy(order="C"), name=value.name)
    graph.register_initializer(value)


def _write(model: ir.Model, path: pathlib.Path) -> None:
    with writing(path), tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".ortgraph-") as folder:
        made = pathlib.Path(folder, path.name)
        large = (
            sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
            > 2**31 - 2**24
        )
        ir.save(model, made, external_data=f"{path.name}.data" if large else None)
        onnx.checker.check_model(str(made))
        for part in sorted(pathlib.Path(folder).iterdir(), reverse=True):
            os.replace(part, path.parent / part.name)
