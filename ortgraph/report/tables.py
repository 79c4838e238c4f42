"""Rows of the tables that the command line and the HTML report show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from ortgraph.graph import TrainingGraph
from ortgraph.graph.text import shape_text
from ortgraph.manager.pass_manager import PassRecord
from ortgraph.manager.rewrite import op_key
from ortgraph.plan.memory.placement import stored_plan

VALUE_COLUMNS = ("role", "name", "type")
PASS_COLUMNS = ("pass", "changed", "nodes", "counts", "remarks")
_VARYING = re.compile(r"%\S+|'[^']*'|\d+")


def operator_rows(graph: TrainingGraph) -> list[tuple[str, int]]:
    """(operator, nodes), most frequent first."""
    counts = Counter(op_key(n) for n in graph.graph)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def operator_change_rows(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[str, int, int, str]]:
    """(operator, before, after, signed difference), the largest change first."""
    rows = [(k, before.get(k, 0), after.get(k, 0)) for k in {*before, *after}]
    rows.sort(key=lambda r: (-abs(r[2] - r[1]), r[0]))
    return [(k, b, a, f"{a - b:+d}" if a != b else "") for k, b, a in rows]


def pass_rows(records: Iterable[PassRecord], seconds: bool = False) -> list[tuple[object, ...]]:
    """PASS_COLUMNS per pass in order; with ``seconds`` also the pass's own and its verification's milliseconds."""
    rows: list[tuple[object, ...]] = []
    for r in records:
        nodes = f"{r.nodes_before} → {r.nodes_after}" if r.nodes_before != r.nodes_after else str(r.nodes_after)
        row = (r.text, "yes" if r.modified else "", nodes, counts_text(r.counts), len(r.refusals) or "")
        times = (f"{r.seconds * 1e3:.1f}", f"{r.verify_seconds * 1e3:.1f}")
        rows.append(row + times if seconds else row)
    return rows


def counts_text(counts: Mapping[str, int]) -> str:
    """``fused=12 removed=3``, sorted by name."""
    return " ".join(f"{k}={v}" for k, v in sorted(counts.items()))


def summed_counts(records: Iterable[PassRecord]) -> dict[str, int]:
    """Counts of several runs of a pass together."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.counts)
    return dict(total)


def refusal_rows(records: Iterable[PassRecord]) -> list[tuple[str, int, str, str]]:
    """(pass, times, reason, first node): refusals that differ only in names and numbers are one row."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for record in records:
        for refusal in record.refusals:
            key = (record.name, _VARYING.sub("…", refusal.reason))
            group = groups.setdefault(key, [])
            if (refusal.node, refusal.reason) not in group:  # a pass may run several times in a pipeline
                group.append((refusal.node, refusal.reason))
    rows = [(name, len(found), found[0][1], found[0][0]) for (name, _), found in groups.items()]
    return sorted(rows, key=lambda r: (r[0], -r[1], r[2]))


def value_rows(names: Sequence[tuple[str, str]], graph: TrainingGraph) -> list[tuple[str, str, str]]:
    """VALUE_COLUMNS of graph inputs and outputs given as (role, name)."""
    values = {v.name: v for v in (*graph.graph.inputs, *graph.graph.outputs)}
    return [(role, name, shape_text(values[name]) if name in values else "missing") for role, name in names]


def elements_of(value: ir.Value, sizes: Mapping[str, int] | None = None) -> int | None:
    """Number of elements; None when a dimension is unknown."""
    count = 1
    for d in value.shape if value.shape is not None else (None,):
        size = d if isinstance(d, int) else (sizes or {}).get(str(d))
        if size is None:
            return None
        count *= size
    return count


def bytes_of(value: ir.Value) -> int | None:
    """Bytes of a value of static shape."""
    count = elements_of(value)
    if count is None or value.dtype is None:
        return None
    return int(count * value.dtype.itemsize)


def role_rows(graph: TrainingGraph) -> list[tuple[str, int, str, str]]:
    """(role, tensors, elements, bytes) over the graph's inputs; '?' where a dimension is symbolic."""
    inputs = {v.name: v for v in graph.graph.inputs}
    groups: dict[str, list[ir.Value]] = {}
    for role, name in graph.signature.graph_inputs():
        if name in inputs:
            groups.setdefault(role, []).append(inputs[name])
    return [(r, len(v), _sum(elements_of(x) for x in v), _sum(bytes_of(x) for x in v)) for r, v in groups.items()]


def _sum(numbers: Iterable[int | None]) -> str:
    listed = list(numbers)
    return "?" if None in listed else f"{sum(n for n in listed if n is not None):,}"


def gradient_rows(errors: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """(parameter, error per measure ...), the worst first. ``errors`` is by measure, then by parameter."""
    names = sorted({n for by_name in errors.values() for n in by_name})
    names.sort(key=lambda n: (-max(by_name.get(n, 0.0) for by_name in errors.values()), n))
    return [(n, *(f"{by_name[n]:.1e}" if n in by_name else "" for by_name in errors.values())) for n in names]


def memory_of(graph: TrainingGraph) -> dict[str, int | None]:
    """Bytes that a step needs beside the batch, by what they hold; None where a size is not known yet.

    ``parameters`` and ``states`` are persistent (moments, counters and buffers are states), ``arena`` is the planned
    place of all intermediates, ``arena_bound`` the largest sum of intermediates alive at once: no plan of this order
    is smaller.
    """
    inputs = {v.name: v for v in graph.graph.inputs}
    sums: dict[str, int | None] = {"parameters": 0, "states": 0}
    for role, name in graph.signature.graph_inputs():
        key = {"parameter": "parameters", "frozen": "parameters", "buffer": "states", "state": "states"}.get(role)
        if key is None or name not in inputs:
            continue
        size, total = bytes_of(inputs[name]), sums[key]
        sums[key] = None if size is None or total is None else total + size
    plan = stored_plan(graph.model)
    if plan is not None:  # one that does not parse has no figures; a session plans anew
        sums |= {"arena": plan.get("arena_bytes"), "arena_bound": plan.get("max_load_bytes")}
    return sums


_MEMORY_NOTES = {
    "parameters": "weights, trainable and frozen",
    "states": "optimizer moments, counters, buffers",
    "arena": "all intermediates of a step, as planned",
    "arena_bound": "largest sum of intermediates alive at once; no placement in this order is smaller",
}


def memory_rows(memory: Mapping[str, int | None]) -> list[tuple[str, str, str]]:
    """(what, bytes, note) of ``memory_of``."""
    return [(k.replace("_", " "), "?" if v is None else f"{v:,}", _MEMORY_NOTES.get(k, "")) for k, v in memory.items()]
