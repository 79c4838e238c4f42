"""Attention forward and backward: compiled kernels against the expanded form of a session and PyTorch's own.

    python -m bench.attention [--rounds 15] [--threads 2] [--causal] [--json]

Sides: ``kernel`` and ``expansion`` are one graph (Attention and AttentionGrad) through the O2 preset, lowered by the
kernels or by products with a fused softmax, run by ONNX Runtime with everything bound; ``torch`` is
scaled_dot_product_attention and its backward. Sides run in turn within a round; times are the least of all rounds (other
load on the machine only adds), ratios medians over rounds. bf16: all of Q, K, V and dY are bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import onnx_ir as ir

SHAPES = ((8, 4, 128, 64), (4, 12, 128, 64), (2, 4, 512, 64), (1, 8, 1024, 64))
Step = Callable[[], object]


@contextlib.contextmanager
def _table(prefer: str) -> Iterator[str]:
    """A cost table in which the other alternative of attention is dear."""
    from ortgraph.ops.alternatives import SHIPPED_TABLE

    table = json.loads(SHIPPED_TABLE.read_text())
    for op in ("Attention", "AttentionGrad"):
        for form in ("kernel", "expansion"):
            table["entries"][f"{op}.{form}"] = {"fixed_us": 0.0 if form == prefer else 1e9, "ns_per_element": 0.0}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(table, file)
        file.flush()
        yield file.name


def _graph(shape: tuple[int, ...], dtype: ir.DataType, causal: bool, half: str) -> ir.Model:
    """Forward only, or forward and backward."""
    from ortgraph.graph import Signature, TrainingGraph
    from ortgraph.ops.builder import Builder

    values = [ir.val(n, dtype=dtype, shape=list(shape)) for n in ("q", "k", "v", "dy")]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 18}, name="attention")
    b = Builder(graph, "bench")
    options = {"scale": 1 / math.sqrt(shape[-1]), "is_causal": int(causal)}
    y, total = b.multi("Attention", *values[:3], outputs=2, domain="ortgraph", **options)
    made = [y]
    if half == "both":
        made += b.multi("AttentionGrad", values[3], *values[:3], y, total, outputs=3, domain="ortgraph", **options)
    for i, value in enumerate(made):
        value.name = f"out{i}"
        graph.outputs.append(value)
    signature = Signature(
        loss="out0", outputs=tuple(f"out{i}" for i in range(1, len(made))), inputs=("q", "k", "v", "dy")
    )
    return TrainingGraph(ir.Model(graph, ir_version=10), signature).model


def session_step(shape: tuple[int, ...], low: bool, causal: bool, half: str, prefer: str, threads: int) -> Step:
    """One run of a lowered graph with bound inputs and outputs."""
    import onnxruntime as ort

    from ortgraph.graph import TrainingGraph
    from ortgraph.manager.pass_manager import PassManager
    from ortgraph.manager.pipeline_text import parse_pipeline
    from ortgraph.ops import kernels
    from ortgraph.passes import pipelines
    from ortgraph.runtime.binding import bind_input, bind_output

    dtype = ir.DataType.BFLOAT16 if low else ir.DataType.FLOAT
    graph = TrainingGraph(_graph(shape, dtype, causal, half))
    with _table(prefer) as table:
        text = f"mark-optimized,lower{{table={table}}},{pipelines.AFTER_LOWERING}"
        PassManager(parse_pipeline(text)).run(graph)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(kernels.library_path()))
    proto = ir.serde.serialize_model(graph.model).SerializeToString()
    session = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    rng, numpy_type = np.random.default_rng(0), ml_dtypes.bfloat16 if low else np.float32
    arrays = {v.name: rng.standard_normal(shape).astype(numpy_type) for v in graph.graph.inputs}
    binding, results = session.io_binding(), []
    for name, array in arrays.items():
        bind_input(binding, str(name), array)
    for value in graph.graph.outputs:
        results.append(np.empty([int(d) for d in value.shape], numpy_type))  # type: ignore[union-attr, arg-type]
        bind_output(binding, str(value.name), results[-1].dtype, results[-1].shape, results[-1].ctypes.data)

    def step() -> object:
        session.run_with_iobinding(binding)
        return arrays, results

    return step


def torch_step(shape: tuple[int, ...], low: bool, causal: bool, half: str) -> Step:
    """PyTorch's fused attention."""
    import torch

    dtype = torch.bfloat16 if low else torch.float32
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=half == "both") for _ in range(3))
    dy = torch.randn(shape, dtype=dtype)

    def step() -> object:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return torch.autograd.grad(y, (q, k, v), dy) if half == "both" else y

    return step


def compare(sides: dict[str, Step], rounds: int, seconds: float = 0.03) -> dict[str, list[float]]:
    """Milliseconds of every side, one figure for each round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        step()
        step()
    for _ in range(rounds):
        for name, step in sides.items():
            best, begin = math.inf, time.perf_counter()
            while time.perf_counter() - begin < seconds:
                start = time.perf_counter()
                step()
                best = min(best, time.perf_counter() - start)
            times[name].append(best * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch

    from ortgraph.ops.spec import COMPOSITE, lookup

    torch.set_num_threads(options.threads)
    products = lookup(COMPOSITE, "Product").known
    rows = []
    for shape in SHAPES:
        for low in (False, True):
            for half in ("forward", "both"):
                sides: dict[str, Step] = {
                    side: session_step(shape, low, options.causal, half, side, options.threads)
                    for side in (("kernel",) if low and not products else ("kernel", "expansion"))
                }
                sides["torch"] = torch_step(shape, low, options.causal, half)
                times = compare(sides, options.rounds)
                ratios = {
                    name: statistics.median(a / b for a, b in zip(times[name], times["kernel"], strict=True))
                    for name in sides
                    if name != "kernel"
                }
                least = {name: round(min(t), 3) for name, t in times.items()}
                row = {
                    "shape": shape,
                    "precision": "bf16" if low else "fp32",
                    "half": half,
                    "ms": least,
                    "ratio": ratios,
                }
                rows.append(row)
                if not options.json:
                    words = "  ".join(f"{name} {ms:.3f} ms" for name, ms in least.items())
                    ratio = "  ".join(f"{name}/kernel {r:.2f}" for name, r in ratios.items())
                    print(f"{shape} {row['precision']} {half:8} {words}   {ratio}", flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
