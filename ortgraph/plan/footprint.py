"""Memory that a step needs beside the arena: what stays from step to step, and the batch."""

from __future__ import annotations

import dataclasses

from ortgraph.analysis.liveness import nbytes
from ortgraph.errors import PlanError
from ortgraph.graph import TrainingGraph

_GROUPS = {
    "parameter": "parameters",
    "frozen": "parameters",
    "buffer": "states",
    "state": "states",
    "input": "batch",
    "tangent": "batch",
    "loss_gradient": "batch",
    "scalar": "batch",
}


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes outside the arena.

    Attributes:
        parameters: Weights, trainable and frozen.
        states: Optimizer moments, counters, random keys, module buffers.
        batch: Data inputs and scalars.
        constants: Initializers of the graph.
    """

    parameters: int
    states: int
    batch: int
    constants: int

    @property
    def total(self) -> int:
        return self.parameters + self.states + self.batch + self.constants


def footprint(graph: TrainingGraph) -> Footprint:
    """Bytes of a graph's inputs and constants.

    Raises:
        PlanError: An input has a symbolic shape.
    """
    inputs = {v.name: v for v in graph.graph.inputs}
    sums = dict.fromkeys((*_GROUPS.values(), "constants"), 0)
    for role, name in graph.signature.graph_inputs():
        size = nbytes(inputs[name]) if name in inputs else 0
        if size is None:
            raise PlanError(f"input {name!r} has no static size", "bind its dimensions: shapes={...}, --shapes batch=8")
        sums[_GROUPS[role]] += size
    sums["constants"] = sum(nbytes(v) or 0 for v in graph.graph.initializers.values())
    return Footprint(**sums)
