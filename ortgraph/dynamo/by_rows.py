"""A graph that computes its loss and gradients at once, by the rows that a batch needs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from ortgraph.dynamo.compiled_graph import CompiledGraph
from ortgraph.dynamo.joint_graph import JointGraph
from ortgraph.graph import TrainingGraph
from ortgraph.runtime.chosen_rows import Buffers, ChosenRows

logger = logging.getLogger(__name__)
MAX_GRAPHS = 12  # beside the whole one; the one unused for longest goes first


class GraphsByRows:
    """The whole graph, and others over rows that are no padding and rows with a label; made when a batch first fits one.

    Args:
        joint: Without a cut.
        graph: Optimized and lowered.
        threads: Threads of one operator.
        target: As in ``ortgraph.optimize``.
    """

    def __init__(self, joint: JointGraph, graph: TrainingGraph, threads: int | None, target: str) -> None:
        self._joint, self._threads, self._target = joint, threads, target
        self._rows = ChosenRows(graph)
        self._inputs = {n: i for i, n in enumerate(joint.primals) if n in graph.signature.inputs}
        self.whole = CompiledGraph(joint, graph, threads)
        self.made: OrderedDict[Buffers, CompiledGraph] = OrderedDict()

    @property
    def without_padding(self) -> bool:
        """Whether some batches are computed without their padding."""
        return self._rows.padding is not None

    def of(self, args: list[Any]) -> tuple[CompiledGraph, Buffers]:
        """The graph for a batch, and its buffers."""
        if self._rows.labels is None and self._rows.padding is None:
            return self.whole, Buffers()
        chosen = self._rows.of(_Arrays(args, self._inputs), {})
        if chosen and chosen not in self.made:
            logger.info("compiling for %s", chosen)
            cut = self._rows.prepare(chosen, {}, self._target)
            if cut is None:
                return self.of(args)
            self.made[chosen] = CompiledGraph(self._joint, cut, self._threads)
            if len(self.made) > MAX_GRAPHS:
                logger.info("forgetting the graph for %s", self.made.popitem(last=False)[0])
        if not chosen:
            return self.whole, chosen
        self.made.move_to_end(chosen)
        return self.made[chosen], chosen


class _Arrays(dict[str, Any]):
    """Data inputs as arrays, those that are asked for."""

    def __init__(self, args: list[Any], at: dict[str, int]) -> None:
        self._args, self._at = args, at

    def __missing__(self, name: str) -> Any:
        return self._args[self._at[name]].detach().numpy()
