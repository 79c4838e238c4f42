"""Shared fixtures: a small training graph made by hand."""

from __future__ import annotations

import copy
import os

# Read when PyTorch is loaded. Two test processes share the processors: threads that wait must not take the others' time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.graph import Parameter, Signature, TrainingGraph
from ortgraph.ops.builder import Builder

_FRESH: dict[str, np.random.Generator] = {}  # generators of test modules, as they were before their first test


@pytest.fixture(autouse=True)
def own_random_numbers(request, monkeypatch):
    """A test has the same numbers whichever tests ran before it in its process: no failure that cannot be had again."""
    for name in ("RNG", "rng"):
        generator = getattr(request.module, name, None)
        if isinstance(generator, np.random.Generator):
            fresh = _FRESH.setdefault(request.module.__name__, copy.deepcopy(generator))
            monkeypatch.setattr(request.module, name, copy.deepcopy(fresh))


def make_linear_graph() -> TrainingGraph:
    """loss = sum(gelu-free (x @ w + b) * c); gradients of w and b by hand; b is zero-valued. Opset 18."""
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[4, 3])
    w = ir.val("w", dtype=ir.DataType.FLOAT, shape=[3, 2])
    b = ir.val("b", dtype=ir.DataType.FLOAT, shape=[2])
    seed = ir.val("loss_gradient", dtype=ir.DataType.FLOAT, shape=[])
    graph = ir.Graph([x, w, b, seed], [], nodes=[], opset_imports={"": 18}, name="joint")
    build = Builder(graph, "capture")
    y = build.op("Add", build.op("MatMul", x, w), b)
    loss = build.op("ReduceSum", build.op("Mul", y, y), keepdims=0)
    dy = build.op("Mul", build.op("Mul", y, build.scalar(2.0, y)), seed)
    dw = build.op("MatMul", build.op("Transpose", x, perm=[1, 0]), dy)
    db = build.op("ReduceSum", dy, build.ints([0]), keepdims=0)
    for value, name in ((loss, "loss"), (dw, "w.grad"), (db, "b.grad")):
        value.name = name
        graph.outputs.append(value)
    signature = Signature(
        loss="loss",
        inputs=("x",),
        parameters=(Parameter("w", gradient="w.grad"), Parameter("b", gradient="b.grad")),
        loss_gradient="loss_gradient",
    )
    rng = np.random.default_rng(0)
    values = {"w": rng.standard_normal((3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
    return TrainingGraph(ir.Model(graph, ir_version=10), signature, values)


@pytest.fixture
def linear_graph() -> TrainingGraph:
    """A fresh linear regression graph with loss, two gradients and a zero-valued bias."""
    return make_linear_graph()


def make_classifier_graph(batch: int | str = 4, length: int = 3, seed: int = 0) -> TrainingGraph:
    """Token classifier with a tied head, written by hand from composites: ids, labels -> loss, logits. Opset 18.

    h = table[ids]; u = gelu(h w1 + b1); n = layer norm(u); logits = n w2 table^T; loss = mean cross-entropy.
    Parameters: table [11, 6] (tied as head.weight), w1 [6, 8], b1 [8] (zero), norm.weight, norm.bias [8], w2 [8, 6].
    """
    f, i64 = ir.DataType.FLOAT, ir.DataType.INT64
    shapes = {"table": [11, 6], "w1": [6, 8], "b1": [8], "norm.weight": [8], "norm.bias": [8], "w2": [8, 6]}
    ids, labels = (ir.val(n, dtype=i64, shape=[batch, length]) for n in ("ids", "labels"))
    p = {n: ir.val(n, dtype=f, shape=s) for n, s in shapes.items()}
    seed_input = ir.val("loss_gradient", dtype=f, shape=[])
    graph = ir.Graph([ids, labels, *p.values(), seed_input], [], nodes=[], opset_imports={"": 18}, name="joint")
    b = Builder(graph, "capture")
    h = b.op("Reshape", b.op("Gather", p["table"], ids), b.ints([-1, 6]))
    a = b.op("Add", b.op("MatMul", h, p["w1"]), p["b1"])
    u = b.op("Gelu", a, domain="ortgraph", approximate="none")
    n, mean, inv = b.multi("LayerNormalization", u, p["norm.weight"], p["norm.bias"], outputs=3, axis=-1, epsilon=1e-5)
    for v in (mean, inv):
        v.dtype, v.shape = f, ir.Shape([*list(u.shape)[:1], 1])
    q = b.op("MatMul", n, p["w2"])
    logits = b.op("MatMul", q, b.op("Transpose", p["table"], perm=[1, 0]))
    target = b.op("Reshape", labels, b.ints([-1]))
    loss, logp, total = b.multi(
        "CrossEntropy", logits, target, outputs=3, domain="ortgraph", reduction="mean", ignore_index=-100
    )
    out = b.op("Identity", logits)
    ce = {"reduction": "mean", "ignore_index": -100}
    dlogits = b.op("CrossEntropyGrad", seed_input, logp, target, None, total, domain="ortgraph", **ce)
    dq = b.op("MatMul", dlogits, p["table"])
    dtable1 = b.op("MatMul", b.op("Transpose", dlogits, perm=[1, 0]), q)
    dn = b.op("MatMul", dq, b.op("Transpose", p["w2"], perm=[1, 0]))
    dw2 = b.op("MatMul", b.op("Transpose", n, perm=[1, 0]), dq)
    du, dscale, dbias = b.multi(
        "LayerNormGrad", dn, u, mean, inv, p["norm.weight"], outputs=3, domain="ortgraph", axis=-1
    )
    da = b.op("GeluGrad", du, a, domain="ortgraph", approximate="none")
    db1 = b.op("ReduceSum", da, b.ints([0]), keepdims=0)
    dw1 = b.op("MatMul", b.op("Transpose", h, perm=[1, 0]), da)
    dh = b.op("Reshape", b.op("MatMul", da, b.op("Transpose", p["w1"], perm=[1, 0])), b.ints([-1, length, 6]))
    dtable2 = b.op("EmbeddingGrad", dh, ids, domain="ortgraph", rows=11, padding_idx=-1)
    dtable = b.op("Add", dtable1, dtable2)
    gradients = {"table": dtable, "w1": dw1, "b1": db1, "norm.weight": dscale, "norm.bias": dbias, "w2": dw2}
    for value, name in ((loss, "loss"), (out, "logits"), *((v, f"{n}.grad") for n, v in gradients.items())):
        value.name = name
        graph.outputs.append(value)
    signature = Signature(
        loss="loss",
        inputs=("ids", "labels"),
        outputs=("logits",),
        parameters=tuple(
            Parameter(n, gradient=f"{n}.grad", tied=("head.weight",) if n == "table" else ()) for n in shapes
        ),
        loss_gradient="loss_gradient",
    )
    rng = np.random.default_rng(seed)
    values = {n: (rng.standard_normal(s) * 0.3).astype(np.float32) for n, s in shapes.items()}
    values["b1"][:] = 0
    return TrainingGraph(ir.Model(graph, ir_version=10), signature, values)


@pytest.fixture
def classifier_graph():
    """Factory of the hand-written token classifier: ``classifier_graph(batch=4, length=3, seed=0)``."""
    return make_classifier_graph


@pytest.fixture
def classifier_batch():
    """Factory of batches for it."""

    def make(batch: int = 4, length: int = 3, seed: int = 1) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {"ids": rng.integers(0, 5, (batch, length)), "labels": rng.integers(0, 11, (batch, length))}

    return make


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write the golden texts anew")
