"""ONNX Runtime's on-device training artifacts: a folder in, a training graph out, and back.

The name contract of ``onnxruntime.training.api``: a parameter ``p`` of the checkpoint is an input of
``training_model.onnx``; its gradient is summed by an InPlaceAccumulatorV2 into the input
``p_grad.accumulation.buffer`` and reported as ``p_grad.accumulation.out``; the bool ``lazy_reset_grad`` makes the
accumulator overwrite; every other input is data; the first output is the loss.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.capture.legalize_embedding import finish_embeddings
from ortgraph.capture.legalize_versions import convert_opset
from ortgraph.capture.onnx_joint import Joint
from ortgraph.capture.onnx_read import infer_missing, name_dimensions, name_nodes
from ortgraph.capture.onnx_seed import seed_input
from ortgraph.capture.onnx_shapes import record_symbolic_shapes
from ortgraph.errors import InputError, RuntimeSetupError, SignatureError
from ortgraph.graph import Buffer, Names, Parameter, Signature, TrainingGraph
from ortgraph.graph.edit import PHASE_KEY, remove_node

TRAINING, EVALUATION, OPTIMIZER, CHECKPOINT = (
    "training_model.onnx",
    "eval_model.onnx",
    "optimizer_model.onnx",
    "checkpoint",
)
BUFFER, DONE, RESET = "_grad.accumulation.buffer", "_grad.accumulation.out", "lazy_reset_grad"
METADATA_KEY = "ort_optimizer"


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer of an artifact folder.

    Attributes:
        kind: ``AdamWOptimizer`` or ``SGDOptimizerV2``.
        attributes: The node's attributes (alpha, beta, epsilon, weight_decay, correct_bias, adam_mode).
    """

    kind: str = "AdamWOptimizer"
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "attributes": dict(self.attributes)}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> OptimizerSpec:
        return OptimizerSpec(**json.loads(text))


def read_artifacts(folder: str | os.PathLike[str]) -> TrainingGraph:
    """The training graph of an artifact folder (``training_model.onnx``, ``checkpoint``, ``optimizer_model.onnx``).

    Gradients lose their accumulators and become outputs ``<parameter>.grad``; the constant seed of the backward half
    becomes the input ``loss_gradient``. Running statistics, which the runtime's BatchNormInternal overwrites in place,
    become buffers with an output ``<name>.update``. The optimizer's kind and settings are kept in the signature's
    metadata. The folder is never written to.

    Raises:
        InputError: A file is missing or is no ONNX Runtime artifact.
        RuntimeSetupError: onnxruntime-training is not installed (it alone reads checkpoints).
    """
    folder = pathlib.Path(folder)
    model = _load(folder / TRAINING)
    values, trainable = _read_checkpoint(folder / CHECKPOINT)
    model = convert_opset(model, None)
    graph = model.graph
    name_dimensions(graph, {})
    name_nodes(graph)
    used = {n.domain for n in graph.all_nodes()}
    for domain in [d for d in graph.opset_imports if d and d not in used]:
        del graph.opset_imports[domain]
    names = Names(graph)
    missing = sorted(set(values) - {str(v.name) for v in graph.inputs})
    if missing:
        raise InputError(
            f"{folder}: the checkpoint's {missing[0]!r} is no input of {TRAINING}", "make the artifacts again"
        )
    gradients = _take_accumulators(graph, names, folder)
    lost = sorted(set(trainable) - set(gradients))
    if lost:
        raise InputError(f"{folder}: trainable parameter {lost[0]!r} has no accumulator", "make the artifacts again")
    loss = str(graph.outputs[0].name)
    outputs = tuple(str(v.name) for v in graph.outputs if v.name != loss and v.name not in gradients.values())
    updates = _running_statistics(graph, values.keys() - gradients.keys(), names)
    seed = _seed(graph, loss, names, folder)
    _mark_phases(graph)
    finish_embeddings(graph, names)(Joint({}, graph.outputs[0], tuple(graph)))
    infer_missing(graph)
    record_symbolic_shapes(model)
    parameter_names = [str(v.name) for v in graph.inputs if v.name in values]
    optimizer = _read_optimizer(folder / OPTIMIZER)
    metadata = {"source": "onnxruntime artifacts", **({METADATA_KEY: optimizer.to_json()} if optimizer else {})}
    signature = Signature(
        loss=loss,
        inputs=tuple(str(v.name) for v in graph.inputs if v.name not in values and v.name != seed),
        parameters=tuple(Parameter(n, n in gradients, gradients.get(n)) for n in parameter_names if n not in updates),
        buffers=tuple(Buffer(n, updates[n]) for n in parameter_names if n in updates),
        outputs=outputs,
        loss_gradient=seed,
        first_backward=next((n.name for n in graph if n.metadata_props.get(PHASE_KEY) == "backward"), None),
        metadata=metadata,
    )
    return TrainingGraph(model, signature, {n: values[n] for n in parameter_names})


def _load(path: pathlib.Path) -> ir.Model:
    if not path.is_file():
        raise InputError(f"{path}: no such file", "give the folder that generate_artifacts wrote")
    try:
        return ir.from_proto(onnx.load_model(path))
    except Exception as error:  # noqa: BLE001 - protobuf raises many types, each means "not ONNX"
        raise InputError(f"{path}: not a readable ONNX model ({error})", "make the artifacts again") from error


def training_api() -> Any:
    """``onnxruntime.training.api``."""
    try:
        from onnxruntime.training import api
    except ImportError as error:
        raise RuntimeSetupError(
            f"on-device artifacts need onnxruntime-training 1.19.2 ({error})", 'pip install "ortgraph[cpu]"'
        ) from error
    return api


def _read_checkpoint(path: pathlib.Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Values by name, and the names of the trainable ones."""
    if not path.exists():
        raise InputError(f"{path}: no such checkpoint", "give the folder that generate_artifacts wrote")
    api = training_api()
    try:
        state = api.CheckpointState.load_checkpoint(path)
        found = {name: parameter for name, parameter in state.parameters}
        return {n: np.array(p.data) for n, p in found.items()}, [n for n, p in found.items() if p.requires_grad]
    except RuntimeError as error:
        raise InputError(f"{path}: not a readable checkpoint ({error})", "make the artifacts again") from error


def _take_accumulators(graph: ir.Graph, names: Names, folder: pathlib.Path) -> dict[str, str]:
    """Remove the accumulators; make each gradient a graph output ``<parameter>.grad``. Returns these by parameter."""
    gradients: dict[str, str] = {}
    dropped: set[ir.Value] = set()
    for node in [n for n in graph if n.op_type == "InPlaceAccumulatorV2"]:
        buffer, gradient = node.inputs[0], node.inputs[1]
        if buffer is None or gradient is None or not str(buffer.name).endswith(BUFFER):
            raise InputError(
                f"{folder}: accumulator {node.name!r} breaks the name contract", "make the artifacts again"
            )
        parameter = str(buffer.name).removesuffix(BUFFER)
        dropped.update(v for i, v in enumerate(node.inputs) if i != 1 and v is not None)
        outputs = set(node.outputs)
        graph.outputs[:] = [v for v in graph.outputs if v not in outputs]
        remove_node(node)
        if gradient.producer() is None or gradient.is_graph_output():
            copy = ir.node("Identity", [gradient], name=names.fresh("identity"))
            copy.outputs[0].type, copy.outputs[0].shape = gradient.type, gradient.shape
            graph.append(copy)
            gradient = copy.outputs[0]
        gradient.name = gradients[parameter] = names.fresh(f"{parameter}.grad")
        graph.outputs.append(gradient)
    if not gradients:
        raise InputError(
            f"{folder / TRAINING}: no gradient accumulator, so no training artifact", "give another folder"
        )
    graph.inputs[:] = [v for v in graph.inputs if v not in dropped]
    return gradients


def _running_statistics(graph: ir.Graph, fixed: Set[str], names: Names) -> dict[str, str]:
    """Make the new running statistics graph outputs. Returns these by statistic.

    The runtime's kernel writes them over its inputs, so of several nodes that share one each reads what the one before
    it left. Where the new value is not named in the file the kernel keeps it to itself: it is named here.
    """
    latest: dict[str, ir.Value] = {}
    for node in graph:
        if node.op_type != "BatchNormInternal" or not node.attributes.get_int("training_mode", 1):
            continue
        for i in (3, 4):
            statistic = node.inputs[i]
            name = "" if statistic is None else str(statistic.name)
            if statistic is None or name not in fixed or not statistic.is_graph_input():
                continue
            new = node.outputs[i - 2]
            if not new.name:
                new.name = names.fresh(f"{name}.new")
            new.type, new.shape = statistic.type, statistic.shape
            if name in latest:
                node.replace_input_with(i, latest[name])
            latest[name] = new
    for name, value in latest.items():
        value.name = names.fresh(f"{name}.update")
        graph.outputs.append(value)
    return {name: str(value.name) for name, value in latest.items()}


def _seed(graph: ir.Graph, loss: str, names: Names, folder: pathlib.Path) -> str:
    constant = graph.initializers.get(f"{loss}_grad")
    if constant is None:
        raise SignatureError(
            f"{folder / TRAINING}: the seed {loss}_grad of the backward half is missing", "make it again"
        )
    seed = ir.Value(name=names.fresh("loss_gradient"), type=constant.type, shape=constant.shape)
    ir.convenience.replace_all_uses_with(constant, seed)
    del graph.initializers[f"{loss}_grad"]
    return seed_input(graph, seed)


def _mark_phases(graph: ir.Graph) -> None:
    """What depends on the seed is the backward half."""
    backward: set[ir.Value] = {v for v in graph.inputs if str(v.name).startswith("loss_gradient")}
    for node in graph:
        late = any(v in backward for v in node.inputs if v is not None) or "_Grad/" in (node.name or "")
        node.metadata_props[PHASE_KEY] = "backward" if late else "forward"
        if late:
            backward.update(node.outputs)


def _read_optimizer(path: pathlib.Path) -> OptimizerSpec | None:
    if not path.is_file():
        return None
    proto = onnx.load_model(path)
    for node in proto.graph.node:
        if node.op_type in ("AdamWOptimizer", "SGDOptimizerV2"):
            return OptimizerSpec(node.op_type, {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute})
    raise InputError(f"{path}: neither AdamWOptimizer nor SGDOptimizerV2", "make the artifacts again")


def write_artifacts(
    graph: TrainingGraph, folder: str | os.PathLike[str], optimizer: OptimizerSpec | None = None
) -> pathlib.Path:
    """Write an artifact folder that ``onnxruntime.training.api`` trains, atomically.

    Composites are lowered to the runtime's own operators or to standard ones, whichever is cheaper; Dropout and
    BatchNorm always become the runtime's training operators (its Dropout draws from a hidden generator).

    Args:
        graph: Before an optimizer is attached (stages captured, optimized, cast).
        folder: Must not exist, or be empty: nothing is ever overwritten.
        optimizer: None: the one that the graph was read with, else AdamW with PyTorch's defaults.

    Raises:
        InputError: The folder is not empty.
        UnsupportedError: The graph holds states or operators that artifacts cannot carry.
    """
    from ortgraph.capture.artifacts_write import write

    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: exists and is not an empty folder", "give a new folder: nothing is overwritten")
    if not folder.parent.is_dir():
        raise InputError(f"{folder.parent}: no such folder", "make the folder first")
    kept = graph.signature.metadata.get(METADATA_KEY)
    spec = optimizer or (OptimizerSpec.from_json(kept) if kept else OptimizerSpec())
    write(graph, folder, spec)
    return folder
