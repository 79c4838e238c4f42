"""Measuring the cost table: every alternative of every composite on this machine, at a small and a large size."""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops import kernels
from ortgraph.ops.alternatives import Alternative, alternatives, elements, variant
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import COMPOSITE, KERNELS
from ortgraph.ops.targets import TRAINING

Shape = tuple[int, ...]
_SECONDS = 0.15  # per measured graph and round
_RUNS, _ROUNDS = 60, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator to measure.

    Attributes:
        op_type: Operator name.
        shapes: Input shapes at a size; None leaves an input out. Called with 0 (small) and 1 (large).
        outputs: Number of outputs.
        attributes: Node attributes.
        integers: Inputs that hold int64 below the given bound.
        booleans: Inputs that are bool.
        constants: Inputs that are constant integers.
        domain: Operator domain.
    """

    op_type: str
    shapes: Callable[[int], tuple[Shape | None, ...]]
    outputs: int = 1
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    integers: dict[int, int] = dataclasses.field(default_factory=dict)
    booleans: frozenset[int] = frozenset()
    constants: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    domain: str = COMPOSITE


def _same(count: int) -> Callable[[int], tuple[Shape | None, ...]]:
    return lambda large: (((1024, 1024) if large else (32, 64)),) * count


def _rows(large: int) -> Shape:
    return (1024, 768) if large else (32, 64)


def _scores(count: int) -> Callable[[int], tuple[Shape | None, ...]]:
    return lambda large: (((8, 8, 128, 128) if large else (2, 2, 16, 16)),) * count


def _norm(large: int) -> tuple[Shape, ...]:
    rows, width = _rows(large)
    return (rows, width), (rows, width), (rows, 1), (rows, 1), (width,)


def _layer_norm(large: int) -> tuple[Shape, ...]:
    rows, width = _rows(large)
    return (rows, width), (width,), (width,)


def _logits(large: int) -> tuple[int, int]:
    return (512, 4096) if large else (32, 64)


def _loss(large: int) -> tuple[Shape, ...]:
    rows, classes = _logits(large)
    return (rows, classes), (rows,)


def _loss_grad(large: int) -> tuple[Shape | None, ...]:
    rows, classes = _logits(large)
    return (), (rows, classes), (rows,), None, ()


def _conv(large: int) -> tuple[Shape, ...]:
    n, c, k, d = (8, 32, 32, 28) if large else (1, 4, 4, 8)
    return (n, k, d, d), (n, c, d, d), (k, c, 3, 3)


def _batch_norm(large: int) -> tuple[Shape, ...]:
    x = (8, 64, 32, 32) if large else (2, 4, 8, 8)
    return x, x, x[1:2], x[1:2], x[1:2]


def _images(large: int) -> Shape:
    return (8, 64, 32, 32) if large else (2, 4, 8, 8)


def _filters(large: int) -> tuple[Shape, ...]:
    return _conv(large)[1:]


def _batch_statistics(large: int) -> tuple[Shape, ...]:
    x = _images(large)
    return x, *(x[1:2],) * 4


def _heads(large: int) -> tuple[Shape, ...]:
    return ((8, 128, 8, 64) if large else (2, 16, 2, 16),)


def _attention(count: int) -> Callable[[int], tuple[Shape, ...]]:
    """``count`` inputs of [batch, heads, rows, width]; for the gradient LogSumExp too."""

    def shapes(large: int) -> tuple[Shape, ...]:
        x = (8, 4, 128, 64) if large else (2, 2, 16, 16)
        return (*(x,) * count, *((x[:3],) if count == 5 else ()))

    return shapes


def _embedding(large: int) -> tuple[Shape, ...]:
    return ((1024, 256), (1024,)) if large else ((32, 64), (32,))


def _adamw(large: int) -> tuple[Shape, ...]:
    w = (1024, 1024) if large else (32, 64)
    return (), (), w, w, w, w


_ROWS_WHOLE, _TURNED = (0, 2, 1, 3), (0, 2, 3, 1)
_POOL = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
CASES: tuple[Case, ...] = (
    *(Case("Gelu", _same(1), attributes={"approximate": a}) for a in ("none", "tanh")),
    *(Case("GeluGrad", _same(2), attributes={"approximate": a}) for a in ("none", "tanh")),
    Case("Silu", _same(1)),
    *(Case(op, _same(2)) for op in ("SiluGrad", "ReluGrad", "TanhGrad", "SigmoidGrad")),
    *(Case(op, _scores(2), attributes={"axis": -1}) for op in ("SoftmaxGrad", "LogSoftmaxGrad")),
    Case("LayerNormGrad", _norm, 3, {"axis": -1}),
    Case("Attention", _attention(3), 1, {"scale": 0.125}),
    Case("AttentionGrad", _attention(5), 3, {"scale": 0.125}),
    Case("BatchNorm", _batch_statistics, 5, {"epsilon": 1e-5, "momentum": 0.9}),
    Case("BatchNormGrad", _batch_norm, 3),
    Case("CrossEntropy", _loss, 3, {"reduction": "mean", "ignore_index": -100}, {1: 60}),
    Case("CrossEntropyGrad", _loss_grad, 1, {"reduction": "mean", "ignore_index": -100}, {2: 60}),
    Case("EmbeddingGrad", _embedding, 1, {"rows": 30522, "padding_idx": -1}, {1: 30522}),
    Case("ConvGrad", _conv, 3, {"pads": [1, 1, 1, 1], "strides": [1, 1], "dilations": [1, 1], "group": 1}),
    Case("Dropout", lambda large: (_rows(large), (), ()), 2, {"ratio": 0.1, "node": 3}, {1: 9, 2: 9}),
    Case("DropoutGrad", _same(2), 1, {"ratio": 0.1}, booleans=frozenset({1})),
    Case("RandomUniform", lambda large: ((), ()), 1, {"node": 3, "shape": [512, 512]}, {0: 9, 1: 9}),
    Case("AdamW", _adamw, 3, {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}, {1: 9}),
    *(Case(op, _same(1), domain="") for op in ("Sigmoid", "Log", "Sqrt", "Erf", "Elu")),
    Case("Conv", _filters, attributes={"pads": [1, 1, 1, 1]}, domain=""),
    Case("MaxPool", lambda large: (_images(large),), 2, _POOL, domain=""),
    Case("Softmax", _scores(1), attributes={"axis": -1}, domain=""),
    Case("LayerNormalization", _layer_norm, 3, {"axis": -1}, domain=""),
    Case("ReduceSum", lambda large: (_rows(large), (1,)), 1, {"keepdims": 0}, constants={1: [0]}, domain=""),
    *(Case("Transpose", _heads, attributes={"perm": list(p)}, domain="") for p in (_ROWS_WHOLE, _TURNED)),
)


def measure(
    target: str = TRAINING, threads: int = 2, advance: Callable[[], object] = lambda: None
) -> Iterator[tuple[str, dict[str, float]]]:
    """(``Operator.alternative``, entry) of every alternative that runs here.

    Args:
        target: Operators of which runtime; the runtime that is installed does the running.
        threads: Threads of one operator.
        advance: Called after each operator.
    """
    for case in CASES:
        small, large = (_points(case, size, target, threads) for size in (0, 1))
        for name in large:
            n0, t0 = small[name][:2]
            n1, t1, moved, scratch = large[name]
            slope = max(0.0, (t1 - t0) / (n1 - n0)) if n1 > n0 else 0.0
            entry = {
                "fixed_us": round(max(0.5, t1 - slope * n1), 2),
                "ns_per_element": round(slope * 1e3, 4),
                "moved_per_element": round(moved, 2),
                "scratch_per_element": round(scratch, 2),
            }
            yield name, entry
        advance()


def machine(threads: int = 2) -> dict[str, object]:
    """Where the figures come from."""
    import onnxruntime as ort

    return {"runtime": ort.__version__, "threads": threads, "architecture": platform.machine()}


def _points(case: Case, size: int, target: str, threads: int) -> dict[str, tuple[int, float, float, float]]:
    """Per alternative: elements, microseconds, bytes moved and scratch per element."""
    probe, _ = case_graph(case, size, None)
    node = next(iter(probe))
    usable = [a for a in alternatives(node, target) if a.applies(node) is None]
    graphs = {a.name: case_graph(case, size, a) for a in usable}
    best = dict.fromkeys(graphs, math.inf)
    for _ in range(_ROUNDS):  # in turn, so that a busy moment of the machine does not meet one of them alone
        for name, (graph, feeds) in graphs.items():
            best[name] = min(best[name], _time(graph, feeds, threads))
    found, n = {}, elements(node)
    for name, (graph, _) in graphs.items():
        moved, scratch = _traffic(graph, node)
        found[f"{variant(node)}.{name}"] = (n, best[name] * 1e6, moved / n, scratch / n)
    return found


def case_graph(case: Case, size: int, alternative: Alternative | None) -> tuple[ir.Graph, dict[str, np.ndarray]]:
    """The operator alone, replaced by the alternative, with numbers for its inputs."""
    rng = np.random.default_rng(0)
    inputs: list[ir.Value | None] = []
    feeds = {}
    for i, shape in enumerate(case.shapes(size)):
        if shape is None:
            inputs.append(None)
            continue
        if i in case.constants:
            tensor = ir.tensor(np.array(case.constants[i], np.int64), name=f"c{i}")
            inputs.append(ir.val(f"c{i}", const_value=tensor, dtype=ir.DataType.INT64, shape=list(shape)))
            continue
        if i in case.integers:
            array: np.ndarray = rng.integers(1, case.integers[i], shape).astype(np.int64)
        elif i in case.booleans:
            array = rng.random(shape) > 0.1
        else:
            array = (rng.random(shape) + 0.1).astype(np.float32)
        feeds[f"i{i}"] = np.asarray(array)
        dtype = ir.DataType.from_numpy(feeds[f"i{i}"].dtype)
        inputs.append(ir.val(f"i{i}", dtype=dtype, shape=list(shape)))
    given = [v for v in inputs if v is not None and v.const_value is None]
    fixed = [v for v in inputs if v is not None and v.const_value is not None]
    graph = ir.Graph(given, [], nodes=[], initializers=fixed, opset_imports={"": 18}, name="measured")
    build = Builder(graph, "calibrate")
    made = build.multi(case.op_type, *inputs, outputs=case.outputs, domain=case.domain, **case.attributes)
    node = made[0].producer()
    assert node is not None
    graph.outputs.extend(made)
    if alternative is not None and alternative.name != "native":
        results = alternative.build(Builder(graph, "calibrate", before=node), node)
        graph.outputs.clear()
        graph.outputs.extend(v for v in results if v is not None)
        graph.remove(node)
        graph.opset_imports.pop(COMPOSITE, None)
    return graph, feeds


def _traffic(graph: ir.Graph, original: ir.Node) -> tuple[int, int]:
    """Bytes that all nodes read and write; bytes of the two largest intermediates."""
    moved, inner = 0, []
    for node in graph:
        moved += sum(_bytes(v) for v in (*node.inputs, *node.outputs) if v is not None)
        inner += [_bytes(o) for o in node.outputs if not o.is_graph_output()]
    if len(list(graph)) == 1 and original.op_type == "LayerNormGrad" and next(iter(graph)).domain != KERNELS:
        inner = [4 * _bytes(original.outputs[0])]  # the runtime's kernel makes four full-size temporaries
    return moved, sum(sorted(inner)[-2:])


def _bytes(value: ir.Value) -> int:
    shape = static_shape(value)
    if value.dtype is None or shape is None:
        return 0
    return math.ceil(math.prod(shape) * value.dtype.itemsize)


def _time(graph: ir.Graph, feeds: dict[str, np.ndarray], threads: int) -> float:
    """The shortest of many runs, in seconds, with everything bound."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if any(n.domain == KERNELS for n in graph):
        options.register_custom_ops_library(str(kernels.library_path()))
    proto = ir.serde.serialize_model(ir.Model(graph, ir_version=10))
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(None, feeds)
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    results = [r if r.flags.c_contiguous else r.copy() for r in results]
    for output, array in zip(session.get_outputs(), results, strict=True):
        binding.bind_output(output.name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    best, spent, runs = math.inf, 0.0, 0
    while runs < 5 or (spent < _SECONDS and runs < _RUNS):
        begin = time.perf_counter()
        session.run_with_iobinding(binding)
        seconds = time.perf_counter() - begin
        best, spent, runs = min(best, seconds), spent + seconds, runs + 1
    return best
