"""Writing artifacts: back from a training graph to the form that ``onnxruntime.training.api`` runs."""

from __future__ import annotations

import os
import pathlib
import tempfile

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.capture.artifacts import (
    BUFFER,
    CHECKPOINT,
    DONE,
    EVALUATION,
    OPTIMIZER,
    RESET,
    TRAINING,
    OptimizerSpec,
    training_api,
)
from ortgraph.capture.onnx_joint import keep_outputs
from ortgraph.errors import UnsupportedError
from ortgraph.graph import Names, Signature, TrainingGraph, is_used, replace_value
from ortgraph.graph.edit import remove_node, trim_inputs
from ortgraph.graph.training_graph import METADATA_KEY
from ortgraph.graph.writing import writing
from ortgraph.ops.builder import Builder
from ortgraph.ops.expand import expand_composites, expand_node
from ortgraph.ops.spec import COMPOSITE, CONTRIB, KERNELS
from ortgraph.runtime.inference_export import kept_statistics, uses_batch_statistics
from ortgraph.runtime.prepare import CLEAN, run_passes

_IR_VERSION = 8  # of the small optimizer model; the runtime takes at most 10
_SIZED = ("MaxPoolGrad", "AveragePoolGrad")
_RANDOM = ("random_key", "random_step")


def write(graph: TrainingGraph, folder: pathlib.Path, optimizer: OptimizerSpec) -> None:
    """Write all four artifacts beside ``folder`` and move them into place in one step."""
    _check(graph)
    evaluation = evaluation_model(graph)
    training = training_model(graph)
    training_api()  # a clear error when the runtime is missing, before anything is written
    from onnxruntime.training.onnxblock.checkpoint_utils import save_checkpoint

    parameters = graph.signature.parameters
    trained = [_tensor(graph, p.name) for p in parameters if p.trainable]
    kept = [_tensor(graph, p.name) for p in parameters if not p.trainable]
    kept += [_tensor(graph, b.name) for b in graph.signature.buffers]
    with writing(folder), tempfile.TemporaryDirectory(dir=folder.parent, prefix=".ortgraph-") as temporary:
        made = pathlib.Path(temporary, "artifacts")
        made.mkdir()
        onnx.save_model(training, made / TRAINING)
        onnx.save_model(evaluation, made / EVALUATION)
        onnx.save_model(optimizer_model(optimizer), made / OPTIMIZER)
        save_checkpoint((trained, kept), made / CHECKPOINT)
        os.replace(made, folder)


def _check(graph: TrainingGraph) -> None:
    signature = graph.signature
    states = [s.name for s in signature.states if s.kind not in _RANDOM]
    if states or any(p.update for p in signature.parameters):
        raise UnsupportedError(
            f"a graph with an optimizer attached (states: {', '.join(states[:3])}) cannot become artifacts",
            "write them before attaching an optimizer: in artifacts it is a model of its own",
        )
    for node in graph.graph:
        if node.domain == KERNELS:
            raise UnsupportedError(
                f"node {node.name!r} ({node.op_type}) needs ortgraph's kernels, which the training API does not load",
                "write artifacts before lowering, or lower for onnxruntime-training",
            )


def _tensor(graph: TrainingGraph, name: str) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.asarray(graph.values[name], order="C"), name)


def training_model(graph: TrainingGraph) -> onnx.ModelProto:
    """``training_model.onnx``: data, parameters, buffers and the reset flag in; loss, outputs and flags out."""
    twin = graph.clone()
    signature, body = twin.signature, twin.graph
    names = Names(body)
    _expand_dropped_attention(twin, names)
    _runtime_dropouts(body, names)
    _runtime_batch_norms(body)
    _drop_states(twin)
    _seed_constant(body, signature.loss_gradient, names)
    _lower(twin)
    _divide_at_once(body, names)
    order = [signature.loss, *(n for n in signature.outputs if n != signature.loss)]
    outputs = {str(v.name): v for v in body.outputs}
    gradients = {p.name: outputs[p.gradient] for p in signature.parameters if p.gradient is not None}
    body.outputs[:] = [outputs[n] for n in order]
    reset = ir.Value(name=RESET, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    buffers = []
    for parameter, gradient in gradients.items():
        buffers.append(_accumulate(body, parameter, gradient, reset, names))
    _order_inputs(body, signature, *buffers, reset)
    keep_outputs(body, list(body.outputs))
    return _serialize(twin)


def _lower(twin: TrainingGraph) -> None:
    """Composites become the runtime's operators or standard ones, whichever is cheaper; what they share is made once."""
    del twin.model.metadata_props[METADATA_KEY]  # its roles no longer fit
    run_passes(twin, f"lower{{kernels=false}},{CLEAN}")
    left = next((n for n in twin.graph if _needs_sizes(n)), None)
    if left is not None:
        raise UnsupportedError(
            f"node {left.name!r} ({left.op_type}) needs the sizes of symbolic dimensions",
            "bind them before writing artifacts: optimize(graph, 'bind-shapes{sizes=batch:8}')",
        )


def _needs_sizes(node: ir.Node) -> bool:
    """A composite that waits for sizes, or a kernel that takes its result's sizes from the file (and dies of names)."""
    shape = node.outputs[0].shape
    return node.domain == COMPOSITE or (node.op_type in _SIZED and (shape is None or not shape.is_static()))


def _divide_at_once(body: ir.Graph, names: Names) -> None:
    """c * (1 / x) = c / x. ONNX Runtime 1.19.2 does this itself, and dies of it where c is a Cast."""
    for node in list(body):
        reader = _only_reader(node.outputs[0]) if node.op_type == "Div" and node.domain == "" else None
        if reader is None or (reader.domain, reader.op_type) != ("", "Mul") or not _is_one(node.inputs[0]):
            continue
        factor = next((v for v in reader.inputs if v is not node.outputs[0]), None)
        if factor is None:
            continue
        build = Builder(body, "write-artifacts", before=reader, origins=[reader], names=names)
        _replace(reader, (build.op("Div", factor, node.inputs[1]),))
        remove_node(node)


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _is_one(value: ir.Value | None) -> bool:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tensor is not None and tensor.size == 1 and len(tensor.shape) == 0 and float(tensor.numpy()) == 1.0


def _accumulate(body: ir.Graph, parameter: str, gradient: ir.Value, reset: ir.Value, names: Names) -> ir.Value:
    """Put the accumulator right behind its gradient. Returns the buffer input."""
    buffer = ir.Value(name=f"{parameter}{BUFFER}", type=gradient.type, shape=gradient.shape)
    done = ir.Value(name=f"{parameter}{DONE}", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    if not gradient.is_graph_output():
        gradient.name = f"{parameter}_grad"
    node = ir.Node(
        CONTRIB, "InPlaceAccumulatorV2", [buffer, gradient, reset], outputs=[done], name=names.fresh("accumulate")
    )
    producer = gradient.producer()
    if producer is None:
        body.append(node)
    else:
        body.insert_after(producer, node)
    body.opset_imports.setdefault(CONTRIB, 1)
    body.outputs.append(done)
    return buffer


def _seed_constant(body: ir.Graph, seed: str | None, names: Names) -> None:
    value = next((v for v in body.inputs if v.name == seed), None)
    if value is None:
        return
    one = ir.tensor(np.ones((), np.float32), name=names.fresh("loss_grad"))
    constant = ir.Value(name=one.name, type=ir.TensorType(one.dtype), shape=ir.Shape(()), const_value=one)
    body.register_initializer(constant)
    ir.convenience.replace_all_uses_with(value, constant)


def _drop_states(twin: TrainingGraph) -> None:
    """The random states: the runtime's Dropout keeps its own."""
    states = twin.signature.states
    inputs, outputs = {s.input for s in states}, {s.output for s in states}
    updates = {b.update for b in twin.signature.buffers}
    body = twin.graph
    body.outputs[:] = [v for v in body.outputs if v.name not in outputs and v.name not in updates]
    keep_outputs(body, list(body.outputs))
    for value in [v for v in body.inputs if v.name in inputs]:
        reader = next((use.node for use in value.uses()), None)
        if reader is not None:
            raise UnsupportedError(
                f"node {reader.name!r} ({reader.op_type}) draws random numbers that artifacts cannot carry",
                "only Dropout has a counterpart in onnxruntime.training.api",
            )
    body.inputs[:] = [v for v in body.inputs if v.name not in inputs]


def _expand_dropped_attention(twin: TrainingGraph, names: Names) -> None:
    """Attention with dropout in its parts: the runtime's Dropout keeps one mask for both halves."""
    drawing = [n for n in twin.graph if n.op_type in ("Attention", "AttentionGrad") and "node" in n.attributes]
    for node in drawing:
        expand_node(node, names, "write-artifacts")
    if not drawing:
        return
    run_passes(twin, CLEAN)
    numbers = [n.attributes.get_int("node", 0) for n in twin.graph if n.domain == COMPOSITE and n.op_type == "Dropout"]
    twice = sorted({n for n in numbers if numbers.count(n) > 1})
    if twice:
        raise UnsupportedError(
            f"the halves of attention with dropout {twice[0]} read different probabilities",
            "optimize without fuse-attention before writing artifacts",
        )


def _runtime_dropouts(body: ir.Graph, names: Names) -> None:
    for node in list(body):
        if node.domain != COMPOSITE or node.op_type not in ("Dropout", "DropoutGrad"):
            continue
        build = Builder(body, "write-artifacts", before=node, origins=[node], names=names)
        ratio = build.const(np.float32(node.attributes.get_float("ratio")))
        on = build.const(np.array(True))
        if node.op_type == "Dropout":
            made = build.multi("Dropout", node.inputs[0], ratio, on, outputs=2)
        else:
            made = build.multi("DropoutGrad", *node.inputs[:2], ratio, on, outputs=1, domain=CONTRIB)
        _replace(node, made)


def _runtime_batch_norms(body: ir.Graph) -> None:
    """BatchNormInternal updates the running statistics in place, as the runtime's own artifacts do."""
    for node in body:
        if node.domain != COMPOSITE or node.op_type not in ("BatchNorm", "BatchNormGrad"):
            continue
        node.domain = CONTRIB
        body.opset_imports.setdefault(CONTRIB, 1)
        if node.op_type == "BatchNormGrad":
            node.op_type = "BatchNormalizationGrad"
            forward = node.inputs[3].producer() if node.inputs[3] is not None else None
            epsilon = 1e-5 if forward is None else forward.attributes.get_float("epsilon", 1e-5)
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)
            continue
        node.op_type = "BatchNormInternal"
        momentum = round(1.0 - float(str(np.float32(node.attributes.get_float("momentum", 0.1)))), 7)
        node.attributes["momentum"] = ir.AttrFloat32("momentum", momentum)
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)


def _replace(node: ir.Node, made: tuple[ir.Value, ...]) -> None:
    for old, new in zip(node.outputs, made, strict=False):
        new.type, new.shape = old.type or new.type, old.shape or new.shape
        if is_used(old):
            replace_value(old, new)
    remove_node(node)


def evaluation_model(graph: TrainingGraph) -> onnx.ModelProto:
    """``eval_model.onnx``: the forward half in evaluation mode."""
    twin = graph.clone()
    signature, body = twin.signature, twin.graph
    wanted = [signature.loss, *(n for n in signature.outputs if n != signature.loss)]
    outputs = {str(v.name): v for v in body.outputs}
    body.outputs[:] = [outputs[n] for n in wanted]
    keep_outputs(body, list(body.outputs))
    names = Names(body)
    for node in list(body):
        _evaluation_form(body, node, names)
    expand_composites(twin)
    _divide_at_once(body, names)
    keep_outputs(body, list(body.outputs))
    _order_inputs(body, signature)
    return _serialize(twin)


def _order_inputs(body: ir.Graph, signature: Signature, *more: ir.Value) -> None:
    """Data, parameters, buffers: the training API feeds parameters to both models by position, not by name."""
    inputs = {str(v.name): v for v in body.inputs}
    names = (*signature.inputs, *(p.name for p in signature.parameters), *(b.name for b in signature.buffers))
    body.inputs[:] = [*(inputs[n] for n in names), *more]


def _evaluation_form(body: ir.Graph, node: ir.Node, names: Names) -> None:
    build = Builder(body, "write-artifacts", before=node, origins=[node], names=names)
    if node.op_type == "Dropout":
        if len(node.outputs) > 1 and is_used(node.outputs[1]):
            raise UnsupportedError(f"node {node.name!r}: the mask of Dropout is a model output", "drop that output")
        _replace(node, (build.op("Identity", node.inputs[0]),))
    elif uses_batch_statistics(node):
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        made = build.op("BatchNormalization", *node.inputs[:3], *kept_statistics(node), epsilon=epsilon)
        replace_value(node.outputs[0], made)  # the node goes with its last reader, a later use of the statistics


def _serialize(graph: TrainingGraph) -> onnx.ModelProto:
    trim_inputs(graph.graph)
    graph.model.metadata_props.clear()
    graph.graph.opset_imports.pop(COMPOSITE, None)
    return ir.serde.serialize_model(graph.model)


def optimizer_model(spec: OptimizerSpec) -> onnx.ModelProto:
    """``optimizer_model.onnx``, at an IR version that the runtime takes."""
    sequences = ["params", "gradients", "first_order_moments"]
    attributes = dict(spec.attributes)
    if spec.kind == "AdamWOptimizer":
        sequences.append("second_order_moments")
        defaults = {
            "alpha": 0.9,
            "beta": 0.999,
            "epsilon": 1e-8,
            "weight_decay": 0.01,
            "correct_bias": 1,
            "adam_mode": 0,
        }
        attributes = {**defaults, **attributes}
        read = ["learning_rate", "step", *sequences]
    elif spec.kind == "SGDOptimizerV2":
        read = ["learning_rate", "params", "gradients"]
    else:
        raise UnsupportedError(f"artifacts have no optimizer {spec.kind!r}", "AdamWOptimizer or SGDOptimizerV2")
    node = onnx.helper.make_node(spec.kind, read, ["updated"], name="optimizer", domain=CONTRIB, **attributes)
    inputs = [
        onnx.helper.make_tensor_value_info("learning_rate", onnx.TensorProto.FLOAT, [1]),
        onnx.helper.make_tensor_value_info("step", onnx.TensorProto.INT64, [1]),
        *(onnx.helper.make_tensor_sequence_value_info(n, onnx.TensorProto.FLOAT, None) for n in sequences),
    ]
    output = onnx.helper.make_tensor_value_info("updated", onnx.TensorProto.BOOL, [1])
    body = onnx.helper.make_graph([node], "optimizer", inputs, [output])
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(CONTRIB, 1)]
    return onnx.helper.make_model(body, ir_version=_IR_VERSION, opset_imports=imports)
