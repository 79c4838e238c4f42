"""``ortgraph diff``: what differs between two graphs."""

from __future__ import annotations

import difflib
import pathlib
from typing import Annotated, Any

import typer

from ortgraph.cli import options
from ortgraph.cli.output import FAILED, Output, verb
from ortgraph.graph import TrainingGraph


@verb
def run(
    first: Annotated[pathlib.Path, typer.Argument(metavar="A", help="A graph (.onnx).")],
    second: Annotated[pathlib.Path, typer.Argument(metavar="B", help="Another graph (.onnx).")],
    text: Annotated[bool, typer.Option("--text", help="Print the differing lines of the canonical text.")] = False,
    as_json: bool = options.JSON,
) -> None:
    """Compare stage, roles, operators and canonical text of two graphs. Exit code 1 when they differ."""
    from ortgraph.graph.text import to_text
    from ortgraph.report import tables

    out = Output(as_json)
    a, b = options.read_graph(out, first), options.read_graph(out, second)
    roles = _role_rows(a, b)
    counts = [dict(tables.operator_rows(g)) for g in (a, b)]
    operators = [r for r in tables.operator_change_rows(*counts) if r[3]]
    texts = [to_text(g, provenance=False).splitlines() for g in (a, b)]
    lines = list(difflib.unified_diff(texts[0], texts[1], str(first), str(second), lineterm="", n=2))
    values = _value_rows(a, b)
    out.table("Roles", ("what", str(first), str(second)), roles)
    out.table("Operators", ("operator", str(first), str(second), "change"), operators, right=(1, 2, 3))
    out.table("Values", ("name", "difference"), values)
    if text:
        out.say("\n".join(lines))
    same = not lines and not roles and not values
    out.say("the graphs are the same" if same else f"{a.node_count()} nodes against {b.node_count()}")
    out.result({
        "same": same,
        "nodes": [a.node_count(), b.node_count()],
        "roles": [list(r) for r in roles],
        "operators": {r[0]: [r[1], r[2]] for r in operators},
        "values": [list(r) for r in values],
        "text": lines if text else [],
    })  # fmt: skip
    if not same:
        raise typer.Exit(FAILED)


def _role_rows(a: TrainingGraph, b: TrainingGraph) -> list[tuple[str, str, str]]:
    """Stage and every graph input and output whose role differs."""
    if not a.has_signature and not b.has_signature:
        return []
    stage_a, stage_b = (g.stage if g.has_signature else "no signature" for g in (a, b))
    roles_a, roles_b = _roles(a), _roles(b)
    rows = [("stage", stage_a, stage_b)]
    rows += [(name, roles_a.get(name, ""), roles_b.get(name, "")) for name in sorted({*roles_a, *roles_b})]
    return [r for r in rows if r[1] != r[2]]


def _roles(graph: TrainingGraph) -> dict[str, str]:
    if not graph.has_signature:
        return {}
    found: dict[str, Any] = {}
    for role, name in (*graph.signature.graph_inputs(), *graph.signature.graph_outputs()):
        found[name] = f"{found[name]}+{role}" if name in found else role
    return found


def _value_rows(a: TrainingGraph, b: TrainingGraph) -> list[tuple[str, str]]:
    """Parameters, buffers and states whose stored values differ."""
    import numpy as np

    rows = []
    for name in sorted({*a.values, *b.values}):
        x, y = a.values.get(name), b.values.get(name)
        if x is None or y is None:
            rows.append((name, "only in the " + ("second" if x is None else "first")))
        elif x.shape != y.shape or x.dtype != y.dtype:
            rows.append((name, f"{x.dtype}{list(x.shape)} against {y.dtype}{list(y.shape)}"))
        elif x.tobytes() != y.tobytes():
            largest = float(np.max(np.abs(x.astype(np.float64) - y.astype(np.float64)), initial=0.0))
            rows.append((name, f"differs by up to {largest:.1e}"))
    return rows
