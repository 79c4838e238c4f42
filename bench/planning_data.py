"""Public planning instances, found by their format in a data folder: offset allocation (CSV) and operator graphs (JSON)."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import re
from collections.abc import Iterator

from ortgraph.errors import InputError
from ortgraph.plan.memory import Buffer, MemoryProblem
from ortgraph.plan.operations import Operation, OperationGraph, PlanValue


def data_folder(given: str | None) -> pathlib.Path:
    """The folder given, else ``$ORTGRAPH_PLANNING_DATA``.

    Raises:
        InputError: Neither names a folder.
    """
    path = pathlib.Path(given or os.environ.get("ORTGRAPH_PLANNING_DATA", ""))
    if not (given or os.environ.get("ORTGRAPH_PLANNING_DATA")) or not path.is_dir():
        raise InputError(f"no folder with planning instances at {str(path)!r}", "give --data or ORTGRAPH_PLANNING_DATA")
    return path


def allocation_files(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, int | None]]:
    """CSV files with columns id, lower, upper, size, and the capacity in the file name (None without one)."""
    for path in sorted(folder.rglob("*.csv")):
        with path.open(encoding="utf-8") as file:
            header = [c.strip() for c in file.readline().split(",")]
        if header == ["id", "lower", "upper", "size"]:
            capacity = re.fullmatch(r".*\.(\d+)", path.stem)
            yield path, int(capacity.group(1)) if capacity else None


def read_allocation(path: pathlib.Path) -> MemoryProblem:
    """Buffers with half-open lifetimes; byte-granular."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{k.strip(): v for k, v in row.items()} for row in csv.DictReader(file)]
    buffers = tuple(Buffer(r["id"], int(r["lower"]), int(r["upper"]), int(r["size"])) for r in rows)
    return MemoryProblem(buffers, alignment=1)


def graph_files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """JSON files in node-link form."""
    for path in sorted(folder.rglob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and "nodes" in data and ("links" in data or "edges" in data):
            yield path


def read_graph(path: pathlib.Path) -> OperationGraph:
    """Operators with one output each, in the order that the file gives, else level by level in file order (Kahn)."""
    data = json.loads(path.read_text(encoding="utf-8"))
    nodes = {n.get("id", n.get("name")): n for n in data["nodes"]}
    reads: dict[object, list[object]] = {k: [] for k in nodes}
    for edge in data.get("links", data.get("edges")):
        source, target = (edge["source"], edge["target"]) if "source" in edge else (edge["0"], edge["1"])
        reads[target].append(source)
    order = data["graph"].get("order")
    order = json.loads(order) if isinstance(order, str) else order
    if order is None:
        order = _by_levels(reads)
    else:
        by_text = {str(k): k for k in nodes}
        order = [by_text[str(k)] for k in order]
    at = {k: i for i, k in enumerate(order)}
    operations, values = [], []
    for i, k in enumerate(order):
        node = nodes[k]
        cost, size = node.get("cost_cpu", node.get("duration")), node.get("cost_ram", node.get("out_cost"))
        operations.append(Operation(str(k), cost, tuple(sorted({at[s] for s in reads[k]})), (i,)))
        values.append(PlanValue(str(k), int(size)))
    return OperationGraph(tuple(operations), tuple(values))


def _by_levels(reads: dict[object, list[object]]) -> list[object]:
    done: set[object] = set()
    order: list[object] = []
    while len(order) < len(reads):
        level = [k for k in reads if k not in done and all(s in done for s in reads[k])]
        if not level:
            raise InputError("the operator graph has a cycle")
        order += level
        done.update(level)
    return order
