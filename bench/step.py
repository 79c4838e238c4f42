"""Full training step (forward, backward, AdamW) against PyTorch at stock and at its best setting, and raw ONNX Runtime.

    python -m bench.step [--workload bert-256x4] [--rounds 15] [--json]

PyTorch's float32 products go through MKL, which takes a slow path on AMD processors. "best" tells MKL that the
processor is an Intel one (a preloaded function, ``mkl_serv_intel_cpu_true``), and takes the faster of eager and
torch.compile, with eager and sdpa attention. All sides run in processes of their own, a few steps each in turn;
ratios are taken per round, and the median of ratios is reported with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile

SHIM = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


class Side:
    """A worker process."""

    def __init__(self, side: str, workload: str, attention: str, threads: int, preload: str | None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if preload:
            environment["LD_PRELOAD"] = preload
        command = [sys.executable, "-m", "bench.worker", side, workload, attention, str(threads)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.rounds: list[float] = []

    def wait_ready(self, name: str) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{name} failed to start; run `python -m bench.worker ...` by hand to see why")

    def run(self, steps: int) -> float:
        """Median seconds of ``steps`` steps; kept as one round."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(f"run {steps}", file=self.process.stdin, flush=True)
        self.rounds.append(statistics.median(json.loads(self.process.stdout.readline())))
        return self.rounds[-1]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def build_shim(folder: str) -> str:
    source, library = pathlib.Path(folder, "shim.c"), pathlib.Path(folder, "shim.so")
    source.write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def ratio(side: Side, ours: Side) -> dict[str, float]:
    ratios = [a / b for a, b in zip(side.rounds, ours.rounds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="bert-256x4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--sides", default="", help="comma-separated names, for a quick look")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shim = build_shim(folder)
        wanted = {
            "ortgraph": (f"ortgraph-{options.level}", "sdpa", None),
            "raw joint graph in ONNX Runtime": ("raw", "sdpa", None),
            "ortgraph, forward and backward only": (f"gradients-{options.level}", "sdpa", None),
            "raw joint graph, forward and backward only": ("raw-gradients", "sdpa", None),
        }
        for attention in ("sdpa", "eager"):
            for kind in ("eager", "compile"):
                wanted[f"PyTorch {kind}, {attention} attention, stock"] = (kind, attention, None)
                wanted[f"PyTorch {kind}, {attention} attention, best"] = (kind, attention, shim)
        if options.sides:
            keep = ["ortgraph", *options.sides.split(",")]
            wanted = {k: v for k, v in wanted.items() if any(word in k for word in keep)}
        sides = {}
        try:
            for name, (kind, attention, preload) in wanted.items():
                sides[name] = Side(kind, options.workload, attention, options.threads, preload)
                sides[name].wait_ready(name)  # one after the other: start-up is not measured, but it is heavy
            for side in sides.values():
                side.run(2)
                side.rounds.clear()
            for _ in range(options.rounds):
                for side in sides.values():
                    side.run(options.steps)
            report(options, sides)
        finally:
            for side in sides.values():
                side.close()


def report(options: argparse.Namespace, sides: dict[str, Side]) -> None:
    ours = sides["ortgraph"]
    rows = {n: {"ms": 1e3 * statistics.median(s.rounds), **ratio(s, ours)} for n, s in sides.items()}
    if options.json:
        print(
            json.dumps({"workload": options.workload, "threads": options.threads, "machine": machine(), "sides": rows})
        )
        return
    print(
        f"{options.workload}, {options.threads} threads, {options.rounds} rounds of {options.steps} steps, {machine()}"
    )
    for name, row in rows.items():
        print(
            f"{name:48} {row['ms']:8.1f} ms   {row['median']:5.2f} x ortgraph's time  ({row['low']:.2f} to {row['high']:.2f})"
        )
    if "raw joint graph, forward and backward only" in sides and "ortgraph, forward and backward only" in sides:
        r = ratio(sides["raw joint graph, forward and backward only"], sides["ortgraph, forward and backward only"])
        print(f"speed-up over the raw joint graph, forward and backward only: {r['median']:.2f}")
    for word in ("best", "stock"):
        peers = {n: r["median"] for n, r in rows.items() if n.endswith(word)}
        if peers:
            name = min(peers, key=lambda n: peers[n])
            print(f"speed-up over the better of PyTorch at {word}: {peers[name]:.2f}  ({name})")


def machine() -> str:
    model = platform.processor() or platform.machine()
    for line in (
        pathlib.Path("/proc/cpuinfo").read_text().splitlines() if pathlib.Path("/proc/cpuinfo").exists() else ()
    ):
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
