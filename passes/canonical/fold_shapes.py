"""FoldShapes: shape arithmetic becomes constants as far as recorded shapes tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortgraph.graph import Names, TrainingGraph
from ortgraph.graph.edit import stamp
from ortgraph.manager.base import Changes, GraphPass
from ortgraph.ops.spec import CONTRIB
from ortgraph.passes.canonical.shape_values import ShapeValue, ShapeValues, target_of
from ortgraph.passes.canonical.simplify_reshapes import reshape_target
from ortgraph.passes.canonical.values import BEFORE_PLAN, Edit, constant_tensor, dims, is_standard

_MISSING = ""  # no dimension has this name


@dataclasses.dataclass(frozen=True)
class FoldShapes(GraphPass):
    """Shape, Size and what is computed from them become constants; Reshape and Expand get constant shapes.

    Cases: an integer tensor whose elements all follow from recorded dimensions is a constant (``folded``), also when
    only the one dimension that is gathered is static; a computed tensor of named dimensions is shared with an equal
    one made earlier (``shared``); Reshape, Expand and ConstantOfShape whose result shape is recorded with enough
    numbers take a constant shape with -1, 0 or 1 for the rest (``targets``); ONNX Runtime's BroadcastGradientArgs is
    computed (``broadcasts``). Shape arithmetic that nothing reads any more is ``removed``.

    Refuses when:
        - a dimension is unknown, or several symbolic ones move: the computation stays;
        - a tensor has more than 64 elements or more than one dimension: that is data, see fold-constants.
    """

    name: ClassVar[str] = "fold-shapes"
    stages: ClassVar[tuple[str, ...]] = BEFORE_PLAN

    def run(self, graph: TrainingGraph) -> Changes:
        run = _Run(graph.graph)
        for node in tuple(graph.graph):
            run.visit(node)
        run.changes.counts["removed"] = run.edit.prune(run.tracked)
        return run.changes


class _Run:
    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.edit = Edit(graph)
        self.known = ShapeValues(graph.opset_imports.get("", 18))
        self.changes = Changes()
        self.tracked: list[ir.Node] = []
        self.first: dict[Hashable, ir.Value] = {}
        self.constants: dict[Hashable, ir.Value] = {}
        self.names: Names | None = None

    def visit(self, node: ir.Node) -> None:
        if node.domain == CONTRIB and node.op_type == "BroadcastGradientArgs":
            self._broadcast(node)
        elif is_standard(node, "Reshape", "Expand", "ConstantOfShape"):
            self._target(node)
        found = self.known.visit(node)
        if found is None:
            return
        value, shape = found
        self.tracked.append(node)
        if value.dtype is None or constant_tensor(value) is not None or not self.edit.is_read(value):
            return
        if shape.is_number:
            self._fold(node, value, shape)
        elif shape.is_known:
            self._share(value, shape)

    def _fold(self, node: ir.Node, value: ir.Value, shape: ShapeValue) -> None:
        if is_standard(node, "Identity") and value.is_graph_output() or value.name in self.edit.pinned:
            return
        assert value.dtype is not None
        constant = self._constant(shape, value.dtype)
        if value.is_graph_output():
            self.edit.become_identity(node, constant, FoldShapes.name)
        else:
            self.edit.redirect(value, constant)
        self.changes.counts["folded"] += 1

    def _share(self, value: ir.Value, shape: ShapeValue) -> None:
        first = self.first.setdefault((shape, value.dtype), value)
        if first is not value and not value.is_graph_output() and self.edit.redirect(value, first):
            self.changes.counts["shared"] += 1

    def _target(self, node: ir.Node) -> None:
        """Give a Reshape, Expand or ConstantOfShape whose shape is computed a constant one."""
        at = 0 if node.op_type == "ConstantOfShape" else 1
        if len(node.inputs) <= at or node.inputs[at] is None or constant_tensor(node.inputs[at]) is not None:
            return
        target = self._wanted(node)
        if target is None:
            return
        node.replace_input_with(at, self._constant(ShapeValue(target), ir.DataType.INT64))
        stamp(node, FoldShapes.name)
        self.changes.counts["targets"] += 1

    def _wanted(self, node: ir.Node) -> tuple[int, ...] | None:
        output = node.outputs[0]
        if node.op_type == "ConstantOfShape":
            shape = dims(output)
            return shape if shape is not None and all(isinstance(d, int) for d in shape) else None  # type: ignore[return-value]
        x = node.inputs[0]
        assert x is not None
        if node.op_type == "Expand":
            return _expand_target(x, output)
        if node.attributes.get_int("allowzero", 0):
            return None
        target = reshape_target(x, output)
        shape_value = self.known.get(node.inputs[1])
        if target is not None or shape_value is None or shape_value.rank != 1:
            return target
        return target_of(shape_value.elements, dims(x) or ())

    def _broadcast(self, node: ir.Node) -> None:
        """Axes over which ONNX Runtime's gradient builder sums a gradient, from the two shapes of a broadcast."""
        a, b = (self.known.get(v) for v in node.inputs[:2])
        if a is None or b is None or any(o.is_graph_output() for o in node.outputs):
            return
        found = _broadcast_axes(a.elements, b.elements)
        if found is None:
            return
        axes, exact = found
        if not exact and not all(_keeps_dims(u.node) for o in node.outputs for u in o.uses()):
            return
        for output, wanted in zip(node.outputs, axes, strict=False):
            if output.uses():
                self.edit.redirect(output, self._constant(ShapeValue(wanted), ir.DataType.INT64))
        self.tracked.append(node)
        self.changes.counts["broadcasts"] += 1

    def _constant(self, shape: ShapeValue, dtype: ir.DataType) -> ir.Value:
        key = (shape, dtype)
        if key not in self.constants:
            self.names = self.names or Names(self.graph)
            array = np.array(shape.elements, dtype=dtype.numpy())
            array = array.reshape(()) if shape.rank == 0 else array
            self.constants[key] = self.edit.constant(array, self.names.fresh("shape"))
        return self.constants[key]


def _expand_target(x: ir.Value, output: ir.Value) -> tuple[int, ...] | None:
    """The result's numbers, and 1 where a named dimension of x stays."""
    given, wanted = dims(x), dims(output)
    if given is None or wanted is None:
        return None
    aligned = (None,) * (len(wanted) - len(given)) + given
    target = [d if isinstance(d, int) else 1 if d == a else None for d, a in zip(wanted, aligned, strict=True)]
    return None if None in target else tuple(target)  # type: ignore[arg-type]


def _broadcast_axes(
    a: tuple[int | str | None, ...], b: tuple[int | str | None, ...]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], bool] | None:
    """Axes to sum for each operand, last first; and whether they are exact when a named dimension is 1."""
    rank = max(len(a), len(b))
    a, b = ((_MISSING,) * (rank - len(s)) + s for s in (a, b))
    axes: tuple[list[int], list[int]] = ([], [])
    exact = True
    for i in reversed(range(rank)):
        one, other = a[i], b[i]
        if one is None or other is None:
            return None
        if one == other:
            continue
        if _MISSING in (one, other):
            axes[0 if one == _MISSING else 1].append(i)
        elif 1 in (one, other):
            axes[0 if one == 1 else 1].append(i)
            exact = exact and isinstance(one, int) and isinstance(other, int)
        else:
            return None
    return (tuple(axes[0]), tuple(axes[1])), exact


def _keeps_dims(node: ir.Node) -> bool:
    """Summing over an axis of size 1 changes nothing as long as the axis stays."""
    return node.op_type in ("ReduceSum", "ReduceSumTraining") and node.attributes.get_int("keepdims", 1) == 1
