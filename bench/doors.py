"""The doors for scripts against the session and PyTorch: what ORTModule adds to a step, and what is left of the gain.

    python -m bench.doors [--workload bert-256x4 ...] [--rounds 7] [--steps 3] [--threads 2] [--lock FILE] [--json out.json]

Each side is a process of its own. A side and its base alternate, a few steps each; the ratio is taken per pair and its
median reported with quartiles. ORTModule's forward and backward are compared with the session's ``gradients`` program,
its step with FusedAdam with the session's ``step`` and with PyTorch eager at its best setting (``bench.step``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile

from bench.processes import Worker, alone, build_shim, is_busy, machine
from bench.worker import Side
from bench.workloads import attentions

# (what, its process, what it is compared with, its process and form)
PAIRS = (
    ("forward and backward", "module-gradients", "TrainingSession.gradients", "gradients", ""),
    ("step", "module", "TrainingSession.step", "ortgraph", ""),
    ("step", "module", "PyTorch eager, best", "torch", "eager fp32"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """ORTModule's time over that of its base, per workload."""

    workload: str
    what: str
    base: str
    ms_module: float
    ms_base: float
    ratio: float
    low: float
    high: float


def measure(options: argparse.Namespace, workload: str, shim: str | None) -> list[Row]:
    """Rows of one workload."""
    attention = attentions(workload)[0]
    kinds = dict.fromkeys([k for _, k, _, _, _ in PAIRS] + [k for _, _, _, k, _ in PAIRS])
    workers = {
        kind: Worker(
            dataclasses.asdict(Side(kind, workload, attention, threads=options.threads)),
            options.threads,
            shim if kind == "torch" else None,
        )
        for kind in kinds
    }
    found = []
    try:
        for worker in workers.values():
            worker.wait_ready()
            if worker.error:
                raise SystemExit(f"{workload}: {worker.error}")
        workers["torch"].ask("warm eager fp32")
        for what, kind, base, base_kind, form in PAIRS:
            pairs: list[tuple[float, float]] = []
            for _ in range(1 + options.rounds):
                with alone(options.lock):
                    ours = workers[kind].run(options.steps)
                    theirs = workers[base_kind].run(options.steps, form)
                assert ours is not None and theirs is not None, "a process ended"
                pairs.append((ours, theirs))
            pairs = pairs[1:]  # the first round warms up
            low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
            ms = [statistics.median(p[i] for p in pairs) * 1e3 for i in (0, 1)]
            found.append(Row(workload, what, base, *ms, middle, low, high))
    finally:
        for worker in workers.values():
            worker.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", help="name; may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of a side in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lock", help="file whose lock is held while a pair is timed")
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{machine()}, {options.threads} threads, {options.rounds} rounds of {options.steps} steps", flush=True)
    if is_busy():
        print("the machine is busy: ratios mean little", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        shim = build_shim(folder)
        for workload in options.workload or ["bert-256x4"]:
            for row in measure(options, workload, shim):
                rows.append(row)
                print(
                    f"{row.workload:14} ORTModule {row.what:21} {row.ms_module:7.1f} ms, {row.base:26} "
                    f"{row.ms_base:7.1f} ms: {row.ratio:.3f} ({row.low:.3f} to {row.high:.3f})",
                    flush=True,
                )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([dataclasses.asdict(r) for r in rows], file, indent=1)


if __name__ == "__main__":
    main()
