"""Cost of a node: predicted time, bytes moved and scratch, from the facts in ``ortgraph.ops`` and a measured table."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.ops import work as facts
from ortgraph.ops.alternatives import Cost
from ortgraph.ops.cost_file import SHIPPED, machine_table
from ortgraph.ops.scratch import scratch_bytes


@dataclasses.dataclass(frozen=True)
class NodeCostTable:
    """Measured prices by operator (``Softmax``, ``ortgraph.kernels.Gelu:tanh``) and by class (``elementwise``).

    An entry has ``points``, [bytes moved, microseconds] in ascending order, between which time is interpolated (the
    first is the fixed cost, the slope between the last two goes on), or ``terms``, microseconds per unit of a feature.

    Attributes:
        source: Where it comes from.
        entries: Prices.
    """

    source: str
    entries: Mapping[str, Mapping[str, Any]]


def predict(node: ir.Node, table: NodeCostTable | None = None, threads: int = 2) -> Cost:
    """Predicted cost of one run of a node, with everything bound.

    Args:
        node: Any node of a lowered graph; dimensions that are not known count as 64.
        table: Prices; None means ``default_table()``.
        threads: Threads of one operator; a few kernels need scratch for each.
    """
    table = table or default_table()
    work = facts.work_of(node)
    entry = next((table.entries[name] for name in work.names if name in table.entries), table.entries["other"])
    return Cost(_microseconds(entry, work), work.moved, scratch_bytes(node, threads))


def _microseconds(entry: Mapping[str, Any], work: facts.Work) -> float:
    terms = entry.get("terms")
    if terms is not None:
        return sum(price * work.features.get(name, 0.0) for name, price in terms.items())
    points = entry["points"]
    if work.moved <= points[0][0] or len(points) == 1:
        return points[0][1]
    i = next((i for i in range(1, len(points)) if work.moved <= points[i][0]), len(points) - 1)
    (low, before), (high, after) = points[i - 1], points[i]
    return before + (after - before) * (work.moved - low) / (high - low)


@functools.cache
def default_table() -> NodeCostTable:
    """What ``ortgraph calibrate`` measured on this machine, else the table shipped with the package (2 threads)."""
    return load_node_table(machine_table())


def load_node_table(path: str = "") -> NodeCostTable:
    """The table at ``path``, or the one shipped with the package.

    Raises:
        InputError: The file is missing or is not such a table.
    """
    return _load(str(path or SHIPPED))


@functools.lru_cache(maxsize=8)
def _load(path: str) -> NodeCostTable:
    try:
        entries = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["nodes"]
        if "other" not in entries or not all("points" in entry or "terms" in entry for entry in entries.values()):
            raise ValueError("an entry lacks points or terms, or there is none for 'other'")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a node cost table ({error})", "make one with `ortgraph calibrate`") from error
    return NodeCostTable(path, entries)
