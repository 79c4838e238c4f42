"""Bisection: the first pass, then the smallest group of nodes, that breaks loss or gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.errors import OrtgraphError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.text import node_text
from ortgraph.manager.instruments import pass_name
from ortgraph.manager.numerics import compare
from ortgraph.manager.pass_manager import PassManager
from ortgraph.manager.rewrite import RewritePass


@dataclasses.dataclass(frozen=True)
class Culprit:
    """What bisection found.

    Attributes:
        name: The pass.
        index: Its position in the pipeline.
        reason: How it shows.
        rewrite: Which of its rewrites (counted from 0) is wrong; None when the pass is no RewritePass.
        before: Lines of the graph that the pass changed, as they were.
        after: The lines that it wrote in their place.
    """

    name: str
    index: int
    reason: str
    rewrite: int | None
    before: tuple[str, ...]
    after: tuple[str, ...]


def bisect(
    graph: TrainingGraph,
    passes: Sequence[ir.passes.PassBase],
    batch: Mapping[str, np.ndarray],
    tell: Callable[[str], None] = lambda text: None,
) -> Culprit | None:
    """Find the first pass of a pipeline that breaks an invariant, the loss or a gradient on ``batch``.

    Args:
        graph: The graph before the pipeline; not modified.
        passes: The pipeline.
        batch: Feeds by input name.
        tell: Called with the name of each pass as it is tried.

    Returns:
        The culprit, or None when the pipeline is right on this batch.
    """
    current = graph.clone()
    for index, p in enumerate(passes):
        tell(pass_name(p))
        reason = _broken(graph, current, p, batch)
        if reason:
            rewrite = _smallest(graph, current, p, batch) if isinstance(p, RewritePass) else None
            before, after = _difference(current, p, rewrite)
            return Culprit(pass_name(p), index, reason, rewrite, before, after)
        PassManager([p], verify="off").run(current)
    return None


def _broken(graph: TrainingGraph, before: TrainingGraph, p: ir.passes.PassBase, batch: Mapping[str, np.ndarray]) -> str:
    """How a pass breaks the graph ``before``; empty when it does not."""
    after = before.clone()
    try:
        PassManager([p]).run(after)
        if _same(before, after):  # and before is right
            return ""
        result = compare(graph, after, batch)
    except OrtgraphError as error:
        return error.what
    if result.equal:
        return ""
    return f"numbers moved: {result.text}"


def _same(before: TrainingGraph, after: TrainingGraph) -> bool:
    """Whether nothing differs between a graph and a clone of it that a pass has seen."""
    if before.signature != after.signature or before.values.keys() != after.values.keys():
        return False
    if any(after.values[name] is not array for name, array in before.values.items()):
        return False
    first, second = (ir.to_proto(g.model).SerializeToString(deterministic=True) for g in (before, after))
    return first == second


def _smallest(graph: TrainingGraph, before: TrainingGraph, p: RewritePass, batch: Mapping[str, np.ndarray]) -> int:
    """Index of the first rewrite with which the pass goes wrong: binary search over "only the first k"."""

    def bad(count: int) -> bool:
        return bool(_broken(graph, before, Limited(p, count), batch))

    low, high = 0, 1
    while not bad(high) and high < 1 << 20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bad(middle) else (middle, high)
    return high - 1


class Limited(ir.passes.InPlacePass):
    """The first ``count`` rewrites of a RewritePass."""

    def __init__(self, inner: RewritePass, count: int) -> None:
        self.inner, self.count = inner, count

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        changes = self.inner.run(TrainingGraph(model), accept=lambda index: index < self.count)
        return ir.passes.PassResult(model, bool(+changes.counts))


def _difference(
    before: TrainingGraph, p: ir.passes.PassBase, rewrite: int | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Node lines that a pass (or its one rewrite) removes and adds."""
    old, new = before.clone(), before.clone()
    if rewrite is not None:
        assert isinstance(p, RewritePass)
        Limited(p, rewrite)(old.model)
        p = Limited(p, rewrite + 1)
    with contextlib.suppress(Exception):  # the pass is known to be broken; what it left behind is what we show
        new.model = p(new.model).model
    lines_old = [node_text(n, provenance=False) for n in old.graph]
    lines_new = [node_text(n, provenance=False) for n in new.graph]
    gone, come = set(lines_new), set(lines_old)
    return tuple(x for x in lines_old if x not in gone)[:20], tuple(x for x in lines_new if x not in come)[:20]
