"""Full training step (forward, backward, AdamW) against PyTorch at stock and at its best setting, and raw ONNX Runtime.

    python -m bench.step [--workload bert-256x4 | --workload file.py:build | --all] [--precision fp32|bf16|both]
                         [--rounds 7] [--steps 3] [--threads 2] [--json out.json]

PyTorch's products go through MKL, which takes a slow path on AMD processors. "best" tells MKL that the processor is
an Intel one (a preloaded function, ``mkl_serv_intel_cpu_true``; on Intel processors best is stock), and of eager and
torch.compile each counts with the faster of eager and sdpa attention, float32 with fused AdamW and bf16 by autocast.
The raw joint graph is what capture gives, AdamW in the graph, with all of ONNX Runtime's own optimizations.

Every side is a process of its own. Our steps and those of a peer alternate, a few steps each; a ratio is taken per
pair, and the median is reported with its quartiles. A peer that fails becomes a row with ``error``. Attention forms
that are slower than their sibling by a tenth after two rounds are left out. ``peak_fraction`` is the matrix work of the
captured graph per second of our step, over the machine's best rate on the same products (``bench.rates``).
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
from bench.processes import Worker, alone, build_shim, machine
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
    """A peer's process, and (our seconds, its seconds) of every round."""

    name: str
    setting: str
    side: Side
    preload: str | None
    pairs: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    worker: Worker | None = None
    base: str = "ortgraph"
    error: str | None = None
    dropped: bool = False

    def start(self) -> None:
        self.worker = Worker(dataclasses.asdict(self.side), self.side.threads, self.preload)

    def wait(self) -> None:
        assert self.worker is not None
        self.worker.wait_ready()
        self.error = self.worker.error

    @property
    def runs(self) -> bool:
        return self.worker is not None and self.error is None and not self.dropped

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


def peers_of(options: argparse.Namespace, workload: str, precision: str, shim: str | None) -> list[Peer]:
    """Everything that our step is compared with, those first whose compiled code serves the others."""

    def side(kind: str, attention: str = "") -> Side:
        return Side(kind, workload, attention, precision, options.threads, options.level)

    forms = attentions(workload)
    found = [Peer(RAW, ALL, side("raw", forms[0]), None)] if precision == "fp32" else []
    if options.gradients and precision == "fp32":
        found.append(Peer(f"{RAW}, forward and backward", ALL, side("raw-gradients", forms[0]), None, base="gradients"))
    settings = [(STOCK, None), (BEST, shim)] if shim else [(BEST, None)]
    for setting, preload in settings:
        for name, kind in ((EAGER, "eager"), (COMPILE, "compile")):
            found += [Peer(name, setting, side(kind, form), preload) for form in forms]
    words = [w.strip() for w in options.sides.split(",") if w.strip()]
    labels = {id(p): f"{p.name} {p.side.kind} {p.side.attention} {p.setting}" for p in found}
    return [p for p in found if not words or any(w in labels[id(p)] for w in words)]


def start(peers: Sequence[Peer]) -> None:
    """Start processes, a few at a time: what they do at the start is not measured, but it is heavy."""
    for first in range(0, len(peers), AT_ONCE):
        group = peers[first : first + AT_ONCE]
        for peer in group:
            peer.start()
        for peer in group:
            peer.wait()


def run_round(own: dict[str, Peer], peers: Sequence[Peer], steps: int, lock: str | None) -> None:
    for peer in peers:
        if not peer.runs:
            continue
        base = own[peer.base]
        assert peer.worker is not None and base.worker is not None
        with alone(lock):
            ours, theirs = base.worker.run(steps), peer.worker.run(steps)
        base.error, peer.error = base.worker.error, peer.worker.error
        if ours is not None and theirs is not None:
            peer.pairs.append((ours, theirs))


def drop_slower(peers: Sequence[Peer]) -> None:
    """Leave out attention forms that cannot become the faster one of their peer."""
    for peer in peers:
        siblings = [p for p in peers if (p.name, p.setting) == (peer.name, peer.setting) and p.pairs]
        least = min((seconds for p in siblings for _, seconds in p.pairs), default=0.0)
        if peer.pairs and min(seconds for _, seconds in peer.pairs) > SLOWER * least:
            peer.dropped = True
            peer.close()


def measure(
    options: argparse.Namespace, workload: str, precision: str, shim: str | None, rates: Rates | None
) -> list[Row]:
    """Rows of one workload: one for each peer and setting."""
    peers = peers_of(options, workload, precision, shim)
    kinds = list(dict.fromkeys(("ortgraph", *(p.base for p in peers))))
    form = attentions(workload)[0]
    own = {
        kind: Peer(kind, "", Side(kind, workload, form, precision, options.threads, options.level), None)
        for kind in kinds
    }
    work: Counter[MatrixProduct] = Counter()
    try:
        start(list(own.values()))
        ours = own["ortgraph"]
        if ours.error is None and ours.worker is not None:
            work = Counter({MatrixProduct(*p): n for *p, n in ours.worker.ask("work") or ()})
            start(peers)
            for number in range(1 + options.rounds):
                run_round(own, peers, options.steps, options.lock)
                if number == 0:  # the first round warms up
                    for peer in peers:
                        peer.pairs.clear()
                if number == TRIAL:
                    drop_slower(peers)
    finally:
        for peer in (*own.values(), *peers):
            peer.close()
    failed = {kind: f"{kind}: {p.error}" for kind, p in own.items() if p.error}
    rows = [row_of(options, peer, failed.get("ortgraph") or failed.get(peer.base)) for peer in peers]
    groups = dict.fromkeys((r.peer, r.setting) for r in rows)
    found = [fastest(r for r in rows if (r.peer, r.setting) == group) for group in groups]
    if not shim:  # nothing to tell MKL: the best setting is the stock one
        found += [dataclasses.replace(r, setting=STOCK) for r in found if r.setting == BEST]
    if rates is None or not work or failed:
        return found
    peak, flops = rates.peak(work, precision), total_flops(work)
    return [with_peak(row, flops, peak) for row in found]


def row_of(options: argparse.Namespace, peer: Peer, failed: str | None) -> Row:
    side = peer.side
    row = Row(
        side.workload,
        side.precision,
        peer.name,
        peer.setting,
        form=side.attention if peer.name in (EAGER, COMPILE) else "",
        threads=side.threads,
        steps=options.steps,
        machine=machine(),
    )
    error = failed or peer.error
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
        for workload in workloads:
            for precision in precisions:
                found = measure(options, workload, precision, shim, rates)
                rows += found
                print(dearest_first(found), file=out, flush=True)
                if options.json and options.json != "-":
                    write_json(rows, options.json)  # what is there stays when the run is cut short
    print(targets_table(rows), file=out)
    if options.json == "-":
        print(json.dumps([dataclasses.asdict(r) for r in rows]))


if __name__ == "__main__":
    main()
