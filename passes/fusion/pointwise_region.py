"""Recognising a region of element-wise operators by what it computes, whatever its algebraic form.

From a candidate root the region grows backwards until exactly the sources remain: one value (x), or two (dy, x). It
is then evaluated in float64 on sample points and compared with known functions. Every exporter's way of writing a
function is met by one entry, and a wrong constant is not, since the numbers differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, Refusal
from ortgraph.manager.rewrite import Match, RewritePass, Sweep
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.fusion.elementwise import evaluate, is_elementwise
from ortgraph.passes.fusion.operands import FLOATS, same_shape, scalar
from ortgraph.passes.fusion.region import nodes_behind, nodes_between

MAX_NODES = 48  # the longest form met (gradient builder on tanh GELU) has 31
TOLERANCE = 3e-7  # float32 constants carry 6e-8, which a steep point multiplies a few times
NEAR = 0.05  # closer than this to a known function is worth a refusal
_ROOTS = frozenset({"Add", "Div", "Mul", "Neg", "Sub", "Sum", "Where"})
_GRID = np.concatenate([
    [0.0, 1.0, -1.0, 0.5, -2.0, 3.0, 1e-3, -1e-3],  # the first eight decide most cases
    np.linspace(-6.0, 6.0, 97) + 0.0137, [-30.0, -12.0, 12.0, 30.0],
])  # fmt: skip
_DY = np.random.default_rng(20240229).standard_normal(_GRID.size)
_FIRST = 8
# Values that a source can take, by the operator that makes it.
_RANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Relu": lambda x: np.maximum(x, 0.0),
    "Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "Tanh": np.tanh,
}


@dataclasses.dataclass(frozen=True)
class Known:
    """A function to recognise.

    Attributes:
        op_type: The composite that computes it.
        function: Of x, or of dy and x, in float64.
        sources: 1 (x) or 2 (dy, x).
        attributes: Of the composite.
        needs: The region holds one of these operators; saves most evaluations.
        made_by: When not empty: x itself comes from one of these operators (it is the forward result).
    """

    op_type: str
    function: Callable[..., np.ndarray]
    sources: int
    attributes: dict[str, str] = dataclasses.field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    made_by: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class PointwiseFusion(RewritePass):
    """Base of the passes that recognise element-wise functions.

    Gradients go first, latest root first: once a gradient is recomputed from x, the forward chain has no reader in the
    backward half left and fuses as well. A gradient leaves values that others read in place; a forward function is
    left alone when any inner value is read elsewhere, since the chain would then be run beside its replacement.
    """

    known: ClassVar[tuple[Known, ...]] = ()

    def run(self, graph: TrainingGraph, accept: Callable[[int], bool] = lambda index: True) -> Changes:
        needed = frozenset().union(*(k.needs | k.made_by for k in self.known))
        if not any(n.op_type in needed for n in graph.graph):
            return Changes()
        sweep = Sweep(self, graph, accept)
        for sources in (2, 1):
            known = tuple(k for k in self.known if k.sources == sources)
            for node in tuple(graph.graph)[::-1]:
                if node.graph is None or not _is_root(node):
                    continue
                found = recognise(node, known)
                if isinstance(found, Match) and sources == 1:
                    reason = self._inner_reason(found)
                    found = Refusal(node.name or "", reason) if reason else found
                sweep.take(found, at=node)
        return sweep.changes

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        known, sources = match.facts["known"], match.facts["sources"]
        assert isinstance(known, Known) and isinstance(sources, tuple)
        made = build.op(known.op_type, *sources, domain=COMPOSITE, **known.attributes)
        made.shape = match.outputs[0].shape
        return [made]


def recognise(root: ir.Node, known: Sequence[Known]) -> Match | Refusal | None:
    """The known function that ``root`` computes from one or two values; a Refusal when it nearly does."""
    region = Region(root)
    if not any(region.op_types & (k.needs or k.made_by) or k.made_by & region.leaf_makers for k in known):
        return None
    near: tuple[float, str] | None = None
    for cut in _cuts(region, known[0].sources):
        for candidate in known:
            difference = _difference(region, cut, candidate)
            if difference <= TOLERANCE:
                nodes = region.inside(cut)
                facts = {"known": candidate, "sources": cut}
                count = "-".join((candidate.op_type.lower(), *candidate.attributes.values()))
                return Match(nodes, (root.outputs[0],), {}, facts, count)
            if difference < NEAR and (near is None or difference < near[0]):
                words = f"{len(region.inside(cut))} operators over %{cut[-1].name} differ from {candidate.op_type}"
                near = (difference, f"{words} {list(candidate.attributes.values())} by {difference:.1e}")
    return Refusal(root.name or "", near[1]) if near is not None else None


class Region:
    """Element-wise operators behind a root, in topological order, at most MAX_NODES of them."""

    def __init__(self, root: ir.Node) -> None:
        self.root = root.outputs[0]
        self.nodes = nodes_behind(root, self.operands, self._takes, MAX_NODES)
        self.order = {node.outputs[0]: i for i, node in enumerate(self.nodes)}
        self.op_types = frozenset(n.op_type for n in self.nodes)
        leaves = {v for n in self.nodes for v in self.operands(n) if v not in self.order}
        self.leaf_makers = frozenset(p.op_type for v in leaves if (p := v.producer()) is not None)

    def _takes(self, node: ir.Node) -> bool:
        if not is_elementwise(node) or not same_shape(node.outputs[0], self.root):
            return False
        if node.op_type == "Cast" and not _is_mask_cast(node):
            return False
        output = node.outputs[0]
        if output.dtype not in (self.root.dtype, ir.DataType.BOOL):
            return False
        return all(same_shape(v, self.root) for v in self.operands(node))

    @staticmethod
    def operands(node: ir.Node) -> Iterator[ir.Value]:
        """Inputs that are no constants."""
        return (v for v in node.inputs if v is not None and scalar(v) is None)

    def frontiers(self, pinned: ir.Value | None) -> Iterator[tuple[ir.Value, ...]]:
        """Cuts of the region from the root backwards, opening the latest value first; ``pinned`` stays closed."""
        frontier = {self.root}
        while True:
            opened = max(
                (v for v in frontier if v is not pinned and v in self.order), key=self.order.__getitem__, default=None
            )
            if opened is None:
                return
            frontier.remove(opened)
            frontier.update(self.operands(opened.producer()))  # type: ignore[arg-type]
            if len(frontier) <= 2:
                yield tuple(sorted(frontier, key=lambda v: self.order.get(v, -1)))

    def inside(self, cut: Sequence[ir.Value]) -> tuple[ir.Node, ...]:
        """Nodes between the cut and the root, in order."""
        return nodes_between(cut, self.root, self.order, self.operands)


def _cuts(region: Region, sources: int) -> Iterator[tuple[ir.Value, ...]]:
    """Cuts of ``sources`` values: (x,) or (dy, x), nearest to the root first for dy."""
    if sources == 1:
        yield from (c for c in region.frontiers(None) if len(c) == 1)
        return
    values = dict.fromkeys(v for n in reversed(region.nodes) for v in region.operands(n))
    for dy in values:
        for cut in region.frontiers(dy):
            if len(cut) == 2 and dy in cut:
                yield (dy, cut[0] if cut[1] is dy else cut[1])


def _difference(region: Region, cut: tuple[ir.Value, ...], known: Known) -> float:
    """Largest difference on the sample points, relative where the function is large; inf when it cannot be it."""
    x = cut[-1]
    maker = x.producer()
    made_by = maker.op_type if maker is not None else ""
    if any(v.dtype != region.root.dtype or not same_shape(v, region.root) for v in cut):
        return np.inf
    if known.made_by and made_by not in known.made_by:
        return np.inf
    if known.needs and not any(n.op_type in known.needs for n in region.inside(cut)):
        return np.inf
    grid = _RANGES.get(made_by, np.asarray)(_GRID)
    worst = 0.0
    for part in (slice(0, _FIRST), slice(_FIRST, None)):
        points = (grid[part],) if len(cut) == 1 else (_DY[part], grid[part])
        got = evaluate(region.root, dict(zip(cut, points, strict=True)))
        with np.errstate(all="ignore"):
            want = known.function(*points)
            error = np.abs(got - want) / np.maximum(1.0, np.abs(want))
        if got.shape != want.shape or not np.all(np.isfinite(error)):
            return np.inf
        worst = max(worst, float(error.max()))
        if worst >= NEAR:
            return np.inf
    return worst


def _is_root(node: ir.Node) -> bool:
    output = node.outputs[0] if node.outputs else None
    is_standard = node.domain in ("", "ai.onnx") and node.op_type in _ROOTS
    if not is_standard or output is None or output.shape is None or output.dtype not in FLOATS:
        return False
    return all(same_shape(v, output) or scalar(v) is not None for v in node.inputs if v is not None)


def _is_mask_cast(node: ir.Node) -> bool:
    source = node.inputs[0]
    return source is not None and source.dtype == ir.DataType.BOOL and node.outputs[0].dtype != ir.DataType.BOOL
