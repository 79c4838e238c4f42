"""Measuring prices of nodes: every case several times in a row, on memory that is partly in cache, as in a real step.

Two kinds of price come out. ``points``: microseconds at some sizes, in bytes moved, for what depends on size only.
``terms``: a sum over the features of ``Work`` (operations, bytes of each operand), fitted with coefficients that are not
negative, for products and convolutions.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortgraph.ops import kernels
from ortgraph.ops.calibrate import Case, case_graph
from ortgraph.ops.node_cases import CONVOLUTIONS, NODE_CASES, PRODUCTS, SIZES
from ortgraph.ops.spec import CONTRIB, KERNELS, lookup
from ortgraph.ops.targets import reason_not_run
from ortgraph.ops.work import TERMS, Work, work_of

logger = logging.getLogger(__name__)
_POOL = 24 << 20  # bytes that inputs and outputs rotate through; weights and states of an update through more
_BYTES, _COPIES = (
    6 << 20,
    16,
)  # a run moves so many bytes, if that takes no more copies: short runs are seldom disturbed
_TRIES, _RUNS, _AGREE = 10, 40, 3
_RUNS_BUSY = 400  # where others want the processors too, few runs have all of them, and slower ones agree as well
_OPSET = 18
# Operators nobody measured are priced like one of their class.
_LIKE = {
    "elementwise": "Add", "transcendental": "Exp", "reduction": "ReduceSum", "leading_reduction": "ReduceSum:leading",
    "softmax": "Softmax", "norm": "LayerNormalization", "copy": "Concat", "transpose": "Transpose", "gather": "Gather",
    "scatter": "ScatterElements", "pool": "MaxPool", "random": "ortgraph.kernels.Dropout",
    "optimizer": "ortgraph.kernels.AdamW", "other": "ReduceMean", "convolution": "Conv", "product": "product:NN",
    "convolution:grouped": "Conv:grouped", "elementwise:row": "Add:row",
    "elementwise:column": "Add:column", "transpose:rows": "Transpose:rows",
}  # fmt: skip


@dataclasses.dataclass
class Sample:
    """A session that runs one node a few times, and how long that took.

    Attributes:
        work: What one run of the node does.
        run: Runs all copies.
        copies: How many.
        shortest: Seconds of the shortest runs, ascending.
        runs: How many runs were measured.
    """

    work: Work
    run: Callable[[], object]
    copies: int
    shortest: list[float] = dataclasses.field(default_factory=list)
    runs: int = 0

    def measure(self) -> None:
        """Run once."""
        started = time.perf_counter()
        self.run()
        seconds = time.perf_counter() - started
        self.shortest = sorted((*self.shortest, seconds))[:_AGREE]
        self.runs += 1

    def settled(self, runs: int) -> bool:
        """Whether the shortest runs agree, after so many at least."""
        return self.runs >= runs and self.shortest[-1] <= 1.04 * self.shortest[0]

    def microseconds(self, overhead: float = 0.0) -> float:
        """Of one copy; ``overhead`` is what a run takes by itself."""
        return max(self.shortest[0] * 1e6 - overhead, 0.05) / self.copies


class Pool:
    """Memory that the operands of all samples share, handed out in turn."""

    def __init__(self, nbytes: int) -> None:
        self.floats = np.random.default_rng(0).random(nbytes // 4, dtype=np.float32) + 0.1
        self._at = 0

    def take(self, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
        """An array at the next place; its content is that of the pool, or what was written there last."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.floats.nbytes:
            return np.ones(shape, dtype)
        if self._at + nbytes > self.floats.nbytes:
            self._at = 0
        view = self.floats.view(np.uint8)[self._at : self._at + nbytes].view(dtype).reshape(shape)
        self._at += -(-nbytes // 64) * 64
        return view


def measure_nodes(
    target: str, threads: int = 2, seconds: float = 25.0, cases: Sequence[Case] = NODE_CASES, products: bool = True
) -> dict[str, Any]:
    """Prices by operator and class (see ``ortgraph.analysis.cost``).

    Args:
        target: Operators of which runtime.
        threads: Threads of one operator.
        seconds: All cases are measured in turn until this time is over, at least twice; the shortest time counts.
        cases: Operators priced by size.
        products: Also fit products and convolutions.
    """
    pools = {False: (Pool(_POOL), Pool(_POOL // 2)), True: (Pool(2 * _POOL), Pool(2 * _POOL))}
    graphs = [g for case in cases if _usable(case, target) for g in _sizes(case)]
    if products:
        graphs += [_product(*p, a, b) for p in PRODUCTS for a in (0, 1) for b in (0, 1)]
        graphs += [g for c in CONVOLUTIONS for g in _convolutions(c, target)]
    samples = [_sample(graph, feeds, threads, pools) for graph, feeds in graphs]
    tiny = case_graph(Case("Neg", lambda size: ((8,),), domain=""), 0, None)
    one, many = (_sample(*tiny, threads, pools, copies) for copies in (1, _COPIES))
    end, rounds = time.perf_counter() + seconds, 0
    needed = _RUNS_BUSY if is_busy() else _RUNS
    open_samples = [one, many, *samples]
    while open_samples and (rounds < 2 or time.perf_counter() < end):
        rounds += 1
        for sample in open_samples:
            for _ in range(_TRIES):
                sample.measure()
        open_samples = [s for s in open_samples if not s.settled(needed)]
    logger.info("%d of %d operators settled in %d rounds", len(samples) - len(open_samples), len(samples), rounds)
    overhead = max(0.0, _COPIES * (one.microseconds() - many.microseconds()) / (_COPIES - 1))
    free = {"points": [[0, round(many.microseconds(overhead), 2)]]}  # an alias: what any node takes
    found: dict[str, Any] = {**prices(samples, overhead), "free": free}
    return dict(sorted(found.items()))


def is_busy() -> bool:
    """Whether other processes have kept this machine's processors busy in the last minute."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.6 * (os.cpu_count() or 1)


def prices(samples: Sequence[Sample], overhead: float = 0.0) -> dict[str, dict[str, object]]:
    """Table entries from measured samples; ``overhead`` is the microseconds that a run takes beside its nodes."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.work.names[0], []).append(sample)
    found: dict[str, dict[str, object]] = {}
    for name, group in groups.items():
        found[name] = _fitted(group, overhead) if group[0].work.kind in TERMS else _points(group, overhead)
    for name, like in _LIKE.items():
        if like in found:
            found[name] = {**found[like], "like": like}
    return dict(sorted(found.items()))


def _points(group: Sequence[Sample], overhead: float) -> dict[str, object]:
    points: list[list[float]] = []
    for sample in sorted(group, key=lambda s: s.work.moved):
        least = points[-1][1] if points else 0.0
        points.append([sample.work.moved, round(max(sample.microseconds(overhead), least), 2)])
    return {"points": points}


def _fitted(group: Sequence[Sample], overhead: float) -> dict[str, object]:
    """Coefficients that make the sum of squared *relative* errors small."""
    names = TERMS[group[0].work.kind]
    rows = np.array([[s.work.features.get(n, 0.0) for n in names] for s in group])
    times = np.array([s.microseconds(overhead) for s in group])
    solved = non_negative_least_squares(rows / times[:, None], np.ones(len(group)))
    return {"terms": {n: float(f"{x:.4g}") for n, x in zip(names, solved, strict=True)}}


def non_negative_least_squares(a: np.ndarray, b: np.ndarray, sweeps: int = 3000) -> np.ndarray:
    """The x >= 0 that makes |a x - b| smallest, by coordinate descent. Shapes [n, k], [n] to [k]."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    gram, target = a.T @ a, a.T @ b
    x = np.zeros(a.shape[1])
    for _ in range(sweeps):
        for i in range(len(x)):
            if gram[i, i] > 0:
                x[i] = max(0.0, x[i] + (target[i] - gram[i] @ x) / gram[i, i])
    return x / scale


def _usable(case: Case, target: str) -> bool:
    node = next(iter(case_graph(case, 0, None)[0]))
    if case.domain == KERNELS and not kernels.available():
        return False
    return lookup(case.domain, case.op_type).known and reason_not_run(node, target, _OPSET) is None


def _sizes(case: Case) -> Iterator[tuple[ir.Graph, dict[str, np.ndarray]]]:
    for size in range(SIZES):
        yield case_graph(case, size, None)


def _product(m: int, n: int, k: int, batch: int, turn_a: int, turn_b: int) -> tuple[ir.Graph, dict[str, np.ndarray]]:
    lead = (batch,) if batch > 1 else ()
    a, b = (k, m) if turn_a else (m, k), (n, k) if turn_b else (k, n)
    options = {"transA": turn_a, "transB": turn_b}
    op_type, domain = ("FusedMatMul", CONTRIB) if batch > 1 else ("Gemm", "")
    case = Case(op_type, lambda size: ((*lead, *a), (*lead, *b)), 1, options, domain=domain)
    return case_graph(case, 0, None)


def _convolutions(
    sizes: tuple[int, int, int, int, int, int, int], target: str
) -> Iterator[tuple[ir.Graph, dict[str, np.ndarray]]]:
    n, c, f, d, k, stride, group = sizes
    out = (d + 2 * (k // 2) - k) // stride + 1
    options = {"pads": [k // 2] * 4, "strides": [stride] * 2, "group": group, "kernel_shape": [k, k]}
    x, w, y = (n, c, d, d), (f, c // group, k, k), (n, f, out, out)
    yield case_graph(Case("Conv", lambda size: (x, w), 1, options, domain=""), 0, None)
    grad = Case("ConvGrad", lambda size: (y, x, w), 2, {**options, "dilations": [1, 1]}, domain=CONTRIB)
    if _usable(grad, target):
        yield case_graph(grad, 0, None)


def _sample(
    graph: ir.Graph,
    feeds: dict[str, np.ndarray],
    threads: int,
    pools: dict[bool, tuple[Pool, Pool]],
    copies: int = 0,
) -> Sample:
    node = next(iter(graph))
    work = work_of(node)
    sources, results = pools[work.kind == "optimizer"]
    copies = copies or max(1, min(_COPIES, _BYTES // max(work.moved, 1), int(2e8) // max(work.flops, 1)))
    outputs = [(o, tuple(o.shape or ()), o.dtype) for o in node.outputs]
    model = _repeated(graph, copies)
    session = _session(model, threads, node.domain == KERNELS)
    binding = session.io_binding()
    held = []
    for i in range(copies):
        for name, array in feeds.items():
            if array.dtype == np.float32 and array.size > 1:
                array = sources.take(array.dtype, array.shape)
            held.append(array)
            binding.bind_input(f"{name}_{i}", "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        for value, shape, dtype in outputs:
            array = results.take(dtype.numpy(), [int(d) for d in shape])  # type: ignore[union-attr, arg-type]
            held.append(array)
            binding.bind_output(f"{value.name}_{i}", "cpu", 0, array.dtype, list(shape), array.ctypes.data)
    held.append(binding)
    return Sample(work, lambda: (session.run_with_iobinding(binding), held)[0], copies)


def _repeated(graph: ir.Graph, copies: int) -> onnx.ModelProto:
    """A model with the graph's node ``copies`` times, each on inputs and outputs of its own."""
    proto = ir.serde.serialize_model(ir.Model(graph, ir_version=10))
    (node,) = proto.graph.node
    given = {v.name for v in proto.graph.input}
    constants = {t.name for t in proto.graph.initializer}
    made = onnx.ModelProto(ir_version=10)
    made.opset_import.extend(proto.opset_import)
    made.graph.name = "measured"
    made.graph.initializer.extend(proto.graph.initializer)
    for i in range(copies):
        one = made.graph.node.add()
        one.CopyFrom(node)
        one.name = f"n{i}"
        one.input[:] = [f"{name}_{i}" if name and name not in constants else name for name in node.input]
        one.output[:] = [f"{name}_{i}" if name else name for name in node.output]
        for source, target in ((proto.graph.input, made.graph.input), (proto.graph.output, made.graph.output)):
            for value in source:
                if value.name in given or target is made.graph.output:
                    target.add().CopyFrom(value)
                    target[-1].name = f"{value.name}_{i}"
    return made


def _session(model: onnx.ModelProto, threads: int, compiled: bool):  # noqa: ANN202 - onnxruntime is imported lazily
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False
    options.log_severity_level = 4
    # Hundreds of sessions live at once: their threads must not spin while another one is measured.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if compiled:
        options.register_custom_ops_library(str(kernels.library_path()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
