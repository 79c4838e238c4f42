"""Where a training step's time goes, by group of operators: ours, and PyTorch's through its own profiler.

    python -m bench.profile --workload bert-256x4 [--precision bf16] [--peer eager --peer compile] [--attention sdpa]
                            [--steps 10] [--top 12] [--json out.json]

A workload is a name of ``bench.workloads`` or ``file.py:function``. Every side runs alone, in a process of its own,
PyTorch at its best setting (see ``bench.step``). Steps are timed without a profiler too, before and after it:
``overhead`` is the plain step less the sum of all operators (profiling slows small operators down, so it can be
negative). Rates count matrix products and convolutions as they stand in the profiled program. Inductor's fused
kernels count with the dearest function in their name, and its ``element-wise`` is whatever has no other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from bench.processes import Worker, alone, build_shim, machine
from bench.profile_groups import GROUPS, OperatorTime, by_group, rates
from bench.worker import Side
from bench.workloads import MEASURED, attentions


def profile_side(side: Side, steps: int, preload: str | None, lock: str | None = None) -> dict[str, Any]:
    """``step_ms``, ``groups`` and ``operators`` of a side, or ``error``. Kinds ``eager`` and ``compile`` are PyTorch's."""
    form = f"{side.kind} {side.precision}" if side.kind in ("eager", "compile") else ""
    process = dataclasses.replace(side, kind="torch") if form else side
    worker = Worker(dataclasses.asdict(process), side.threads, preload, environment={"BENCH_KERNEL_PROFILE": "1"})
    entry: dict[str, Any] = dataclasses.asdict(side)
    try:
        worker.wait_ready()
        failed = (worker.ask(f"warm {form}") or {}).get(form) if form else None
        if failed or worker.error:
            return {**entry, "error": failed or worker.error}
        with alone(lock):
            before = worker.run(steps, form)
            rows = worker.ask(f"profile {steps} {form}".strip())
            after = worker.run(steps, form)
    finally:
        worker.close()
    if before is None or after is None or rows is None:
        return {**entry, "error": worker.error}
    step_ms = 1e3 * min(before, after)
    groups = by_group([OperatorTime(**r) for r in rows], step_ms)
    return {**entry, "step_ms": step_ms, "groups": groups, "operators": rows}


def sides_of(options: argparse.Namespace, workload: str, precision: str) -> list[Side]:
    choice = attentions(workload)
    wanted = [a for a in options.attention if a in choice] or [choice[0]]
    first = Side("ortgraph", workload, choice[0], precision, options.threads, options.level)
    peers = [Side(p, workload, a, precision, options.threads) for p in options.peer for a in wanted]
    return [first, *peers]


def title(entry: dict[str, Any]) -> str:
    return entry["kind"] if entry["kind"] == "ortgraph" else " ".join((entry["kind"], entry["attention"])).strip()


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Milliseconds by group, a column for each side."""
    good = [e for e in entries if "error" not in e]
    lines = [f"{'ms per step':14}" + "".join(f"{title(e):>18}" for e in good)]
    for group in GROUPS:
        cells = [e["groups"].get(group) for e in good]
        if any(cells):
            lines.append(f"{group:14}" + "".join(f"{c['ms']:18.2f}" if c else f"{'-':>18}" for c in cells))
    lines.append(f"{'step':14}" + "".join(f"{e['step_ms']:18.2f}" for e in good))
    lines += [f"{title(e)}: {rates(e['groups'])}" for e in good if rates(e["groups"])]
    lines += [f"{title(e)}: failed, {e['error']}" for e in entries if "error" in e]
    return "\n".join(lines)


def dearest(entry: dict[str, Any], count: int) -> str:
    """The operators that take longest."""
    lines = [f"{title(entry)}, operators:"]
    for r in entry["operators"][:count]:
        rate = f"{r['flops'] / r['milliseconds'] / 1e6:7.0f} GFLOP/s" if r["flops"] and r["milliseconds"] else ""
        lines.append(f"  {r['milliseconds']:8.2f} ms {r['calls']:6.0f}x  {r['group']:12} {r['operator'][:70]} {rate}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", help="name or file.py:function; may be repeated")
    parser.add_argument("--all", action="store_true", help=", ".join(MEASURED))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "both"))
    parser.add_argument("--peer", action="append", choices=("eager", "compile", "none"))
    parser.add_argument("--attention", action="append", choices=("sdpa", "eager"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--top", type=int, default=12, help="operators listed for each side")
    parser.add_argument("--lock", help="file whose lock is held while a side is timed")
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    options.peer = [p for p in options.peer or ("eager", "compile") if p != "none"]
    options.attention = options.attention or ["sdpa"]
    workloads = list(MEASURED) if options.all else options.workload or ["bert-256x4"]
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        shim = build_shim(folder)
        for precision in ("fp32", "bf16") if options.precision == "both" else (options.precision,):
            for workload in workloads:
                sides = sides_of(options, workload, precision)
                found = [
                    profile_side(s, options.steps, None if s.kind == "ortgraph" else shim, options.lock) for s in sides
                ]
                entries += found
                report(workload, precision, found, options.top)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"machine": machine(), "profiles": entries}, indent=1) + "\n")


def report(workload: str, precision: str, found: Sequence[dict[str, Any]], top: int) -> None:
    print(f"\n{workload}, {precision}, {machine()}")
    print(table(found))
    for entry in found:
        if top and "error" not in entry:
            print(dearest(entry, top))


if __name__ == "__main__":
    main()
