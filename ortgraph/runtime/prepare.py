"""From a graph of any stage to one that a runtime takes: dimensions bound, composites lowered, shapes folded."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping

from ortgraph.analysis.bind_shapes import bind_shapes, fold_shapes, is_dynamic
from ortgraph.errors import PassError
from ortgraph.graph import TrainingGraph
from ortgraph.ops.expand import expand_composites

logger = logging.getLogger(__name__)
_LOWERED = ("lowered", "planned")


def prepare(graph: TrainingGraph, dims: Mapping[str, int], target: str) -> TrainingGraph:
    """A lowered graph with static shapes where shapes do not depend on data. The graph given is not changed.

    Args:
        graph: At any stage.
        dims: Size by name of every symbolic dimension.
        target: ``onnxruntime-training`` or ``onnxruntime``.
    """
    if graph.stage in _LOWERED and not is_dynamic(graph):
        return lift_constants(graph.clone()) if _has_constants(graph) else graph
    ready = graph.clone()
    if is_dynamic(ready):
        bind_shapes(ready, dims)
        fold_shapes(ready)
    if ready.stage not in _LOWERED:
        lower(ready, target)
    fold_shapes(ready)
    return lift_constants(ready)


def lower(graph: TrainingGraph, target: str) -> None:
    """Lower in place by the pass ``lower``; by reference expansions only where that pass is not installed."""
    registry = importlib.import_module("ortgraph.manager.registry")
    try:
        cls = registry.get("lower")
    except (PassError, ImportError, AttributeError) as error:
        logger.debug("no pass 'lower' (%s); composites are expanded", error)
        expand_composites(graph)
        return
    cls(target=target).run(graph)


def _has_constants(graph: TrainingGraph) -> bool:
    return any(node.op_type == "Constant" and node.domain in ("", "ai.onnx") for node in graph.graph)


def lift_constants(graph: TrainingGraph) -> TrainingGraph:
    """Turn Constant nodes into initializers, as the runtime does anyway, so that they are not placed in the arena."""
    if _has_constants(graph):
        from onnx_ir.passes.common import LiftConstantsToInitializersPass

        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(graph.model)
    return graph
