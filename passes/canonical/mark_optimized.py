"""The end of the canonical and fusion passes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, GraphPass


@dataclasses.dataclass(frozen=True)
class MarkOptimized(GraphPass):
    """Moves the graph from stage ``captured`` to ``optimized``, where plugins for fusions are inserted."""

    name: ClassVar[str] = "mark-optimized"
    stages: ClassVar[tuple[str, ...]] = ("captured", "optimized")
    sets_stage: ClassVar[str | None] = "optimized"

    def run(self, graph: TrainingGraph) -> Changes:
        return Changes()
