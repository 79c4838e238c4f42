"""The rows of the proof as the table of docs/coverage.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BEGIN, END = "<!-- table: python -m bench.coverage --markdown -->", "<!-- end of table -->"
_SHOWN = 4


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One table per kind of model."""
    parts = [_summary(rows)]
    for kind in dict.fromkeys(r["kind"] for r in rows):
        parts.append(_section(kind, [r for r in rows if r["kind"] == kind]))
    return "\n\n".join(parts) + "\n"


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    proven = [r for r in rows if r["status"] == "proven"]
    counted = {s: sum(r["status"] == s for r in rows) for s in ("refused", "failed", "skipped")}
    others = ", ".join(f"{n} {s}" for s, n in counted.items() if n)
    families = len({r["family"] for r in proven})
    text = f"{families} families proven, in {len(proven)} cases" + (f"; {others}" if others else "") + "."
    if not proven:
        return text
    worst = max(proven, key=lambda r: r["share"])
    threads = sum(r["moved"].get("by_threads", False) for r in proven)
    return (
        f"{text} The largest gradient error is {worst['share']:.2f} of what is allowed ({worst['case']}). After five AdamW"
        f" steps {threads} of the cases hold with the control of threads alone; for the others float64 shows the noise."
    )


def _section(kind: str, rows: Iterable[Mapping[str, Any]]) -> str:
    lines = [f"### {kind[0].upper()}{kind[1:]}", ""]
    lines.append(
        "| case | nodes captured → O2 | operators left unfused | worst gradient error (PyTorch's) | AdamW (allowed) |"
    )
    lines.append("|---|---|---|---|---|")
    return "\n".join([*lines, *(_line(r) for r in rows)])


def _line(row: Mapping[str, Any]) -> str:
    if row["status"] != "proven":
        return f"| {row['case']} | {row['status']} | {row['message'].replace('|', '/')} | | |"
    nodes = list(row["nodes"].values())
    unfused = sorted(row["unfused"].items(), key=lambda i: (-i[1], i[0]))
    shown = ", ".join(f"{n} {c}" for n, c in unfused[:_SHOWN])
    rest = sum(c for _, c in unfused[_SHOWN:])
    shown += f", {rest} others" if rest else ""
    moved = row["moved"]
    allowed = 4 * max(moved["threads"], moved["rounding"]) + 1e-6 if moved else 0.0
    steps = f"{moved['difference']:.0e} ({allowed:.0e})" if moved else "-"
    error = f"{row['error']:.0e} ({row['own_error']:.0e})"
    if row["doubted"]:
        error += f", {len(row['doubted'])} against float32"
    return f"| {row['case']} | {nodes[0]} → {nodes[-1]} | {shown or 'none'} | {error} | {steps} |"
