"""Recognising row-wise functions (softmax, layer norm, their gradients) by what they compute.

Like pointwise_region.py, with reductions: a region may also reduce over one fixed set of axes and broadcast the
result back. It is evaluated in float64 on a matrix whose columns stand for the reduced axes, with their true number
where it is known, since constants such as 1 / N may depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.ops.shapes import attribute
from ortgraph.passes.fusion.elementwise import evaluate, is_elementwise
from ortgraph.passes.fusion.operands import axes_of, same_shape, scalar
from ortgraph.passes.fusion.region import nodes_behind, nodes_between

MAX_NODES = 40
TOLERANCE = 1e-6
NEAR = 0.05
ROWS, UNKNOWN_WIDTH, MAX_WIDTH = 6, 7, 1 << 16
FULL, COLUMN, ROW = "full", "column", "row"

_REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ReduceL2": lambda x: np.sqrt((x * x).sum(1, keepdims=True)),
    "ReduceLogSumExp": lambda x: np.log(np.exp(x).sum(1, keepdims=True)),
    "ReduceMax": lambda x: x.max(1, keepdims=True),
    "ReduceMean": lambda x: x.mean(1, keepdims=True),
    "ReduceSum": lambda x: x.sum(1, keepdims=True),
    "ReduceSumSquare": lambda x: (x * x).sum(1, keepdims=True),
}


def is_reduction(node: ir.Node | None) -> bool:
    """Whether the node reduces and keeps the reduced dimensions."""
    return node is not None and node.op_type in _REDUCTIONS and bool(attribute(node, "keepdims", 1))


class RowRegion:
    """Operators behind a root that work row by row, opened up to given values.

    Args:
        root: A value of full shape.
        closed: Values that are never opened.
        axes: The reduced axes, where they are known already.
        like: A region of the same root: what is known about values and nodes is shared.

    Attributes:
        axes: The reduced axes, non-negative; None when no reduction is near or the root has no shape, and the region is
            then empty.
        nodes: Nodes in topological order.
        order: Position of a value's node.
    """

    def __init__(
        self,
        root: ir.Value,
        closed: Sequence[ir.Value] = (),
        axes: tuple[int, ...] | None = None,
        like: RowRegion | None = None,
    ) -> None:
        self.root, self.closed = root, frozenset(closed)
        self.nodes: list[ir.Node] = []
        self.order: dict[ir.Value, int] = {}
        self.axes = None if root.shape is None else axes or _nearest_axes(root, self.closed)
        same = like is not None and like.root is root and like.axes == self.axes
        self._kinds: dict[ir.Value, str | None] = like._kinds if same else {}  # type: ignore[union-attr]
        self._operands: dict[ir.Node, list[ir.Value]] = like._operands if same else {}  # type: ignore[union-attr]
        self._taken: dict[ir.Node, bool] = like._taken if same else {}  # type: ignore[union-attr]
        if self.axes is not None:
            self._grow()

    @property
    def width(self) -> int:
        """Columns of the sample matrix."""
        assert self.axes is not None and self.root.shape is not None
        dims = [self.root.shape[a] for a in self.axes]
        width = math.prod(d for d in dims if isinstance(d, int)) if all(isinstance(d, int) for d in dims) else 0
        return width if 0 < width <= MAX_WIDTH else UNKNOWN_WIDTH

    def kind(self, value: ir.Value) -> str | None:
        """FULL, COLUMN (reduced dimensions are 1), ROW (one number per reduced position), or None."""
        if value not in self._kinds:
            self._kinds[value] = self._kind(value)
        return self._kinds[value]

    def _kind(self, value: ir.Value) -> str | None:
        assert self.axes is not None and self.root.shape is not None
        if same_shape(value, self.root):
            return FULL
        if value.shape is None:
            return None
        shape, full = list(value.shape), list(self.root.shape)
        n = len(full)
        if len(shape) == n and all(
            (s == 1) if i in self.axes else (s == f) for i, (s, f) in enumerate(zip(shape, full, strict=True))
        ):
            return COLUMN
        if self.axes == tuple(range(n - len(self.axes), n)) and shape == full[n - len(self.axes) :]:
            return ROW
        return None

    def operands(self, node: ir.Node) -> list[ir.Value]:
        """Inputs that are no constants; of a reduction or Expand only the data."""
        if node not in self._operands:
            self._operands[node] = self._read_operands(node)
        return self._operands[node]

    @staticmethod
    def _read_operands(node: ir.Node) -> list[ir.Value]:
        inputs = node.inputs[:1] if node.op_type in _REDUCTIONS or node.op_type == "Expand" else node.inputs
        return [v for v in inputs if v is not None and scalar(v) is None]

    def _takes(self, node: ir.Node) -> bool:
        if node not in self._taken:
            self._taken[node] = self._can_take(node)
        return self._taken[node]

    def _can_take(self, node: ir.Node) -> bool:
        if len(node.outputs) != 1 or node.domain not in ("", "ai.onnx"):
            return False
        output = node.outputs[0]
        if self.kind(output) not in (FULL, COLUMN) or output.dtype not in (self.root.dtype, ir.DataType.BOOL):
            return False
        if node.op_type in _REDUCTIONS:
            return is_reduction(node) and axes_of(node) == self.axes and self.kind(node.inputs[0]) == FULL  # type: ignore[arg-type]
        if node.op_type != "Expand" and not is_elementwise(node):
            return False
        if node.op_type == "Cast" and node.inputs[0].dtype != ir.DataType.BOOL:  # type: ignore[union-attr]
            return False
        return all(self.kind(v) is not None for v in self.operands(node))

    def _grow(self) -> None:
        first = self.root.producer()
        if first is None or not self._takes(first):
            return
        self.nodes = nodes_behind(first, self._opened, self._takes, MAX_NODES)
        self.order = {node.outputs[0]: i for i, node in enumerate(self.nodes)}

    def _opened(self, node: ir.Node) -> list[ir.Value]:
        return [v for v in self.operands(node) if v not in self.closed]

    def cuts(self) -> Iterator[tuple[ir.Value, ...]]:
        """Cuts with one unknown full value, which comes first; rows and closed values follow, in a fixed order.

        What follows from closed values alone is not opened: the unknown values are then met one dominator after the
        other, wherever they stand in the order.
        """
        derived = self._derived()
        frontier = dict.fromkeys([self.root])
        while True:
            unknown = [v for v in frontier if v not in self.closed and v not in derived and self.kind(v) != ROW]
            if len(unknown) == 1 and unknown[0] is not self.root and self.kind(unknown[0]) == FULL:
                yield (unknown[0], *(v for v in frontier if v is not unknown[0] and v not in derived))
            opened = max((v for v in unknown if v in self.order), key=self.order.__getitem__, default=None)
            if opened is None:
                return
            del frontier[opened]
            frontier.update(dict.fromkeys(self.operands(opened.producer())))  # type: ignore[arg-type]

    def _derived(self) -> set[ir.Value]:
        """Values that follow from closed values and constants."""
        derived: set[ir.Value] = set()
        for node in self.nodes:
            if all(v in self.closed or v in derived for v in self.operands(node)):
                derived.add(node.outputs[0])
        return derived

    def inside(self, cut: Sequence[ir.Value]) -> tuple[ir.Node, ...]:
        """Nodes between the cut and the root, in order."""
        return nodes_between(cut, self.root, self.order, self.operands)

    def evaluate(self, value: ir.Value, sources: Mapping[ir.Value, np.ndarray]) -> np.ndarray:
        """The value on the sample matrix, full values as [ROWS, width]."""
        shape = (ROWS, self.width)

        def reduced(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[ir.Node, np.ndarray], np.ndarray]:
            return lambda node, x: f(np.broadcast_to(x, shape))

        def expanded(node: ir.Node, x: np.ndarray) -> np.ndarray:
            return np.broadcast_to(x, shape) if self.kind(node.outputs[0]) == FULL else x

        more = {op_type: reduced(f) for op_type, f in _REDUCTIONS.items()} | {"Expand": expanded}
        return evaluate(value, sources, more)

    def sample(self, kind: str, seed: int) -> np.ndarray:
        """Random numbers for a source. Rows of a full sample differ in size down to 1e-6, so that an epsilon shows."""
        rng = np.random.default_rng(seed)
        if kind == FULL:
            size = np.array([1.0, 3.0, 0.1, 1e-2, 1e-3, 1e-6])[:, None]
            return rng.standard_normal((ROWS, self.width)) * size + np.arange(ROWS)[:, None] * 1e-3
        return rng.standard_normal((ROWS, 1) if kind == COLUMN else (1, self.width))


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference relative to the size of the row; inf when a number is not finite."""
    got = np.broadcast_to(got, want.shape)
    with np.errstate(all="ignore"):
        error = np.abs(got - want) / np.maximum(np.abs(want).max(axis=-1, keepdims=True), 1e-30)
    return float(error.max()) if np.all(np.isfinite(error)) else math.inf


def _nearest_axes(root: ir.Value, closed: frozenset[ir.Value]) -> tuple[int, ...] | None:
    """Axes of the nearest reduction behind the root, through element-wise operators."""
    wave, seen, n = [root], {root}, 0
    while wave and n < MAX_NODES:
        value = wave.pop(0)
        node = value.producer()
        n += 1
        if node is None or value in closed:
            continue
        if is_reduction(node):
            return axes_of(node) or None
        if not is_elementwise(node) and node.op_type != "Expand":
            continue
        for v in node.inputs:
            if v is not None and v not in seen:
                seen.add(v)
                wave.append(v)
    return None
