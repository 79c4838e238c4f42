"""Matrix products of training steps: our kernel, ONNX Runtime's (MLAS, float32) and PyTorch's, GFLOP/s per shape.

    python -m bench.products [--only TEXT] [--passes 3] [--threads 2] [--lock FILE] [--json]

Shapes are those of BERT 256x4 (8 x 128 tokens) and BERT 768x4 (4 x 128): forward, gradients of inputs and of weights, heads
over a vocabulary, attention. Operands are fresh in every run and nothing is packed beforehand, since weights change every
step. Sides take turns, each for some runs at a time; PyTorch runs at its best setting. Rates are the best of all passes,
since other load only slows; on a busy machine one thread is what can be compared. ``ratio`` is the median over passes of
the better peer's time (of the same precision) over ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from bench.processes import Worker, alone, build_shim, machine
from bench.rates import best_seconds

_ORT, _TORCH = "onnxruntime", "PyTorch"
# Name -> (process, precision, type of operands, type of the result)
SIDES = {
    "mlas.fp32": (_ORT, "fp32", "fp32", "fp32"),
    "torch.fp32": (_TORCH, "fp32", "fp32", "fp32"),
    "ours.fp32": (_ORT, "fp32", "fp32", "fp32"),
    "torch.bf16": (_TORCH, "bf16", "bf16", "bf16"),
    "ours.bf16": (_ORT, "bf16", "bf16", "bf16"),
    "ours.bf16>fp32": (_ORT, "bf16", "bf16", "fp32"),
    "ours.fp32>bf16": (_ORT, "bf16", "fp32", "fp32"),
}
PEERS = {"ours.fp32": ("mlas.fp32", "torch.fp32"), "ours.bf16": ("torch.bf16",)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A [M, K] (or [K, M]) times B [K, N] (or [N, K]), ``batch`` times."""

    name: str
    m: int
    n: int
    k: int
    trans_a: bool = False
    trans_b: bool = False
    batch: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    def shapes(self) -> tuple[list[int], list[int], list[int]]:
        """Of A, B and the result as they lie in memory."""
        lead = [self.batch] if self.batch > 1 else []
        a = [self.k, self.m] if self.trans_a else [self.m, self.k]
        b = [self.n, self.k] if self.trans_b else [self.k, self.n]
        return [*lead, *a], [*lead, *b], [*lead, self.m, self.n]


def _layers(name: str, tokens: int, width: int, wide: int) -> list[Case]:
    return [
        Case(f"{name} {width}->{width}", tokens, width, width, trans_b=True),
        Case(f"{name} {width}->{wide}", tokens, wide, width, trans_b=True),
        Case(f"{name} {wide}->{width}", tokens, width, wide, trans_b=True),
        Case(f"{name} dX {wide}->{width}", tokens, width, wide),
        Case(f"{name} dW {width}x{width}", width, width, tokens, trans_a=True),
        Case(f"{name} dW {wide}x{width}", wide, width, tokens, trans_a=True),
    ]


CASES = [
    Case("square 1024", 1024, 1024, 1024),
    *_layers("256x4", 1024, 256, 1024),
    *_layers("768x4", 512, 768, 3072),
    Case("head 8192", 1024, 8192, 256, trans_b=True),
    Case("head 8192 dX", 1024, 256, 8192),
    Case("head 8192 dW", 8192, 256, 1024, trans_a=True),
    Case("head 30522 dX", 512, 256, 30522),
    Case("attention QK", 128, 128, 64, trans_b=True, batch=32),
    Case("attention PV", 128, 64, 128, batch=32),
    Case("attention dK", 128, 64, 128, trans_a=True, batch=32),
    Case("small 64x2", 64, 2, 256),
]


def _onnxruntime(threads: int) -> Callable[[str, Case], Callable[[], Any]]:
    import numpy as np
    import onnx_ir as ir
    import onnxruntime as ort

    from ortgraph.ops import kernels
    from ortgraph.ops.builder import Builder
    from ortgraph.ops.precision import PRECISIONS
    from ortgraph.ops.spec import CONTRIB

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(kernels.library_path()))

    def make(side: str, case: Case) -> Callable[[], Any]:
        _, precision, operand, result = SIDES[side]
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="product")
        b, draw = Builder(graph, "bench"), np.random.default_rng(0)
        # Constants, so that any type can be given; nothing is folded or packed in advance with optimizations off.
        a_shape, b_shape, y_shape = case.shapes()
        values = [
            b.const(draw.standard_normal(s, np.float32).astype(PRECISIONS[operand].numpy())) for s in (a_shape, b_shape)
        ]
        trans = {"transA": int(case.trans_a), "transB": int(case.trans_b)}
        if side.startswith("mlas"):
            plain = not (case.trans_a or case.trans_b)
            made = b.op("MatMul", *values) if plain else b.op("FusedMatMul", *values, domain=CONTRIB, **trans)
        else:
            name = kernels.variant_name("Product", [PRECISIONS[result]])
            made = b.op(name, *values, domain=kernels.DOMAIN, precision=precision, **trans)
        made.name = "Y"
        graph.outputs.append(made)
        text = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
        session = ort.InferenceSession(text, options, providers=["CPUExecutionProvider"])
        binding, held = session.io_binding(), np.zeros(y_shape, np.float32)
        if result == "fp32":
            binding.bind_output("Y", "cpu", 0, np.float32, y_shape, held.ctypes.data)
        else:
            binding.bind_output("Y")

        def run(_: Any = held) -> None:  # the binding does not keep the array alive
            session.run_with_iobinding(binding)

        return run

    return make


def _torch(threads: int) -> Callable[[str, Case], Callable[[], Any]]:
    import torch

    torch.set_num_threads(threads)

    def make(side: str, case: Case) -> Callable[[], Any]:
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[SIDES[side][1]]
        a, b, out = (torch.randn(s).to(kind) for s in case.shapes())
        a, b = (a.mT if case.trans_a else a), (b.mT if case.trans_b else b)
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        return lambda: multiply(a, b, out=out)

    return make


def serve(process: str, threads: int, answers: Any) -> None:
    """A process: each line is a side and a case, the answer its seconds."""
    make = _onnxruntime(threads) if process == _ORT else _torch(threads)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        side, case = json.loads(line)
        print(json.dumps(best_seconds(make(side, Case(*case)))), file=answers, flush=True)


def compare(case: Case, workers: dict[str, Worker], passes: int) -> dict[str, Any]:
    """GFLOP/s of every side, and ratios of times to the better peer."""
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(passes):
        for side, (process, *_) in SIDES.items():
            seconds = workers[process].ask(json.dumps([side, dataclasses.astuple(case)]))
            times[side].append(math.inf if seconds is None else seconds)
    rates = {side: case.flops / min(found) / 1e9 for side, found in times.items()}
    ratios = {
        side: statistics.median(min(times[p][i] for p in peers) / times[side][i] for i in range(passes))
        for side, peers in PEERS.items()
    }
    return {"case": case.name, **rates, **{f"ratio.{side}": ratio for side, ratio in ratios.items()}}


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries that print do not disturb the answers
        serve(*json.loads(sys.argv[1]), answers)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lock", help="a file whose lock is held while measuring")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shim = build_shim(folder)
        workers = {
            p: Worker([p, options.threads], options.threads, shim if p == _TORCH else None, module="bench.products")
            for p in (_ORT, _TORCH)
        }
        for worker in workers.values():
            worker.wait_ready()
        heads = [*SIDES, *(f"ratio.{side}" for side in PEERS)]
        if not options.json:
            print(f"{machine()}, {options.threads} threads, GFLOP/s")
            print(f"{'':20}", *(f"{h:>15}" for h in heads), flush=True)
        rows = []
        with alone(options.lock):
            for case in [c for c in CASES if options.only in c.name]:
                rows.append(compare(case, workers, options.passes))
                if not options.json:
                    print(_line(rows[-1], heads), flush=True)
        errors = [f"{name}: {w.error}" for name, w in workers.items() if w.error]
        for worker in workers.values():
            worker.close()
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows, "errors": errors}))
        return
    print(*errors, sep="\n", end="")


def _line(row: dict[str, Any], heads: list[str]) -> str:
    cells = (f"{row[h]:15.2f}" if h.startswith("ratio") else f"{row[h]:15.0f}" for h in heads)
    return " ".join([f"{row['case']:20}", *cells])


if __name__ == "__main__":
    main()
