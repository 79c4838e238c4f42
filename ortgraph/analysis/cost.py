"""Cost of a node: predicted time, bytes moved and scratch, from the facts in ``ortgraph.ops`` and a measured table."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping

import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.ops import work as facts
from ortgraph.ops.alternatives import Cost

SHIPPED_TABLE = pathlib.Path(facts.__file__).with_name("node_cost_table.json")


@dataclasses.dataclass(frozen=True)
class NodeCostTable:
    """Measured prices: ``entries[name] = {"fixed_us", "ns_per_byte", "ns_per_flop"}`` by operator or class.

    Attributes:
        source: Where it comes from.
        entries: Prices by operator (``Softmax``, ``ortgraph.kernels.Gelu:tanh``) and by class (``elementwise``).
    """

    source: str
    entries: Mapping[str, Mapping[str, float]]


def predict(node: ir.Node, table: NodeCostTable | None = None) -> Cost:
    """Predicted cost of one run of a node: a roofline, the slower of computing and moving, and a fixed part.

    Args:
        node: Any node; dimensions that are not known count as 64.
        table: Prices; None means those shipped with the package.
    """
    table = table or load_node_table()
    work = facts.work_of(node)
    entry = next((table.entries[name] for name in work.names if name in table.entries), None)
    if entry is None:
        entry = table.entries["other"]
    nanoseconds = max(work.flops * entry.get("ns_per_flop", 0.0), work.moved * entry.get("ns_per_byte", 0.0))
    return Cost(entry["fixed_us"] + nanoseconds / 1e3, work.moved, 0)


def load_node_table(path: str = "") -> NodeCostTable:
    """The table at ``path``, or the one shipped with the package.

    Raises:
        InputError: The file is missing or is not such a table.
    """
    return _load(str(path or SHIPPED_TABLE))


@functools.lru_cache(maxsize=8)
def _load(path: str) -> NodeCostTable:
    try:
        entries = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["entries"]
        if "other" not in entries or not all("fixed_us" in entry for entry in entries.values()):
            raise ValueError("an entry lacks fixed_us, or there is none for 'other'")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a node cost table ({error})", "make one with `ortgraph calibrate`") from error
    return NodeCostTable(path, entries)
