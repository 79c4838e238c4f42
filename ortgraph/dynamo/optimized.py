"""From a translated graph to a lowered one, under the options of the backend."""

from __future__ import annotations

import logging

from ortgraph.capture.torch_capture import apply_hook
from ortgraph.dynamo.joint_graph import JointGraph
from ortgraph.dynamo.options import Options
from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph
from ortgraph.manager.optimize import optimize
from ortgraph.runtime.detect import detect_runtime
from ortgraph.runtime.prepare import prepare

logger = logging.getLogger(__name__)


def optimized(joint: JointGraph, options: Options) -> TrainingGraph:
    """The graph after the user's hooks and the pipeline.

    Raises:
        InputError: A hook changed inputs or outputs.
    """
    target = options.target or detect_runtime().target
    graph = joint.graph
    for hook in options.hooks:
        graph = apply_hook(hook, graph)
    result = optimize(
        graph, options.pipeline, target=target, precision=options.precision,
        precision_overrides=options.precision_overrides, memory_budget=options.memory_budget,
        passes_after=options.passes_after,
    ).graph  # fmt: skip
    ready = prepare(result, {}, target)
    _check_names(joint, ready)
    return ready


def _check_names(joint: JointGraph, graph: TrainingGraph) -> None:
    names = {v.name for v in (*graph.graph.inputs, *graph.graph.outputs)}
    wanted = [n for n in (*joint.primals, *joint.tangents, *joint.outputs, *joint.gradients) if isinstance(n, str)]
    lost = [n for n in wanted if n not in names]
    if lost:
        raise InputError(
            f"a pass or hook has dropped or renamed %{lost[0]}", "leave the graph's inputs and outputs as they are"
        )
