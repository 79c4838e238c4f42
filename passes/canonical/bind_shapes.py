"""Named dimensions become numbers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ortgraph.analysis.bind_shapes import bind_shapes
from ortgraph.analysis.size_conditions import check_sizes, size_conditions
from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, GraphPass


@dataclasses.dataclass(frozen=True)
class BindShapes(GraphPass):
    """Substitutes sizes for named dimensions in every recorded shape.

    Attributes:
        sizes: ``name:size`` entries, ``bind-shapes{sizes=batch:8|sequence:128}``. A name that no graph input has is
            an InputError; sizes at which the captured module computes something else are a BatchError.
    """

    name: ClassVar[str] = "bind-shapes"
    binds_inputs: ClassVar[bool] = True
    sizes: tuple[str, ...] = ()

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        named = {str(d) for v in graph.graph.inputs if v.shape is not None for d in v.shape if not isinstance(d, int)}
        sizes = dict(_entry(text) for text in self.sizes)
        unknown = sorted(set(sizes) - named)
        if unknown and named:
            raise InputError(
                f"no input has a dimension called {unknown[0]!r}", f"dimensions: {', '.join(sorted(named))}"
            )
        check_sizes(size_conditions(graph) if graph.has_signature else (), sizes)
        changes.counts["values"] = bind_shapes(graph, sizes) if named else 0
        return changes


def _entry(text: str) -> tuple[str, int]:
    name, _, size = text.partition(":")
    if not name or not size.isdigit() or int(size) < 1:
        raise InputError(f"bind-shapes: {text!r} is not name:size", "bind-shapes{sizes=batch:8|sequence:128}")
    return name, int(size)
