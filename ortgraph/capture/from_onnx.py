"""from_onnx: a training graph from an ONNX forward model."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.capture import legalize
from ortgraph.capture.onnx_joint import Joint, append_backward
from ortgraph.capture.onnx_loss import LossFunction, append_loss
from ortgraph.capture.onnx_read import infer_missing, read_model
from ortgraph.capture.onnx_roles import Roles, assign_roles
from ortgraph.capture.onnx_seed import seed_input
from ortgraph.capture.onnx_shapes import record_symbolic_shapes
from ortgraph.errors import CaptureError
from ortgraph.graph import Buffer, Names, Parameter, Signature, TrainingGraph, stamp
from ortgraph.graph.edit import PHASE_KEY
from ortgraph.ops.builder import Builder
from ortgraph.ops.infer import infer_node

logger = logging.getLogger(__name__)


def from_onnx(
    source: str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model,
    loss: str | LossFunction | None = None,
    trainable: Sequence[str] | None = None,
    *,
    output: str | None = None,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    opset: int | None = None,
    train_batch_norm: bool = True,
) -> TrainingGraph:
    """Build the joint forward and backward graph of an ONNX forward model.

    Args:
        source: Path of an ``.onnx`` file, its bytes, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; never changed.
        loss: ``cross_entropy`` (adds an int64 input ``labels``; classes on axis 1, targets of -100 are ignored),
            ``mse``, ``l1``, ``bce_with_logits`` (each adds an input ``targets``), the name of a scalar output, or a
            function ``loss(build, outputs, add_input) -> value``. None: the model's only scalar output.
        trainable: Names or fnmatch patterns of the weights to train. None trains every float weight. Integers,
            shape constants and running statistics are never trained; single numbers that scale something and
            masks (values of 1e9 and beyond) only under their full names.
        output: Output that a named loss reads, when the model has several float outputs.
        shapes: Dimensions of inputs by name, to fix or to name them: ``{"x": ("batch", 3, 32, 32)}``.
        opset: Opset of the graph, 18 to 21. None keeps the model's own when it is one of these, else the nearest.
        train_batch_norm: BatchNormalization uses batch statistics and updates the running ones, as PyTorch does in
            train mode. False: running statistics are used and stay as they are.

    Returns:
        A graph at stage ``captured``. Parameters keep their names; the gradient of ``p`` is output ``p.grad``.

    Raises:
        InputError: A file, a name or an option cannot be used.
        UnsupportedError: An operator on the path from a weight to the loss has no gradient; names the node.
        CaptureError: There is no scalar loss, or nothing to train.
    """
    model = read_model(source)
    model, originals = legalize.normalize(model, opset, shapes or {})
    graph = model.graph
    outputs = [str(v.name) for v in graph.outputs]
    roles = assign_roles(graph, trainable, originals)
    names = Names(graph)
    gradient_names = {name: names.fresh(f"{name}.grad") for name in roles.trainable}
    loss_value = append_loss(graph, loss, output, names)
    if loss_value not in graph.outputs:
        graph.outputs.append(loss_value)
    legal = legalize.legalize(model, loss_value, roles, names, train_batch_norm)
    loss_value = legal.loss
    roles = _reaching(roles, legal.reaching)
    target = _float_scalar(graph, loss_value, names)
    for node in graph:
        node.metadata_props.setdefault(PHASE_KEY, "forward")
    joint = append_backward(model, target, roles.trainable, names, legal.cut)
    gradients = _gradient_outputs(graph, joint, {n: gradient_names[n] for n in roles.trainable})
    legal.finish(joint)
    data = [str(v.name) for v in graph.inputs if v.name not in {s.input for s in legal.states}]
    weights = _parameters_to_inputs(graph, roles)
    seed = seed_input(graph, joint.seed)
    infer_missing(graph)
    _check_shapes(graph, gradients)
    record_symbolic_shapes(model)
    values = {**weights, **{s.input: np.zeros((), np.int64) for s in legal.states}}
    signature = Signature(
        loss=str(loss_value.name),
        inputs=tuple(data),
        parameters=tuple(Parameter(n, n in gradients, gradients.get(n)) for n in weights if n not in roles.buffers),
        buffers=tuple(Buffer(n, legal.buffer_updates.get(n)) for n in weights if n in roles.buffers),
        outputs=tuple(n for n in outputs if n != loss_value.name),
        loss_gradient=seed,
        states=tuple(legal.states),
        first_backward=next(n.name for n in graph if n.metadata_props.get(PHASE_KEY) == "backward"),
        metadata={"source": "onnx", "loss": loss if isinstance(loss, str) else str(loss_value.name)},
    )
    return TrainingGraph(model, signature, values)


def _float_scalar(graph: ir.Graph, loss: ir.Value, names: Names) -> ir.Value:
    """The loss as a float32 scalar, the only form that the gradient builder takes."""
    build = Builder(graph, "from-onnx", names=names)
    if loss.dtype != ir.DataType.FLOAT:
        loss = build.op("Cast", loss, to=ir.DataType.FLOAT)
    if loss.shape is None or len(loss.shape):
        loss = build.op("Reshape", loss, build.const(np.zeros(0, np.int64)))
    return loss


def _reaching(roles: Roles, reaching: set[str]) -> Roles:
    """Freeze the weights that no gradient reaches."""
    lost = [n for n in roles.trainable if n not in reaching]
    for name in lost:
        warnings.warn(f"no gradient reaches {name}: the loss does not depend on it, it is not trained", stacklevel=4)
    kept = tuple(n for n in roles.trainable if n in reaching)
    if not kept:
        raise CaptureError(
            "nothing to train: no float weight has a path of differentiable operators to the loss",
            "check loss= and trainable=; weights must be initializers of the model",
        )
    return Roles(kept, (*roles.frozen, *lost), roles.buffers)


def _parameters_to_inputs(graph: ir.Graph, roles: Roles) -> dict[str, np.ndarray]:
    """Turn weights and buffers into graph inputs without initializer; their values by name, in graph order."""
    wanted = {*roles.trainable, *roles.frozen, *roles.buffers}
    values: dict[str, np.ndarray] = {}
    for name, value in list(graph.initializers.items()):
        if name not in wanted:
            continue
        assert value.const_value is not None
        values[name] = np.array(value.const_value.numpy())
        value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(value.const_value.shape.numpy())
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
    return values


def _gradient_outputs(graph: ir.Graph, joint: Joint, wanted: Mapping[str, str]) -> dict[str, str]:
    """Make each gradient a graph output called ``<parameter>.grad``."""
    result: dict[str, str] = {}
    taken: set[ir.Value] = set()
    for name, gradient in wanted.items():
        value = joint.gradients[name]
        if value in taken or value.is_graph_output() or value.producer() is None:
            node = ir.node("Identity", [value], name=f"{gradient}.identity")
            stamp(node, "from-onnx")
            graph.append(node)
            value = node.outputs[0]
        value.name = result[name] = gradient
        value.type, value.shape = graph.initializers[name].type, graph.initializers[name].shape
        taken.add(value)
        graph.outputs.append(value)
    return result


def _check_shapes(graph: ir.Graph, gradients: Mapping[str, str]) -> None:
    """Raise CaptureError when a gradient, by what its producer makes, has not its parameter's dtype and shape."""
    values = {str(v.name): v for v in (*graph.inputs, *graph.outputs)}
    for name, output in gradients.items():
        parameter, producer = values[name], values[output].producer()
        assert producer is not None and parameter.shape is not None
        kept = [(v.type, v.shape) for v in producer.outputs]
        values[output].shape = None
        infer_node(producer, graph.opset_imports)
        dtype, shape = values[output].dtype, values[output].shape
        for value, (type_, known) in zip(producer.outputs, kept, strict=True):
            value.type, value.shape = type_, known
        if shape is None:
            continue
        fits = len(shape) == len(parameter.shape) and all(
            a == b or not isinstance(a, int) for a, b in zip(shape, parameter.shape, strict=True)
        )
        if not fits or dtype != parameter.dtype:
            raise CaptureError(
                f"the gradient of parameter {name!r} is {dtype}{list(shape)}, the parameter "
                f"{parameter.dtype}{list(parameter.shape)} (node {producer.name!r}, {producer.op_type})",
                "leave the weight out of trainable=, and report the operator that reads it",
            )
