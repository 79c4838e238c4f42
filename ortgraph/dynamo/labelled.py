"""A graph that computes its loss and gradients at once, by the number of rows that a batch has labels for."""

from __future__ import annotations

import logging
from typing import Any

from ortgraph.dynamo.compiled_graph import CompiledGraph
from ortgraph.dynamo.joint_graph import JointGraph
from ortgraph.graph import TrainingGraph
from ortgraph.runtime.labelled_rows import label_note, prepare_labelled

logger = logging.getLogger(__name__)


class LabelledGraphs:
    """The whole graph, and others whose head runs over the labelled rows alone; made when a batch first fits one.

    Args:
        joint: Without a cut.
        graph: Optimized and lowered.
        threads: Threads of one operator.
        target: As in ``ortgraph.optimize``.
    """

    def __init__(self, joint: JointGraph, graph: TrainingGraph, threads: int | None, target: str) -> None:
        self._joint, self._graph, self._threads, self._target = joint, graph, threads, target
        self.whole = CompiledGraph(joint, graph, threads)
        self.by_rows: dict[int, CompiledGraph] = {}
        note = label_note(graph)
        self._note = note if note is not None and note.input in joint.primals else None

    def of(self, args: list[Any]) -> CompiledGraph:
        """The graph for a batch."""
        if self._note is None:
            return self.whole
        labels = args[self._joint.primals.index(self._note.input)]
        rows = self._note.rows(labels.detach().numpy())
        if rows and rows not in self.by_rows:
            logger.info("compiling for %d labelled rows", rows)
            cut = prepare_labelled(self._graph, rows, {}, self._target)
            if cut is None:
                self._note = None
                return self.whole
            self.by_rows[rows] = CompiledGraph(self._joint, cut, self._threads)
        return self.by_rows.get(rows, self.whole)
