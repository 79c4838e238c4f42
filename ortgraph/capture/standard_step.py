"""A training step in standard ONNX operators, with its weights and a driver: what a device with stock ONNX Runtime trains.

One folder: ``train_step.onnx`` (batch, parameters, buffers, states, learning rate in; loss and their next values out),
``evaluate.onnx`` (batch and parameters in; loss and outputs out), ``weights.npz``, ``manifest.json`` (who is who) and
``driver.py``, which needs numpy and onnxruntime only.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.analysis.bind_shapes import is_dynamic
from ortgraph.capture.artifacts_write import evaluation_model
from ortgraph.capture.onnx_joint import keep_outputs
from ortgraph.errors import InputError, UnsupportedError
from ortgraph.graph import Names, TrainingGraph
from ortgraph.graph.writing import writing
from ortgraph.manager import registry
from ortgraph.manager.optimize import optimize
from ortgraph.manager.pipeline_text import parse_pipeline
from ortgraph.ops.expand import can_expand, expand_node
from ortgraph.plan.footprint import footprint
from ortgraph.plan.memory.placement import METADATA_KEY as PLAN
from ortgraph.runtime.prepare import CLEAN

FORMAT = 1
STEP, EVALUATE, WEIGHTS, MANIFEST, DRIVER = (
    "train_step.onnx", "evaluate.onnx", "weights.npz", "manifest.json", "driver.py",
)  # fmt: skip
_IR_VERSION, _STANDARD = 10, ("", "ai.onnx")


def write_standard(
    graph: TrainingGraph,
    folder: str | os.PathLike[str],
    optimizer: Any,
    *,
    shapes: Mapping[str, int] | None = None,
    memory_budget: str | None = None,
) -> dict[str, Any]:
    """Write the folder, atomically.

    Args:
        graph: Before an optimizer is attached (stages captured, optimized).
        folder: Must not exist, or be empty: nothing is ever overwritten.
        optimizer: Of ``ortgraph.optim``.
        shapes: Size by name of symbolic dimensions; those left symbolic stay so.
        memory_budget: For live intermediates, as of ``select-recompute``; needs every size.

    Returns:
        The manifest.

    Raises:
        InputError: The folder is not empty, or a budget meets symbolic sizes.
        UnsupportedError: An operator has no standard form, or none while sizes are symbolic.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: exists and is not an empty folder", "give a new folder: nothing is overwritten")
    step = _standard_graph(graph, optimizer, shapes or {}, memory_budget)
    manifest = _manifest(step)
    values = {n: np.asarray(step.values[n], order="C") for n in (*manifest["parameters"], *manifest["buffers"])}
    evaluation = evaluation_model(graph)
    _require_standard({n.domain or "": n for n in ir.from_proto(evaluation).graph})
    model = _stripped(step, manifest)
    with writing(folder), tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=".ortgraph-") as temporary:
        made = pathlib.Path(temporary, "step")
        made.mkdir()
        for name, proto in ((STEP, model), (EVALUATE, evaluation)):
            proto.ir_version = min(proto.ir_version, _IR_VERSION)
            onnx.checker.check_model(proto)
            onnx.save_model(proto, made / name)
        np.savez(made / WEIGHTS, **values)  # type: ignore[arg-type]
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        shutil.copyfile(pathlib.Path(__file__).parent.parent / "runtime" / "on_device.py", made / DRIVER)
        os.replace(made, folder)
    return manifest


def _standard_graph(
    graph: TrainingGraph, optimizer: Any, shapes: Mapping[str, int], budget: str | None
) -> TrainingGraph:
    """The step, lowered to standard operators and in the order that needs the least memory."""
    preset = registry.preset("O2", optimizer=optimizer, target="onnxruntime", shapes=shapes, accumulation_steps=1)
    cut = next(i for i, p in enumerate(preset) if getattr(p, "name", "") == "attach-optimizer")
    lower = registry.get("lower")(target="onnxruntime", prefer="expansion", kernels=False)  # type: ignore[call-arg]
    ready = optimize(graph, (*preset[: cut + 1], lower), target="onnxruntime").graph.clone()
    names = Names(ready.graph)
    for node in [n for n in ready.graph.all_nodes() if n.domain not in _STANDARD]:
        if can_expand(node):
            expand_node(node, names, "standard-step")
    _require_standard({n.domain or "": n for n in ready.graph.all_nodes()})
    if budget is not None and is_dynamic(ready):
        raise InputError(
            "a memory budget needs the size of every dimension", "--shapes batch=8, or shapes={'batch': 8}"
        )
    tail = f"{CLEAN},simplify-reshapes,simplify-transposes,eliminate-common-subexpressions,eliminate-dead-code"
    plan = f"select-recompute{{budget={budget}}},plan-memory{{keep_order=true}}" if budget else "plan-memory"
    return optimize(ready, tuple(parse_pipeline(f"{tail},{plan}")), target="onnxruntime").graph


def _require_standard(by_domain: Mapping[str, ir.Node]) -> None:
    """Refuse any operator outside the ONNX domain."""
    for domain, node in by_domain.items():
        if domain not in _STANDARD:
            raise UnsupportedError(
                f"node {node.name!r} ({domain}.{node.op_type}) has no form in standard operators, or none while sizes "
                "are symbolic",
                "give the sizes: --shapes batch=8; or write artifacts for onnxruntime.training.api",
            )


def _manifest(step: TrainingGraph) -> dict[str, Any]:
    """Names of inputs and outputs by role, first values of states, and the memory of a step where it is known."""
    signature, inputs = step.signature, {str(v.name): v for v in step.graph.inputs}
    states = {}
    for state in signature.states:
        value = inputs[state.input]
        assert value.dtype is not None and value.shape is not None
        first = step.values.get(state.input)
        states[state.name] = {
            "input": state.input,
            "output": state.output,
            "dtype": value.dtype.numpy().name,
            "shape": [int(d) for d in value.shape],  # type: ignore[arg-type]
            "initial": float(state.initial) if first is None else np.asarray(first).tolist(),
            "random_key": state.kind == "random_key",
        }
    return {
        "format": FORMAT,
        "loss": signature.loss,
        "inputs": {n: {"dtype": _dtype(inputs[n]), "shape": _shape(inputs[n])} for n in signature.inputs},
        "outputs": [n for n in signature.outputs if n != signature.loss],
        "parameters": {p.name: p.update for p in signature.parameters},
        "buffers": {b.name: b.update for b in signature.buffers},
        "states": states,
        "learning_rate": signature.scalars["learning_rate"],
        "optimizer": signature.metadata.get("optimizer", ""),
        "memory": _memory(step),
    }


def _dtype(value: ir.Value) -> str:
    assert value.dtype is not None
    return value.dtype.numpy().name


def _shape(value: ir.Value) -> list[int | str]:
    return [d if isinstance(d, int) else str(d) for d in value.shape or ()]


def _memory(step: TrainingGraph) -> dict[str, int] | None:
    """Bytes of a step: intermediates, and what is passed in; parameters and states exist twice during a step."""
    plan = step.model.metadata_props.get(PLAN)
    if plan is None or is_dynamic(step):
        return None
    outside = footprint(step)
    return {
        "intermediates": int(json.loads(plan)["arena_bytes"]),
        "parameters": outside.parameters,
        "states": outside.states,
        "batch": outside.batch,
        "constants": outside.constants,
    }


def _stripped(step: TrainingGraph, manifest: Mapping[str, Any]) -> onnx.ModelProto:
    """The graph with the outputs of a step only, its seed a constant, without metadata. The order of nodes stays."""
    twin = step.clone()
    signature, graph = twin.signature, twin.graph
    seed = next((v for v in graph.inputs if v.name == signature.loss_gradient), None)
    if seed is not None:
        graph.inputs.remove(seed)
        seed.const_value = ir.tensor(np.ones((), np.float32), name=seed.name)
        graph.register_initializer(seed)
    made = [*manifest["parameters"].values(), *manifest["buffers"].values()]
    made += [s["output"] for s in manifest["states"].values()]
    outputs = {str(v.name): v for v in graph.outputs}
    graph.outputs[:] = [outputs[n] for n in dict.fromkeys((signature.loss, *made)) if n is not None]
    keep_outputs(graph, list(graph.outputs))
    graph.inputs[:] = [v for v in graph.inputs if v.uses() or v.is_graph_output()]
    for domain in [d for d in graph.opset_imports if d not in _STANDARD]:
        del graph.opset_imports[domain]
    twin.model.metadata_props.clear()
    for node in graph:
        node.metadata_props.clear()
    return ir.serde.serialize_model(twin.model)
