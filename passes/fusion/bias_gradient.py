"""FuseBiasGradient: sums over all rows become one form, which lowering knows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.manager.base import Changes, Refusal
from ortgraph.manager.rewrite import Match, RewritePass
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute
from ortgraph.passes.fusion.operands import FLOATS, axes_of, producer_of, rank, scalar

_FORMS = ("product", "reduce")


@dataclasses.dataclass(frozen=True)
class FuseBiasGradient(RewritePass):
    """ReduceSum(dY [.., N], all axes but the last) = ReduceSum(dY viewed [rows, N], 0) = MatMul(1 [rows], dY).

    A Reshape in front that only splits or merges rows is looked through, so that sums of one gradient through
    different views meet (and common subexpressions merge them). On two cores, 1024 rows of 1024: ReduceSum 0.139 ms,
    product with ones 0.083; reducing one axis after the other 0.53.

    Refuses when:
        the sum leaves a row axis out or takes the last axis;
        the number of rows is not known (form ``product``), or the width is not;
        the element type is neither float32 nor float64.

    Attributes:
        form: ``reduce`` for one ReduceSum over the two-dimensional view, which lowering turns into the cheapest form
            (a kernel, the product, or the sum as it is), or ``product`` at once.
    """

    name: ClassVar[str] = "fuse-bias-gradient"
    roots: ClassVar[frozenset[str]] = frozenset({"ReduceSum"})
    shared_inner: ClassVar[str] = "keep"

    form: str = "reduce"

    def run(self, graph: TrainingGraph, *args: object) -> Changes:
        if self.form not in _FORMS:
            raise InputError(f"fuse-bias-gradient: unknown form {self.form!r}", f"one of {', '.join(_FORMS)}")
        return super().run(graph, *args)  # type: ignore[arg-type]

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        value = node.inputs[0]
        n = rank(value)
        if value is None or n is None or n < 2:
            return None
        axes = axes_of(node)
        if axes is None or n - 1 in axes or not axes:
            return None
        if axes != tuple(range(n - 1)):
            return Refusal(node.name or "", f"sums over axes {list(axes)}, not over all rows")
        source = _behind_views(value)
        if self.form == "reduce" and n == 2:
            return None
        return Match((node,), (node.outputs[0],), {"source": source, "value": value}, count=self.form)

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        source = match.values["source"]
        assert source is not None and source.shape is not None
        if source.dtype not in FLOATS:
            return f"element type {source.dtype}"
        if not isinstance(source.shape[-1], int):
            return "the width is not known"
        if self.form == "product" and static_shape(source) is None:
            return "the number of rows is not known"
        return None

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        node, source = match.nodes[0], match.values["source"]
        assert source is not None and source.shape is not None
        width = int(source.shape[-1])  # type: ignore[arg-type]
        if len(source.shape) != 2:
            known = static_shape(source)
            rows = math.prod(known[:-1]) if known is not None else -1
            source = build.op("Reshape", source, build.ints([rows, width]))
        keep = attribute(node, "keepdims", 1)
        if self.form == "reduce":
            made = build.op("ReduceSum", source, build.ints([0]), keepdims=0)
        else:
            made = build.op("MatMul", _ones(build, source), source)
        if keep:
            n = rank(match.values["value"])
            made = build.op("Reshape", made, build.ints([*[1] * ((n or 1) - 1), width]))
        return [made]


def _ones(build: Builder, source: ir.Value) -> ir.Value:
    """A row of ones, one initializer per length in the graph."""
    rows, dtype = int(source.shape[0]), source.dtype  # type: ignore[index, arg-type]
    assert dtype is not None
    for value in build.graph.initializers.values():
        if value.dtype == dtype and list(value.shape or []) == [rows] and scalar(value) == 1.0:
            return value
    return build.const(np.ones(rows), dtype, name="row_of_ones")


def _behind_views(value: ir.Value) -> ir.Value:
    """The nearest matrix behind Reshapes that keep the last dimension (hence the rows); else what they start from."""
    while rank(value) != 2 and (node := producer_of(value, "Reshape")) is not None:
        source = node.inputs[0]
        same = source is not None and source.shape is not None and value.shape is not None and len(source.shape) >= 2
        if not same or source.shape[-1] != value.shape[-1] or not isinstance(value.shape[-1], int):  # type: ignore
            return value
        value = source  # type: ignore[assignment]
    return value
