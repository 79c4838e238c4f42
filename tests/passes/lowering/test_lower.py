"""Lower: choice by cost, every alternative equal to the reference, clear errors."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.errors import InputError, UnsupportedError
from ortgraph.graph import Buffer, Signature, TrainingGraph
from ortgraph.ops import kernels
from ortgraph.ops.builder import Builder
from ortgraph.passes.lowering.lower import Lower
from ortgraph.runtime.prepare import prepare

PAIRS = [("Gelu", {}), ("Gelu", {"approximate": "tanh"})]
GRADS = [
    ("GeluGrad", {}), ("GeluGrad", {"approximate": "tanh"}), ("ReluGrad", {}), ("TanhGrad", {}),
    ("SigmoidGrad", {}), ("SoftmaxGrad", {"axis": -1}), ("SoftmaxGrad", {"axis": 1}), ("LogSoftmaxGrad", {"axis": -1}),
]  # fmt: skip


def composite(bench, op_type, attributes, inputs=1):
    def body(b, *values):
        return b.op(op_type, *values[:inputs], domain="ortgraph", **attributes)

    return bench.make(body, {"a": (3, 4, 5), "b": (3, 4, 5)})


@pytest.mark.parametrize(("op_type", "attributes", "inputs"), [(*p, 1) for p in PAIRS] + [(*g, 2) for g in GRADS])
@pytest.mark.parametrize("target", ["onnxruntime-training", "onnxruntime"])
def test_runtime_form_equals_expansion(bench, op_type, attributes, inputs, target):
    graph = composite(bench, op_type, attributes, inputs)
    feeds = bench.feeds(graph)
    if op_type == "LogSoftmaxGrad":
        feeds["b"] -= np.log(np.exp(feeds["b"]).sum(-1, keepdims=True))
    want = bench.run(graph, feeds)[0]
    outcome = Lower(target=target, prefer="runtime", kernels=False)(graph.model)
    assert outcome.modified and len(outcome.refusals) == 1
    expected = "expansion" if target == "onnxruntime" and inputs == 2 else "runtime"
    assert dict(outcome.counts) == {f"{op_type}.{expected}": 1}
    np.testing.assert_allclose(bench.run(graph, feeds)[0], want, atol=3e-6)


def test_choice_follows_the_table_and_is_explained(bench, tmp_path):
    for fast, slow in (("runtime", "expansion"), ("expansion", "runtime")):
        entry = {"fixed_us": 1.0, "ns_per_element": 1.0}
        dear = {"fixed_us": 50.0, "ns_per_element": 9.0}
        table = tmp_path / f"{fast}.json"
        table.write_text(json.dumps({"entries": {f"Gelu:tanh.{fast}": entry, f"Gelu:tanh.{slow}": dear}}))
        graph = composite(bench, "Gelu", {"approximate": "tanh"})
        outcome = Lower(table=str(table), kernels=False)(graph.model)
        assert dict(outcome.counts) == {f"Gelu.{fast}": 1}
        assert outcome.refusals[0].reason.startswith(f"Gelu: {fast} chosen (")
        assert "computes approximate=none, not tanh" in outcome.refusals[0].reason


needs_kernels = pytest.mark.skipif(not kernels.available(), reason=kernels.reason())


@needs_kernels
@pytest.mark.parametrize(("op_type", "attributes", "inputs"), [(*p, 1) for p in PAIRS] + [(*g, 2) for g in GRADS])
def test_kernel_equals_expansion(bench, op_type, attributes, inputs):
    graph = composite(bench, op_type, attributes, inputs)
    feeds = bench.feeds(graph)
    want = bench.run(graph, feeds)[0]
    outcome = Lower(prefer="kernel")(graph.model)
    if attributes.get("axis") == 1:
        assert "last axis only" in outcome.refusals[0].reason and op_type + ".kernel" not in outcome.counts
        return
    assert dict(outcome.counts) == {f"{op_type}.kernel": 1}
    assert bench.ops(graph) == [f"ortgraph.kernels.{op_type}"]
    np.testing.assert_allclose(bench.run(graph, feeds)[0], want, atol=3e-6)


@needs_kernels
def test_standard_operator_is_replaced_only_where_the_kernel_is_cheaper(bench, tmp_path):
    for native, expected in ((1.0, ["Softmax"]), (50.0, ["ortgraph.kernels.Softmax"])):
        table = tmp_path / f"{native}.json"
        entries = {"Softmax.native": native, "Softmax.kernel": 9.0}
        entries = {k: {"fixed_us": v, "ns_per_element": 0.0} for k, v in entries.items()}
        table.write_text(json.dumps({"entries": entries}))
        graph = bench.make(lambda b, x: b.op("Softmax", x, axis=-1), {"x": (3, 4)})
        feeds = bench.feeds(graph)
        want = bench.run(graph, feeds)[0]
        Lower(table=str(table))(graph.model)
        assert bench.ops(graph) == expected
        assert not Lower(table=str(table))(graph.model).modified
        np.testing.assert_allclose(bench.run(graph, feeds)[0], want, atol=1e-6)


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(("shape", "axes"), [((6, 4), (0,)), ((2, 3, 4), (0, -2)), ((2, 3, 4), (1,)), ((4, 6), (1,))])
def test_sum_over_rows_may_become_a_product(bench, shape, axes, keepdims):
    graph = bench.make(lambda b, x: b.op("ReduceSum", x, b.ints(axes), keepdims=keepdims), {"x": shape})
    feeds = bench.feeds(graph)
    want = bench.run(graph, feeds)[0]
    outcome = Lower(kernels=False)(graph.model)
    over_rows = len(axes) == len(shape) - 1 and len(shape) - 1 not in axes
    assert bool(outcome.counts) == over_rows and ("MatMul" in bench.ops(graph)) == over_rows
    got = bench.run(graph, feeds)[0]
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_without_kernels_none_is_chosen(bench):
    graph = composite(bench, "GeluGrad", {}, 2)
    Lower(kernels=False, prefer="kernel")(graph.model)
    assert not any("kernels" in o for o in bench.ops(graph))


def test_contrib_operator_of_the_other_target_is_expanded(bench):
    """A graph of ONNX Runtime's gradient builder runs on the stock runtime."""

    def body(b, dy, x):
        return b.op("GeluGrad", dy, x, domain="com.microsoft")

    graph = bench.make(body, {"dy": (3, 4), "x": (3, 4)})
    feeds = bench.feeds(graph)
    want = bench.run(graph, feeds)[0]
    assert not Lower(kernels=False)(graph.clone().model).counts
    assert dict(Lower(target="onnxruntime")(graph.model).counts) == {"GeluGrad.expansion": 1}
    assert all(n.domain == "" for n in graph.graph)
    np.testing.assert_allclose(bench.run(graph, feeds)[0], want, atol=1e-5)


def test_nothing_to_lower(bench):
    graph = bench.make(lambda b, x: b.op("Add", x, x), {"x": (2,)})
    assert bench.refusals(graph, Lower()) == []


def test_no_composite_and_no_import_is_left(bench):
    graph = composite(bench, "GeluGrad", {}, 2)
    Lower(prefer="expansion")(graph.model)
    assert "ortgraph" not in graph.graph.opset_imports
    assert all(n.domain == "" for n in graph.graph)
    assert {n.metadata_props["ortgraph.pass"] for n in graph.graph} == {"lower"}


def test_float64_has_only_expansions(bench):
    def body(b, x):
        return b.op("Gelu", x, domain="ortgraph", approximate="tanh")

    graph = bench.make(body, {"x": (2, 3)}, {"x": ir.DataType.DOUBLE})
    outcome = Lower(prefer="runtime")(graph.model)
    assert dict(outcome.counts) == {"Gelu.expansion": 1}
    assert "float32 only" in outcome.refusals[0].reason


@pytest.mark.parametrize(
    ("domain", "op_type"), [("acme", "Secret"), ("com.microsoft", "LambOptimizer"), ("", "Nonsense")]
)
def test_unknown_operator_is_named(bench, domain, op_type):
    def body(b, x):
        return b.op(op_type, x, domain=domain, name="the_node")

    graph = bench.make(body, {"x": (2,)})
    with pytest.raises(UnsupportedError, match="the_node"):
        Lower()(graph.model)


def test_wrong_options():
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 18}), ir_version=10)
    for options, word in (
        ({"target": "tpu"}, "target"),
        ({"prefer": "luck"}, "alternative"),
        ({"table": "no.json"}, "no.json"),
    ):
        with pytest.raises(InputError, match=word):
            Lower(**options)(model)


def test_order_of_composites_does_not_depend_on_the_run(bench):
    texts = set()
    for _ in range(3):
        graph = composite(bench, "SiluGrad", {}, 2)
        Lower()(graph.model)
        texts.add(graph.text())
    assert len(texts) == 1


def test_a_composite_that_needs_a_symbolic_size_waits_for_it():
    """BatchNorm's expansion counts its elements: the graph stays usable, and the session lowers the rest."""
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=["batch", 2])
    scale, bias, mean, var = (ir.val(n, dtype=ir.DataType.FLOAT, shape=[2]) for n in ("s", "b", "mean", "var"))
    graph = ir.Graph([x, scale, bias, mean, var], [], nodes=[], opset_imports={"": 18}, name="g")
    build = Builder(graph, "capture")
    outputs = build.multi("BatchNorm", x, scale, bias, mean, var, outputs=5, domain="ortgraph", momentum=0.1)
    for value, name in zip(outputs, ("y", "new_mean", "new_var", "saved", "inverse"), strict=True):
        value.name = name
    graph.outputs.extend(outputs[:3])
    buffers = (Buffer("mean", "new_mean"), Buffer("var", "new_var"))
    lowered = TrainingGraph(
        ir.Model(graph, ir_version=10), Signature(loss="y", inputs=("x", "s", "b"), buffers=buffers)
    )
    outcome = Lower(kernels=False)(lowered.model)
    assert [n.op_type for n in graph] == ["BatchNorm"] and not graph.initializers
    assert "left until sizes are bound" in outcome.refusals[0].reason
    ready = prepare(lowered, {"batch": 4}, "onnxruntime-training")
    assert not [n for n in ready.graph if n.domain == "ortgraph"]


@pytest.mark.parametrize(("width", "form"), [(1, "expansion"), (2, "runtime")])
def test_rows_of_one_number_are_not_given_to_the_runtimes_layer_norm_gradient(bench, width, form):
    def body(b, *values):
        return b.multi("LayerNormGrad", *values, outputs=3, domain="ortgraph", axis=-1)[0]

    graph = bench.make(body, {"dy": (6, width), "x": (6, width), "mean": (6, 1), "inv": (6, 1), "scale": (width,)})
    feeds = bench.feeds(graph)
    want = bench.run(graph, feeds)[0]
    assert dict(Lower(kernels=False, prefer="runtime")(graph.model).counts)[f"LayerNormGrad.{form}"] == 1
    np.testing.assert_allclose(bench.run(graph, feeds)[0], want, atol=3e-6)


@pytest.mark.parametrize(("op_type", "targets"), [("Erf", 2), ("Cos", 1), ("Sin", 0), ("Tanh", 0)])
def test_functions_without_a_kernel_in_double_precision_are_named(bench, op_type, targets):
    for i, target in enumerate(("onnxruntime-training", "onnxruntime")):
        x = ir.val("x", dtype=ir.DataType.DOUBLE, shape=[4])
        graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="g")
        graph.outputs.append(Builder(graph, "test").op(op_type, x, name="the_node"))
        model = ir.Model(graph, ir_version=9)
        if i < targets:
            with pytest.raises(UnsupportedError, match=f"the_node.*{op_type} in float64; compute it in float32"):
                Lower(target=target)(model)
        else:
            Lower(target=target)(model)
