"""From a translated graph to a lowered one, under the options of the backend."""

from __future__ import annotations

import logging
import warnings

from ortgraph.capture.torch_capture import apply_hook
from ortgraph.dynamo.joint_graph import JointGraph
from ortgraph.dynamo.options import Options
from ortgraph.errors import InputError, PlanError
from ortgraph.graph import TrainingGraph
from ortgraph.manager.graph_cache import cached, text_of
from ortgraph.manager.optimize import optimize
from ortgraph.runtime.detect import detect_runtime
from ortgraph.runtime.prepare import prepare

logger = logging.getLogger(__name__)


def optimized(joint: JointGraph, options: Options) -> TrainingGraph:
    """The graph after the user's hooks and the pipeline.

    Args:
        joint: Translated.
        options: Those of the backend. ``remove_padding`` is for graphs that compute loss and gradients at once.

    Raises:
        InputError: A hook changed inputs or outputs.
    """
    target = target_of(options)
    graph = joint.graph
    for hook in options.hooks:
        graph = apply_hook(hook, graph)
    facts = text_of(
        "torch.compile", options.pipeline, target, options.precision, options.precision_overrides,
        options.memory_budget, options.budget_required, options.passes_after,
        options.remove_padding,
    )  # fmt: skip
    if options.cache and facts is not None:
        ready = cached(graph, facts, lambda: _lowered(graph, options, target))
    else:
        ready = _lowered(graph, options, target)
    _check_names(joint, ready)
    return ready


def target_of(options: Options) -> str:
    """The runtime that graphs are lowered for."""
    return options.target or detect_runtime().target


def _lowered(graph: TrainingGraph, options: Options, target: str) -> TrainingGraph:
    try:
        result = _optimize(graph, options, options.memory_budget, target)
    except PlanError as error:
        if options.budget_required or options.memory_budget is None:
            raise
        warnings.warn(f"a graph is planned without a budget: {error.what}", stacklevel=2)
        result = _optimize(graph, options, None, target)
    return prepare(result, {}, target)


def _optimize(graph: TrainingGraph, options: Options, budget: str | int | None, target: str) -> TrainingGraph:
    return optimize(
        graph, options.pipeline, target=target, precision=options.precision,
        precision_overrides=options.precision_overrides, memory_budget=budget, passes_after=options.passes_after,
        remove_padding=options.remove_padding,
    ).graph  # fmt: skip


def _check_names(joint: JointGraph, graph: TrainingGraph) -> None:
    names = {v.name for v in (*graph.graph.inputs, *graph.graph.outputs)}
    wanted = [n for n in (*joint.primals, *joint.tangents, *joint.outputs, *joint.gradients) if isinstance(n, str)]
    lost = [n for n in wanted if n not in names]
    if lost:
        raise InputError(
            f"a pass or hook has dropped or renamed %{lost[0]}", "leave the graph's inputs and outputs as they are"
        )
