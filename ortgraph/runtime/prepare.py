"""From a graph of any stage to one that a runtime takes: dimensions bound, composites lowered, shapes folded."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from ortgraph.analysis.bind_shapes import bind_shapes, infer_unknown, is_dynamic
from ortgraph.errors import PipelineSyntaxError
from ortgraph.graph import TrainingGraph
from ortgraph.ops import generated
from ortgraph.ops.expand import can_expand
from ortgraph.ops.spec import COMPOSITE, GENERATED
from ortgraph.ops.targets import reason_not_run
from ortgraph.runtime.limits import refuse_single_values

logger = logging.getLogger(__name__)
_LOWERED = ("lowered", "planned")
RECOMPUTE = "select-recompute"
FOLD = "fold-shapes,fold-constants"
# Lowering expands each composite for itself; what they have in common (scalars of every update) is computed once.
CLEAN = "fold-shapes,fold-constants,eliminate-common-subexpressions,eliminate-identity,eliminate-dead-code"


def prepare(graph: TrainingGraph, dims: Mapping[str, int], target: str) -> TrainingGraph:
    """A lowered graph with static shapes where shapes do not depend on data. The graph given is not changed.

    Args:
        graph: At any stage.
        dims: Size by name of every symbolic dimension.
        target: ``onnxruntime-training`` or ``onnxruntime``.

    Raises:
        BatchError: The batch statistics of a norm would be of one value.
    """
    lowered = graph.stage in _LOWERED
    dynamic = is_dynamic(graph)
    if lowered and not dynamic and not _lost(graph):
        return lift_constants(graph.clone()) if _has_constants(graph) else graph
    ready = graph.clone()
    if dynamic:
        bind_shapes(ready, dims)
        run_passes(ready, FOLD)
        if infer_unknown(ready):
            run_passes(ready, FOLD)
        refuse_single_values(ready.graph)
    tail = recorded_tail(graph)
    if lost := _lost(ready):
        logger.warning("fused regions run as single operators: %s", lost)
    if not lowered or _waits(ready, target):
        run_passes(ready, ",".join((f"lower{{target={target}}}", *(tail or (CLEAN,)))))
    elif dynamic:  # a memory budget waits for sizes, too
        run_passes(ready, ",".join(text for text in tail if text.startswith(RECOMPUTE)))
    return lift_constants(ready)


def _lost(graph: TrainingGraph) -> str:
    """Why a fused region of the graph has no kernel on this machine; empty when all have."""
    kinds = dict.fromkeys(node.op_type for node in graph.graph if node.domain == GENERATED)
    return next((why for why in map(generated.reason, kinds) if why), "")


def _waits(graph: TrainingGraph, target: str) -> bool:
    """Whether lowering left an operator until sizes are bound: a composite, or one that the target cannot run."""
    opset = graph.graph.opset_imports.get("", 18)
    return any(
        node.domain == COMPOSITE or (reason_not_run(node, target, opset) is not None and can_expand(node))
        for node in graph.graph
    )


def recorded_tail(graph: TrainingGraph) -> tuple[str, ...]:
    """What the graph's own pipeline runs after ``lower``: a symbolic graph is finished when its sizes are known.

    Empty when the graph was not lowered by a pipeline, or by one that holds foreign passes.
    """
    passes = recorded_passes(graph)
    names = [p.name for p in passes]
    if "lower" not in names:
        return ()
    return tuple(str(p) for p in passes[names.index("lower") + 1 :] if p.name != "plan-memory")


def recorded_passes(graph: TrainingGraph) -> tuple[Any, ...]:
    """The passes of the graph's own (latest) pipeline; none when it holds foreign passes."""
    recorded = _latest(graph.signature.metadata.get("pipeline", ""))
    try:
        return tuple(importlib.import_module("ortgraph.manager.pipeline_text").parse_pipeline(recorded))
    except PipelineSyntaxError:
        return ()


def _latest(pipelines: str) -> str:
    """The last of several pipelines joined by ``;``, which options of a pass may hold, too (``adamw(lr=0.1;eps=1)``)."""
    depth, start = 0, 0
    for i, letter in enumerate(pipelines):
        depth += (letter in "{(") - (letter in "})")
        if letter == ";" and depth == 0:
            start = i + 1
    return pipelines[start:]


def run_passes(graph: TrainingGraph, pipeline: str) -> None:
    """Run a text pipeline in place, without the verification that the pass manager does around each pass."""
    for made in importlib.import_module("ortgraph.manager.pipeline_text").parse_pipeline(pipeline):
        made.call(graph.model)


def _has_constants(graph: TrainingGraph) -> bool:
    return any(node.op_type == "Constant" and node.domain in ("", "ai.onnx") for node in graph.graph)


def lift_constants(graph: TrainingGraph) -> TrainingGraph:
    """Turn Constant nodes into initializers, as the runtime does anyway, so that they are not placed in the arena."""
    if _has_constants(graph):
        from onnx_ir.passes.common import LiftConstantsToInitializersPass

        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(graph.model)
    return graph
