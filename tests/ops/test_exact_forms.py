"""Operators that the runtime computes badly: what stands for them is right over all of float32, and is always taken."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

onnxruntime = pytest.importorskip("onnxruntime")

import onnx_ir as ir  # noqa: E402

from ortgraph.ops import kernels  # noqa: E402
from ortgraph.ops.alternatives import CostTable, alternatives, native_reason  # noqa: E402
from ortgraph.ops.builder import Builder  # noqa: E402
from ortgraph.ops.exact_forms import EXACT_FORMS  # noqa: E402
from ortgraph.ops.targets import STOCK, TRAINING  # noqa: E402
from ortgraph.runtime.detect import detect_runtime  # noqa: E402

TARGET = detect_runtime().target
_ALPHA, _SELU, _GAMMA = 0.3, 1.67326319217681884765625, 1.05070102214813232421875
_erf = np.vectorize(math.erf)
EXACT = {
    "Sigmoid": lambda x: np.where(x < -88.7229, 0.0, 1 / (1 + np.exp(-x))),  # exp overflows there, in PyTorch, too
    "QuickGelu": lambda x: np.where(x < -88.7229, 0.0, x / (1 + np.exp(-x))),
    "Elu": lambda x: np.where(x > 0, x, np.float32(_ALPHA) * np.expm1(np.minimum(x, 0))),
    "Celu": lambda x: np.where(x > 0, x, np.float32(_ALPHA) * np.expm1(np.minimum(x, 0) / np.float32(_ALPHA))),
    "Selu": lambda x: _GAMMA * np.where(x > 0, x, _SELU * np.expm1(np.minimum(x, 0))),
    "Log": np.log,
    "Sqrt": np.sqrt,
    "Erf": lambda x: np.where(np.isnan(x), x, _erf(np.nan_to_num(x))),
}
ATTRIBUTES = {"Elu": {"alpha": _ALPHA}, "Celu": {"alpha": _ALPHA}, "QuickGelu": {"alpha": 1.0}}
OPERATORS = [key for key in EXACT_FORMS if key[1] in EXACT]


def _numbers() -> np.ndarray:
    sizes = np.concatenate([np.logspace(-45, 38.5, 1500), np.linspace(0.01, 120, 1500)])
    ends = [0.0, -0.0, np.inf, -np.inf, np.nan]
    return np.concatenate([sizes, -sizes, ends]).astype(np.float32)


def _node(domain: str, op_type: str, dtype=ir.DataType.FLOAT):
    x = ir.val("x", dtype=dtype, shape=[len(_numbers())])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="g")
    made = Builder(graph, "test").op(op_type, x, domain=domain, **ATTRIBUTES.get(op_type, {}))
    graph.outputs.append(made)
    return graph, made.producer()


def _run(graph: ir.Graph, x: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if any(n.domain == "ortgraph.kernels" for n in graph):
        options.register_custom_ops_library(str(kernels.library_path()))
    model = ir.serde.serialize_model(ir.Model(graph, ir_version=10)).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def _error(y: np.ndarray, op_type: str, x: np.ndarray) -> float:
    """The greatest relative error (subnormal results: absolute, in units of the least normal number)."""
    with np.errstate(all="ignore"):
        exact = EXACT[op_type](x.astype(np.float64))
        narrow = exact.astype(np.float32) if x.dtype == np.float32 else exact
        error = np.abs(y.astype(np.float64) - exact) / np.maximum(np.abs(exact), 1.2e-38)
    same = (y == narrow) | (np.isnan(y) & np.isnan(narrow))
    error[same] = 0
    return float(np.where(np.isnan(error), np.inf, error).max())


def _replaced(key: tuple[str, str], name: str, dtype=ir.DataType.FLOAT):
    graph, node = _node(*key, dtype)
    wanted = next((a for a in alternatives(node, TARGET) if a.name == name and a.applies(node) is None), None)
    if wanted is None:
        return None
    results = wanted.build(Builder(graph, "test", before=node), node)
    graph.outputs.clear()
    graph.outputs.extend(v for v in results if v is not None)
    graph.remove(node)
    return graph


@pytest.mark.parametrize("key", OPERATORS, ids=lambda key: key[1])
def test_the_runtime_loses_digits_and_what_stands_for_it_does_not(key):
    x = _numbers()
    if TARGET not in EXACT_FORMS[key].targets:
        assert native_reason(_node(*key)[1], TARGET) is None
        assert _error(_run(_node(*key)[0], x), key[1], x) < 1e-5
        return
    assert _error(_run(_node(*key)[0], x), key[1], x) > 1e-2  # a runtime that is right needs no entry
    found = {name: _replaced(key, name) for name in ("kernel", "expansion")}
    for name, graph in found.items():
        if graph is not None and not any(n.op_type == "Sigmoid" and n.domain == "" for n in graph):
            assert _error(_run(graph, x), key[1], x) < 1e-4, name  # results below 1e-38 lose digits
            ordinary = x[~(np.abs(x) < 1e-37) & ~(x < -85)]
            ordinary = np.concatenate([ordinary, np.full(len(x) - len(ordinary), 1.0, np.float32)])
            assert _error(_run(graph, ordinary), key[1], ordinary) < 2e-6, name
    assert any(graph is not None for graph in found.values()) or not kernels.available()


@pytest.mark.parametrize("key", [k for k in OPERATORS if EXACT_FORMS[k].wide and k[0] == ""], ids=lambda key: key[1])
def test_double_precision(key):
    graph = _replaced(key, "expansion", ir.DataType.DOUBLE)
    assert graph is not None and _replaced(key, "kernel", ir.DataType.DOUBLE) is None
    x = np.concatenate([np.linspace(-80, 20, 999), -np.logspace(-12, 0, 99)])
    x = np.concatenate([x, np.ones(len(_numbers()) - len(x))])
    assert _error(_run(graph, x), key[1], x) < 2e-8 if key[1] == "Selu" else 1e-13


@pytest.mark.parametrize("target", [TRAINING, STOCK])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("key", list(EXACT_FORMS), ids=lambda key: key[1])
def test_no_price_makes_lowering_leave_it(key, compiled, target, monkeypatch):
    """A cost table in which the runtime's kernel is free changes nothing."""
    from ortgraph.ops.spec import spec_of
    from ortgraph.passes.lowering import lower

    _, node = _node(*key) if key[1] in EXACT else _node("", "Sigmoid")
    if key[1] not in EXACT:
        node = ir.Node(*key, [node.inputs[0], node.inputs[0]], num_outputs=1)
    free = CostTable("free", {f"{key[1]}.native": {"fixed_us": 0.0, "ns_per_element": 0.0}})
    choice, why = lower.Lower(target=target, kernels=compiled)._choose(node, free)
    form = EXACT_FORMS[key]
    forced = target in form.targets and (
        form.build is not None or spec_of(node).expand is not None or (compiled and kernels.available())
    )
    assert (choice.name != "native") == forced
    assert (form.why in why) == forced


def test_every_entry_is_measured_here():
    assert {op for _, op in EXACT_FORMS} - set(EXACT) == {"QuickGeluGrad"}
    assert all(dataclasses.is_dataclass(form) and form.targets and form.why for form in EXACT_FORMS.values())
