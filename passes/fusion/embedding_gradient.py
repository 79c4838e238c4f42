"""FuseEmbeddingGradient: scattered additions into a table become the safe composite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match, RewritePass
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.fusion.operands import FLOATS, constant, producer_of, rank, scalar


@dataclasses.dataclass(frozen=True)
class FuseEmbeddingGradient(RewritePass):
    """ScatterND(0 [R, D], I [.., 1], dY, add) = EmbeddingGrad(dY, I, rows=R); ScatterElements along rows likewise.

    A table that is not zero becomes Add(table, EmbeddingGrad). ONNX Runtime's ScatterND adds without atomics from
    several threads, so this is a matter of right results, not only of speed. com.microsoft.GatherGrad is raised by
    ``raise-contrib``.

    Refuses when:
        the reduction is not ``add``;
        the table is no matrix with a known number of rows;
        the indices address elements, not whole rows;
        the element type is neither float32 nor float64.
    """

    name: ClassVar[str] = "fuse-embedding-gradient"
    roots: ClassVar[frozenset[str]] = frozenset({"ScatterND", "ScatterElements"})
    shared_inner: ClassVar[str] = "keep"

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        table, indices, updates = node.inputs[:3]
        if attribute(node, "reduction", "none") == "none":
            return None
        assert table is not None and indices is not None and updates is not None
        reason = _table_reason(node, table)
        if reason is not None:
            return Refusal(node.name or "", reason)
        rows = _rows_of_nd(indices, updates, table) if node.op_type == "ScatterND" else _rows_of_elements(node)
        if isinstance(rows, str):
            return Refusal(node.name or "", rows)
        values = {"table": None if _is_zero(table) else table, "rows": rows, "updates": updates, "old": table}
        return Match((node,), (node.outputs[0],), values, count=node.op_type)

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        table, rows, updates, old = (match.values[k] for k in ("table", "rows", "updates", "old"))
        assert rows is not None and updates is not None and old is not None and updates.shape is not None
        count = static_shape(old)[0] if static_shape(old) else int(old.shape[0])  # type: ignore[index, arg-type]
        index = rows
        if rows.shape is not None and len(rows.shape) == len(updates.shape):
            index = build.op("Squeeze", rows, build.ints([-1]))
        made = build.op("EmbeddingGrad", updates, index, domain=COMPOSITE, rows=count, padding_idx=-1)
        return [made if table is None else build.op("Add", table, made)]


def _table_reason(node: ir.Node, table: ir.Value) -> str | None:
    reduction = attribute(node, "reduction", "none")
    if reduction != "add":
        return f"reduction is {reduction}, not add"
    if table.dtype not in FLOATS:
        return f"element type {table.dtype}"
    if rank(table) != 2 or not isinstance(table.shape[0], int):  # type: ignore[index]
        return "the table is not a matrix with a known number of rows"
    return None


def _rows_of_nd(indices: ir.Value, updates: ir.Value, table: ir.Value) -> ir.Value | str:
    if indices.shape is None or indices.shape[-1] != 1 or rank(updates) != len(indices.shape):
        return "the indices address elements, not whole rows"
    unsqueeze = producer_of(indices, "Unsqueeze")
    n = len(indices.shape)
    if unsqueeze is not None and scalar(unsqueeze.inputs[1]) in (-1, n - 1):
        assert unsqueeze.inputs[0] is not None
        return unsqueeze.inputs[0]
    return indices


def _rows_of_elements(node: ir.Node) -> ir.Value | str:
    """The row numbers of an index matrix [n, D] whose columns are all equal."""
    table, indices, updates = node.inputs[:3]
    if attribute(node, "axis", 0) not in (0, -2):
        return f"scatters along axis {attribute(node, 'axis', 0)}, not along rows"
    if table is None or table.shape is None or updates is None or updates.shape is None:
        return "the updates are not whole rows"
    if len(updates.shape) != 2 or updates.shape[1] != table.shape[1]:
        return "the updates are not whole rows"
    expand = producer_of(indices, "Expand")
    column = None if expand is None else expand.inputs[0]
    if column is None or column.shape is None or len(column.shape) != 2 or column.shape[1] != 1:
        return "the indices address elements, not whole rows"
    if column.shape[0] != updates.shape[0]:
        return "the indices are broadcast over rows"
    return column


def _is_zero(value: ir.Value) -> bool:
    array = constant(value)
    if array is not None:
        return not np.any(array)
    if scalar(value) == 0.0:
        return True
    node = producer_of(value, "ConstantOfShape", "Expand")
    if node is None:
        return False
    if node.op_type == "Expand":
        return scalar(node.inputs[0]) == 0.0
    fill = node.attributes.get("value")
    return fill is None or not np.any(fill.as_tensor().numpy())
