"""The machine's best rate on given matrix products: ONNX Runtime's, PyTorch's and our own kernel, in turn.

    python -m bench.rates --product 1x1024x256x1024 [--precision bf16] [--threads 2] [--json]

A product is BATCHxROWSxINNERxCOLUMNS. Each contender runs in a process of its own and multiplies fresh operands (none is
packed beforehand, since weights change every step); the least time counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from bench.matrix_work import MatrixProduct
from bench.processes import Worker, alone, build_shim, machine

COVERED = 0.98  # of the operations of a workload: shapes beyond are not measured
_SECONDS = 0.05  # of each contender, shape and pass
_MOST, _LEAST = 20, 3  # runs in a pass
Contender = Callable[[MatrixProduct], Callable[[], Any]]


def onnxruntime_product(threads: int, precision: str) -> Contender:
    """MatMul of ONNX Runtime (MLAS), float32."""
    import numpy as np
    import onnxruntime as ort
    from onnx import TensorProto, helper

    if precision != "fp32":
        raise ValueError("ONNX Runtime's CPU provider has no MatMul in low precision")

    def make(p: MatrixProduct) -> Callable[[], Any]:
        shapes = {"A": _left(p), "B": _right(p), "Y": _result(p)}
        values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
        graph = helper.make_graph([helper.make_node("MatMul", ["A", "B"], ["Y"])], "product", values[:2], values[2:])
        session = ort.InferenceSession(_model(graph, ""), _options(threads), providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        held = {n: np.random.default_rng(0).standard_normal(s, np.float32) for n, s in shapes.items()}
        for name in ("A", "B"):
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(held[name]))
        binding.bind_ortvalue_output("Y", ort.OrtValue.ortvalue_from_numpy(held["Y"]))
        # the binding does not keep the arrays alive
        return lambda held=held: session.run_with_iobinding(binding)

    return make


def kernel_product(threads: int, precision: str) -> Contender:
    """Our own kernel, operands of the low type and a float32 result. They are constants of the model, so that any type
    can be given; nothing is folded or packed beforehand."""
    import numpy as np
    import onnx_ir as ir
    import onnxruntime as ort

    from ortgraph.ops import kernels
    from ortgraph.ops.builder import Builder
    from ortgraph.ops.spec import COMPOSITE

    if (COMPOSITE, "Product") not in kernels.BY_OPERATOR:
        raise ValueError("there is no kernel for products")
    low = {"fp32": ir.DataType.FLOAT, "bf16": ir.DataType.BFLOAT16}[precision]
    options = _options(threads)
    options.register_custom_ops_library(str(kernels.library_path()))

    def make(p: MatrixProduct) -> Callable[[], Any]:
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 18, COMPOSITE: 1, kernels.DOMAIN: 1}, name="product")
        b = Builder(graph, "bench")
        draw = np.random.default_rng(0)
        operands = [b.const(draw.standard_normal(s, np.float32).astype(low.numpy())) for s in (_left(p), _right(p))]
        (composite,) = b.multi(
            "Product", *operands, outputs=1, domain=COMPOSITE, precision=precision, to=int(ir.DataType.FLOAT)
        )
        node = composite.producer()
        assert node is not None
        why = kernels.reason(node)
        if why:
            raise ValueError(why)
        (made,) = kernels.build(b, node)
        graph.remove(node, safe=True)
        made.name = "Y"
        graph.outputs.append(made)
        text = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
        session = ort.InferenceSession(text, options, providers=["CPUExecutionProvider"])
        binding, held = session.io_binding(), np.zeros(_result(p), np.float32)
        binding.bind_ortvalue_output("Y", ort.OrtValue.ortvalue_from_numpy(held))
        # the binding does not keep the array alive
        return lambda held=held: session.run_with_iobinding(binding)

    return make


def torch_product(threads: int, precision: str) -> Contender:
    """``mm`` or ``bmm`` of PyTorch into a given result."""
    import torch

    torch.set_num_threads(threads)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]

    def make(p: MatrixProduct) -> Callable[[], Any]:
        a, b, out = (torch.randn(s).to(kind) for s in (_left(p), _right(p), _result(p)))
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        return lambda: multiply(a, b, out=out)

    return make


CONTENDERS: dict[str, Callable[[int, str], Contender]] = {
    "ONNX Runtime": onnxruntime_product,
    "PyTorch": torch_product,
    "ortgraph": kernel_product,
}


def _batched(p: MatrixProduct, *dims: int) -> list[int]:
    return [p.batch, *dims] if p.batch > 1 else [*dims]


def _left(p: MatrixProduct) -> list[int]:
    return _batched(p, p.rows, p.inner)


def _right(p: MatrixProduct) -> list[int]:
    return _batched(p, p.inner, p.columns)


def _result(p: MatrixProduct) -> list[int]:
    return _batched(p, p.rows, p.columns)


def _options(threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the others are waiting in turn
    options.log_severity_level = 4
    return options


def _model(graph: Any, domain: str) -> bytes:
    from onnx import helper

    return helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, 18)], ir_version=10).SerializeToString()


def best_seconds(run: Callable[[], Any]) -> float:
    """The least time of some runs."""
    run()
    best, spent, runs = math.inf, 0.0, 0
    while runs < _LEAST or (spent < _SECONDS and runs < _MOST):
        started = time.perf_counter()
        run()
        took = time.perf_counter() - started
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def serve(contender: str, threads: int, precision: str, answers: Any) -> None:
    """A contender's process: each line is a product, the answer its seconds."""
    try:
        make = CONTENDERS[contender](threads, precision)
    except ValueError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(best_seconds(make(MatrixProduct(*json.loads(line))))), file=answers, flush=True)


class Rates:
    """Best seconds of products, measured once each.

    Attributes:
        best: (seconds, contender) by precision and product.
    """

    def __init__(self, threads: int, shim: str | None, lock: str | None = None, passes: int = 3) -> None:
        self._threads, self._shim, self._lock, self._passes = threads, shim, lock, passes
        self.best: dict[tuple[str, MatrixProduct], tuple[float, str]] = {}

    def peak(self, work: Counter[MatrixProduct], precision: str) -> float:
        """FLOP/s of the workload's matrix work at the best rate of every shape; 0 when nothing could be measured."""
        chosen = covering(work, COVERED)
        self._measure([p for p in chosen if (precision, p) not in self.best], precision)
        seconds = {p: self.best[precision, p][0] for p in chosen if (precision, p) in self.best}
        return rate_over(work, seconds)

    def _measure(self, products: Sequence[MatrixProduct], precision: str) -> None:
        if not products:
            return
        workers = {
            name: Worker([name, self._threads, precision], self._threads, self._shim, module="bench.rates")
            for name in CONTENDERS
        }
        try:
            for worker in workers.values():
                worker.wait_ready()
            with alone(self._lock):
                for _ in range(self._passes):
                    for product in products:
                        self._compare(product, precision, workers)
        finally:
            for worker in workers.values():
                worker.close()

    def _compare(self, product: MatrixProduct, precision: str, workers: dict[str, Worker]) -> None:
        for name, worker in workers.items():
            seconds = worker.ask(json.dumps([product.batch, product.rows, product.inner, product.columns]))
            known = self.best.get((precision, product), (math.inf, ""))
            if seconds is not None:
                self.best[precision, product] = min(known, (seconds, name))


def covering(work: Counter[MatrixProduct], share: float) -> list[MatrixProduct]:
    """The products that make up ``share`` of the operations, those with most first."""
    order = sorted(work, key=lambda p: (-work[p] * p.flops, p))
    total, found, chosen = sum(work[p] * p.flops for p in order), 0, []
    for p in order:
        if found >= share * total:
            break
        found += work[p] * p.flops
        chosen.append(p)
    return chosen


def rate_over(work: Counter[MatrixProduct], seconds: dict[MatrixProduct, float]) -> float:
    """Operations over the time of all measured products, each as often as it occurs."""
    spent = math.fsum(work[p] * s for p, s in seconds.items())
    return sum(work[p] * p.flops for p in seconds) / spent if spent else 0.0


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries that print do not disturb the answers
        serve(*json.loads(sys.argv[1]), answers)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--product", action="append", default=[], help="BATCHxROWSxINNERxCOLUMNS; may be repeated")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    products = [MatrixProduct(*map(int, text.split("x"))) for text in options.product] or [
        MatrixProduct(1, 1024, 256, 1024)
    ]
    with tempfile.TemporaryDirectory() as folder:
        rates = Rates(options.threads, build_shim(folder))
        rates.peak(Counter(products), options.precision)
    found = [
        {"product": f"{p.batch}x{p.rows}x{p.inner}x{p.columns}", "gflops_per_s": p.flops / s / 1e9, "by": name}
        for (_, p), (s, name) in rates.best.items()
    ]
    if options.json:
        print(json.dumps({"machine": machine(), "precision": options.precision, "rates": found}))
        return
    print(f"{machine()}, {options.precision}")
    for row in found:
        print(f"{row['product']:24} {row['gflops_per_s']:8.0f} GFLOP/s  {row['by']}")


if __name__ == "__main__":
    main()
