"""Two processes on this machine: PyTorch's DDP, ortgraph under it, with ZeRO stage 1, and with the optimizer in the graph.

    python -m bench.distributed [--workload bert-256x4] [--rounds 5] [--steps 3] [--lock FILE] [--json out.json]

Each rank is a process with one thread, pinned to a core. All sides are alive and take turns, a few steps each; a step is as
long as its slower rank's. Memory is the largest resident size of a rank while it trains, after compiling, libraries
included. The target: a step under DDP takes at most 1.1 times one pinned process's step plus the measured all-reduce of
its gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence

from bench.distributed_worker import Rank
from bench.processes import Worker, alone, build_shim, is_busy, machine
from bench.workloads import build

TARGET = 1.1
RANKS = 2
SIDES = {
    "torch": "PyTorch, DDP, fused AdamW",
    "ortgraph": "ortgraph, DDP, FusedAdam",
    "zero": "ortgraph, DDP, ZeRO-1",
    "graph": "ortgraph, optimizer in the graph",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One side: the median step, samples of all ranks per second, and per rank the peak while it trains."""

    side: str
    step_seconds: float
    samples_per_second: float
    peak_bytes: tuple[int, ...]


class Side:
    """The processes of one side.

    Args:
        side: A key of SIDES.
        workload: Its name.
        size: How many processes.
        folder: Where they meet.
        preload: A library for PyTorch's best setting.
    """

    def __init__(self, side: str, workload: str, size: int, folder: str, preload: str | None) -> None:
        cores: Sequence[int | None] = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
        meeting = f"file://{pathlib.Path(folder, f'meeting-{side}-{size}')}"
        self.workers = [
            Worker(
                dataclasses.asdict(Rank(side, workload, r, size, cores[r] if len(cores) >= RANKS else None, meeting)),
                1,
                preload,
                module="bench.distributed_worker",
                environment={"RANK": str(r), "WORLD_SIZE": str(size), "LOCAL_RANK": str(r)} if size > 1 else None,
            )
            for r in range(size)
        ]

    def wait_ready(self) -> None:
        for worker in self.workers:
            worker.wait_ready()
            if worker.error:
                raise SystemExit(worker.error)

    def ask(self, command: str) -> list[list[float]]:
        """The answer of each rank; they work at the same time."""
        for worker in self.workers:
            worker.send(command)
        answers = [worker.receive() for worker in self.workers]
        broken = next((w.error for w in self.workers if w.error), None)
        if broken:
            raise SystemExit(broken)
        return answers

    def seconds(self, command: str) -> float:
        """The median, each step as long as its slower rank's."""
        return statistics.median(max(times) for times in zip(*self.ask(command), strict=True))


def measure(options: argparse.Namespace, shim: str | None, folder: str) -> tuple[list[Row], dict[str, float]]:
    """Rows of all sides; seconds of the target's parts."""
    rows = build(options.workload)["batch"]["input_ids"].shape[0]
    sides = {side: Side(side, options.workload, RANKS, folder, shim if side == "torch" else None) for side in SIDES}
    one = Side("ortgraph", options.workload, 1, folder, None)
    times: dict[str, list[float]] = {name: [] for name in (*SIDES, "one", "sum")}
    try:
        for side in (*sides.values(), one):
            side.wait_ready()
        for _ in range(1 + options.rounds):
            with alone(options.lock):
                for name, side in sides.items():
                    times[name].append(side.seconds(f"run {options.steps}"))
                times["one"].append(one.seconds(f"run {options.steps}"))
                times["sum"].append(sides["ortgraph"].seconds(f"sum {options.steps}"))
        memory = {name: tuple(int(n) for n in side.ask("memory")) for name, side in sides.items()}  # type: ignore[call-overload]
    finally:
        for side in (*sides.values(), one):
            for worker in side.workers:
                worker.close()
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up
    found = [Row(n, middle[n], RANKS * rows / middle[n], memory[n]) for n in SIDES]
    # why by round: what others do on the machine hits all parts of a round alike
    ratios = [a / (b + c) for a, b, c in zip(times["ortgraph"][1:], times["one"][1:], times["sum"][1:], strict=True)]
    return found, {"one": middle["one"], "sum": middle["sum"], "ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="bert-256x4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of a side in a round")
    parser.add_argument("--lock", help="file whose lock is held while a round is timed")
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    busy = is_busy()
    with tempfile.TemporaryDirectory() as folder:
        rows, parts = measure(options, build_shim(folder), folder)
    print(f"{options.workload} on each of {RANKS} ranks of one thread, {machine()}")
    print(f"{'':34} {'ms a step':>10} {'samples/s':>10} {'peak MB of each rank':>22}")
    for row in rows:
        peaks = ", ".join(f"{n / 1e6:.0f}" for n in row.peak_bytes)
        print(f"{SIDES[row.side]:34} {row.step_seconds * 1e3:10.1f} {row.samples_per_second:10.1f} {peaks:>22}")
    print(
        f"DDP target: {parts['one'] * 1e3:.1f} ms of one pinned process + {parts['sum'] * 1e3:.1f} ms all-reduce; the step takes "
        f"{parts['ratio']:.2f} times that (at most {TARGET})"
    )
    if busy:
        print("the machine was busy: figures mean little", file=sys.stderr)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rows": [dataclasses.asdict(r) for r in rows], **parts}, file, indent=1)


if __name__ == "__main__":
    main()
