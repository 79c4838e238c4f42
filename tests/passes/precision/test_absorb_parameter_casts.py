"""AbsorbParameterCasts: the same bits without the casts; near misses with their reasons."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.graph import Parameter, Signature, TrainingGraph
from ortgraph.graph.verify import verify
from ortgraph.ops import Builder
from ortgraph.ops.expand import expand_composites
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.precision.absorb_parameter_casts import AbsorbParameterCasts

FLOAT, BF16, FP16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT16


def cast_graph(*, low=BF16, products=2, precision="bf16", lookups=0, other="", frozen=False):
    """Readers of Cast(w): products from both sides in turn, lookups, and another node if asked for."""
    w, x = ir.val("w", dtype=FLOAT, shape=[6, 6]), ir.val("x", dtype=FLOAT, shape=[5, 6])
    rows = ir.val("rows", dtype=ir.DataType.INT64, shape=[2, 3])
    graph = ir.Graph([x, rows, w], [], nodes=[], opset_imports={"": 18, COMPOSITE: 1}, name="g")
    b = Builder(graph, "test")
    rounded = b.op("Cast", w, to=low, name="w.low")
    results = []
    for i in range(products):
        side = b.op("Cast", x, to=low) if i % 2 else x
        made = b.op("Product", side, rounded, domain=COMPOSITE, precision=precision, to=FLOAT, transB=i % 2)
        results.append(b.op("ReduceSum", made, keepdims=0))
    for _ in range(lookups):
        results.append(b.op("ReduceSum", b.op("Cast", b.op("Gather", rounded, rows), to=FLOAT), keepdims=0))
    if other == "cast":
        results.append(b.op("ReduceSum", b.op("Cast", rounded, to=FLOAT), keepdims=0))
    if other == "addend":
        to = b.op("Product", w, w, None, rounded, domain=COMPOSITE, precision=precision, to=low)
        results.append(b.op("ReduceSum", b.op("Cast", to, to=FLOAT), keepdims=0))
    if other == "index":
        results.append(
            b.op("ReduceSum", b.op("Cast", b.op("Gather", w, b.op("Cast", rounded, to=rows.dtype)), to=FLOAT))
        )
    for i, value in enumerate(results):
        value.name = f"y{i}"
    graph.outputs.extend(results)
    names = tuple(v.name for v in results)
    parameter = Parameter("w", trainable=not frozen, gradient=None)
    signature = Signature(loss="y0", stage="cast", inputs=("x", "rows"), parameters=(parameter,), outputs=names[1:],
                          metadata={"unreached": "w"})  # fmt: skip
    return TrainingGraph(ir.Model(graph, ir_version=10), signature)


def values_of(graph):
    """All outputs, by the reference expansions on ONNX Runtime."""
    ort = pytest.importorskip("onnxruntime")
    graph = graph.clone()
    expand_composites(graph)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((5, 6)).astype(np.float32), "w": rng.standard_normal((6, 6)).astype(np.float32),
             "rows": rng.integers(0, 6, (2, 3))}  # fmt: skip
    session = ort.InferenceSession(
        ir.serde.serialize_model(graph.model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})


def kinds(graph):
    return [n.op_type for n in graph.graph]


@pytest.mark.parametrize("low,precision", [(BF16, "bf16"), (FP16, "fp16")])
@pytest.mark.parametrize("products,lookups", [(1, 0), (2, 0), (3, 0), (0, 1), (0, 4), (2, 1)])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_same_bits_without_the_cast(low, precision, products, lookups, frozen):
    graph = cast_graph(low=low, precision=precision, products=products, lookups=lookups, frozen=frozen)
    before = values_of(graph)
    outcome = AbsorbParameterCasts().call(graph.model)
    assert outcome.counts == {"casts": 1} and outcome.modified
    verify(graph, "types")
    for a, b in zip(before, values_of(graph), strict=True):
        assert np.array_equal(a, b)
    weight = next(v for v in graph.graph.inputs if v.name == "w")
    readers = [use.node.op_type for use in weight.uses()]
    assert sorted(readers) == ["Gather"] * lookups + ["Product"] * products, "nobody reads a rounded weight"
    for node in graph.graph:
        if node.op_type == "Gather":
            assert node.inputs[0] is weight and [u.node.op_type for u in node.outputs[0].uses()] == ["Cast"]
        if node.op_type == "Product":
            assert node.outputs[0].dtype == FLOAT and node.attributes["precision"].value == precision


@pytest.mark.parametrize(
    "case,reason",
    [
        ({"other": "cast"}, "also read by Cast"),
        ({"products": 4}, "4 products read"),
        ({"precision": "fp16"}, "rounds its operands to another type"),
        ({"other": "addend"}, "rounds its operands to another type"),
        ({"lookups": 1, "other": "index"}, "also read by Cast"),
    ],
    ids=str,
)
def test_near_misses(case, reason):
    graph = cast_graph(**case)
    before = kinds(graph)
    outcome = AbsorbParameterCasts().call(graph.model)
    assert not outcome.modified and kinds(graph) == before
    assert any(reason in r.reason for r in outcome.refusals), [r.reason for r in outcome.refusals]


def test_casts_of_other_values_stay():
    graph = cast_graph(products=2)
    AbsorbParameterCasts().call(graph.model)
    assert kinds(graph).count("Cast") == 1, "the cast of x, which is no parameter"


def test_rounding_is_that_of_the_cast():
    """The bits are those of bfloat16 arithmetic, not merely equal before and after."""
    graph = cast_graph(products=1)
    AbsorbParameterCasts().call(graph.model)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, 6)).astype(np.float32), rng.standard_normal((6, 6)).astype(np.float32)
    rounded = [a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in (x, w)]
    np.testing.assert_allclose(values_of(graph)[0], (rounded[0] @ rounded[1]).sum(), rtol=1e-5)
