"""Full training step (forward, backward, AdamW) against PyTorch at stock and at its best setting, and raw ONNX Runtime.

    python -m bench.step [--workload bert-256x4 | --workload file.py:build | --all] [--precision fp32|bf16|both]
                         [--rounds 7] [--steps 3] [--threads 2] [--json out.json]

PyTorch's products go through MKL, which takes a slow path on AMD processors. "best" tells MKL that the processor is
an Intel one (a preloaded function, ``mkl_serv_intel_cpu_true``; on Intel processors best is stock), and of eager and
torch.compile each counts with the faster of eager and sdpa attention, float32 with fused AdamW and bf16 by autocast.
The raw joint graph is what capture gives, AdamW in the graph, with all of ONNX Runtime's own optimizations.

Ours, ONNX Runtime's and each setting and attention form of PyTorch are processes of their own. Our steps and a peer's
alternate, a few steps each; a ratio is taken per pair, and the median is reported with its quartiles. A peer that
fails becomes a row with ``error``. Attention forms that are slower than their sibling by a tenth after two rounds are
left out. ``peak_fraction`` is the matrix work of the captured graph per second of our step, over the machine's best
rate on the same products (``bench.rates``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence

from bench.matrix_work import MatrixProduct, total_flops
from bench.processes import Worker, alone, build_shim, is_busy, machine
from bench.rates import Rates
from bench.step_rows import ALL, BEST, COMPILE, EAGER, RAW, STOCK, Row, fastest, measured, write_json
from bench.step_table import dearest_first, targets_table
from bench.worker import Side
from bench.workloads import MEASURED, attentions

TRIAL = 2  # rounds after which the slower attention form of a peer is left out
SLOWER = 1.1
AT_ONCE = 2  # processes that start at a time


@dataclasses.dataclass
class Peer:
    """A form of a peer, and (our seconds, its seconds) of every round.

    Attributes:
        name, setting: As in Row.
        precision: ``fp32`` or ``bf16``.
        process: Where it runs.
        kind: ``eager`` or ``compile`` of PyTorch; empty where a process has one form.
        attention: Attention implementation, where there is a choice.
        base: What it is compared with: ``ortgraph`` or ``gradients``.
        error: Why it cannot run.
        dropped: Whether it is left out because another form is faster.
    """

    name: str
    setting: str
    precision: str
    process: Process
    kind: str = ""
    attention: str = ""
    base: str = "ortgraph"
    pairs: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    error: str | None = None
    dropped: bool = False

    @property
    def form(self) -> str:
        return f"{self.kind} {self.precision}" if self.kind else ""

    def failed(self) -> str | None:
        return self.error or self.process.error


@dataclasses.dataclass
class Process:
    """A process that may serve several peers."""

    side: Side
    preload: str | None = None
    worker: Worker | None = None

    @property
    def error(self) -> str | None:
        return self.worker.error if self.worker is not None else "not started"

    def run(self, steps: int, form: str = "") -> float | None:
        assert self.worker is not None
        return self.worker.run(steps, form)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


def peers_of(options: argparse.Namespace, workload: str, precisions: Sequence[str], shim: str | None) -> list[Peer]:
    """Everything that our step is compared with, those first whose compiled code serves the others."""
    forms = attentions(workload)

    def process(kind: str, attention: str, preload: str | None = None) -> Process:
        return Process(Side(kind, workload, attention, "fp32", options.threads, options.level), preload)

    found = []
    if "fp32" in precisions:
        found.append(Peer(RAW, ALL, "fp32", process("raw", forms[0])))
    if "fp32" in precisions and options.gradients:
        alone_name = f"{RAW}, forward and backward"
        found.append(Peer(alone_name, ALL, "fp32", process("raw-gradients", forms[0]), base="gradients"))
    for setting, preload in [(STOCK, None), (BEST, shim)] if shim else [(BEST, None)]:
        for attention in forms:
            shared = process("torch", attention, preload)
            for precision in precisions:
                for name, kind in ((EAGER, "eager"), (COMPILE, "compile")):
                    found.append(Peer(name, setting, precision, shared, kind, attention))
    words = [w.strip() for w in options.sides.split(",") if w.strip()]
    return [p for p in found if not words or any(w in f"{p.name} {p.attention} {p.setting}" for w in words)]


def start(processes: Sequence[Process], peers: Sequence[Peer] = ()) -> None:
    """Start processes and the first steps of their peers, a few processes at a time: it is heavy, and not measured."""
    for first in range(0, len(processes), AT_ONCE):
        group = processes[first : first + AT_ONCE]
        for process in group:
            process.worker = Worker(dataclasses.asdict(process.side), process.side.threads, process.preload)
        for process in group:
            assert process.worker is not None
            process.worker.wait_ready()
        served = [(process, [p for p in peers if p.process is process and p.kind]) for process in group]
        for process, forms in served:
            if forms and process.worker is not None:
                process.worker.send(f"warm {', '.join(p.form for p in forms)}")
        for process, forms in served:
            failed = process.worker.receive() if forms and process.worker is not None else None
            for peer in forms:
                peer.error = (failed or {}).get(peer.form)


def run_round(own: dict[tuple[str, str], Process], peers: Sequence[Peer], steps: int, lock: str | None) -> None:
    for peer in peers:
        base = own[peer.base, peer.precision]
        if peer.dropped or peer.failed() or base.error:
            continue
        with alone(lock):
            ours, theirs = base.run(steps), peer.process.run(steps, peer.form)
        if ours is not None and theirs is not None:
            peer.pairs.append((ours, theirs))


def drop_slower(peers: Sequence[Peer]) -> None:
    """Leave out attention forms that cannot become the faster one of their peer."""
    for peer in peers:
        group = (peer.name, peer.setting, peer.precision)
        siblings = [p for p in peers if (p.name, p.setting, p.precision) == group and p.pairs]
        least = min((seconds for p in siblings for _, seconds in p.pairs), default=0.0)
        peer.dropped = bool(peer.pairs) and min(seconds for _, seconds in peer.pairs) > SLOWER * least


def measure(
    options: argparse.Namespace, workload: str, precisions: Sequence[str], shim: str | None, rates: Rates | None
) -> list[Row]:
    """Rows of one workload: one for each precision, peer and setting."""
    peers = peers_of(options, workload, precisions, shim)
    attention = attentions(workload)[0]
    kinds = dict.fromkeys([("ortgraph", p) for p in precisions] + [(p.base, p.precision) for p in peers])
    own = {
        (kind, precision): Process(Side(kind, workload, attention, precision, options.threads, options.level))
        for kind, precision in kinds
    }
    processes = list({id(p.process): p.process for p in peers}.values())
    work: Counter[MatrixProduct] = Counter()
    try:
        start(list(own.values()))
        running = [p.worker for p in own.values() if not p.error]
        if running and running[0] is not None:  # else there is nothing to compare with
            work = Counter({MatrixProduct(*p): n for *p, n in running[0].ask("work") or ()})
            start(processes, peers)
            for number in range(1 + options.rounds):
                run_round(own, peers, options.steps, options.lock)
                if number == 0:  # the first round warms up
                    for peer in peers:
                        peer.pairs.clear()
                if number == TRIAL:
                    drop_slower(peers)
    finally:
        for process in (*own.values(), *processes):
            process.close()
    found: list[Row] = []
    for precision in precisions:
        peak = rates.peak(work, precision) if rates is not None and work else 0.0
        rows = [row_of(options, p, own[p.base, precision].error) for p in peers if p.precision == precision]
        for group in dict.fromkeys((r.peer, r.setting) for r in rows):
            best = fastest(r for r in rows if (r.peer, r.setting) == group)
            found.append(with_peak(best, total_flops(work), peak) if group[0] in (EAGER, COMPILE, RAW) else best)
    if not shim:  # nothing to tell MKL: the best setting is the stock one
        found += [dataclasses.replace(r, setting=STOCK) for r in found if r.setting == BEST]
    return found


def row_of(options: argparse.Namespace, peer: Peer, failed: str | None) -> Row:
    side = peer.process.side
    row = Row(
        side.workload,
        peer.precision,
        peer.name,
        peer.setting,
        form=peer.attention,
        threads=side.threads,
        steps=options.steps,
        machine=machine(),
    )
    error = f"{peer.base}: {failed}" if failed else peer.failed()
    if error or not peer.pairs:
        return dataclasses.replace(row, error=error or "no round was completed")
    return measured(row, peer.pairs)


def with_peak(row: Row, flops: int, peak: float) -> Row:
    if row.ms_ortgraph is None or not peak:
        return row
    return dataclasses.replace(row, peak_fraction=flops / (row.ms_ortgraph / 1e3) / peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", help="name or file.py:function; may be repeated")
    parser.add_argument("--all", action="store_true", help=", ".join(MEASURED))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "both"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of a side in a round")
    parser.add_argument("--level", default="O2")
    parser.add_argument("--sides", default="", help="comma-separated words of peers' names, for a quick look")
    parser.add_argument("--gradients", action="store_true", help="compare forward and backward alone too")
    parser.add_argument("--no-peak", action="store_true", help="do not measure the machine's matrix rates")
    parser.add_argument("--lock", help="file whose lock is held while a pair is timed")
    parser.add_argument("--json", nargs="?", const="-", help="file to write, or standard output")
    options = parser.parse_args()
    workloads = list(MEASURED) if options.all else options.workload or ["bert-256x4"]
    precisions = ("fp32", "bf16") if options.precision == "both" else (options.precision,)
    out = sys.stderr if options.json == "-" else sys.stdout
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        shim = build_shim(folder)
        rates = None if options.no_peak else Rates(options.threads, shim, options.lock)
        print(f"{machine()}, {options.threads} threads, {options.rounds} rounds of {options.steps} steps", file=out)
        if is_busy():
            print(
                "the machine is busy: PyTorch's threads wait for each other and lose most by it, ratios mean little",
                file=out,
            )
        for workload in workloads:
            found = measure(options, workload, precisions, shim, rates)
            rows += found
            for precision in precisions:
                print(dearest_first([r for r in found if r.precision == precision]), file=out, flush=True)
            if options.json and options.json != "-":
                write_json(rows, options.json)  # what is there stays when the run is cut short
    print(targets_table(rows), file=out)
    if options.json == "-":
        print(json.dumps([dataclasses.asdict(r) for r in rows]))


if __name__ == "__main__":
    main()
