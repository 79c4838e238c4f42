"""AbsorbKernelCasts: the same bits without the casts; near misses with their reasons."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.graph import Parameter, Signature, TrainingGraph
from ortgraph.graph.verify import verify
from ortgraph.ops import Builder, kernels
from ortgraph.passes.lowering.absorb_kernel_casts import AbsorbKernelCasts

FLOAT, BF16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
IMAGES, FILTERS = (2, 20, 7, 6), (20, 20, 3, 3)


@pytest.fixture(autouse=True)
def _with_kernels():
    if not kernels.available():
        pytest.skip(kernels.reason())


def step_graph(*, other="", precision="", operand="", inner=False, convolutions=1, absent=False):
    """BatchNorm of a convolution and its gradients, all values low, between casts."""
    shapes = {"x": IMAGES, "dy": IMAGES, "w": FILTERS, "scale": (20,), "bias": (20,), "mean": (20,), "var": (20,)}
    v = {name: ir.val(name, dtype=FLOAT, shape=list(shape)) for name, shape in shapes.items()}
    graph = ir.Graph([*v.values()], [], nodes=[], opset_imports={"": 18, kernels.DOMAIN: 1}, name="g")
    b = Builder(graph, "test")

    def kernel(op, *inputs, outputs=1, **attributes):
        return b.multi(op, *inputs, outputs=outputs, domain=kernels.DOMAIN, **attributes)

    options = {"pads": [1, 1, 1, 1], **({"precision": precision} if precision else {})}
    x = b.op("Relu", v["x"]) if inner else v["x"]
    low_x, low_w = b.op("Cast", x, to=BF16, name="x.low"), b.op("Cast", v["w"], to=BF16, name="w.low")
    taken = x if operand == "float" else low_x
    for _ in range(convolutions):
        (y,) = kernel("Conv_b", taken, low_w, **options)
    wide = b.op("Cast", y, to=FLOAT, name="y.float")
    statistics = [v[n] for n in ("scale", "bias", "mean", "var")]
    norm = kernel("BatchNorm", wide, *statistics, outputs=5)
    norm_low = b.op("Cast", norm[0], to=BF16)
    grads = kernel("BatchNormGrad", b.op("Cast", b.op("Cast", v["dy"], to=BF16), to=FLOAT), wide, v["scale"], norm[3],
                   norm[4], outputs=3)  # fmt: skip
    low_dy = b.op("Cast", grads[0], to=BF16, name="dy.low")
    made = kernel("ConvGrad" if absent else "ConvGrad_b", low_dy, taken, low_w, outputs=2, **options)
    results = [b.op("Cast", norm_low, to=FLOAT), *norm[1:3], *grads[1:], made[1]]
    if absent:
        made[0].name = ""
    else:
        results.append(b.op("Cast", made[0], to=FLOAT))
    if other == "reader":
        results.append(b.op("Cast", b.op("Reshape", low_w, b.ints([-1])), to=FLOAT))
    if other == "result":
        results.append(b.op("Neg", grads[0]))
    if other == "statistic":
        results.append(b.op("Neg", wide))
    for i, value in enumerate(results):
        value.name = f"r{i}"
    graph.outputs.extend(results)
    signature = Signature(loss="r0", stage="lowered", inputs=("x", "dy"), outputs=tuple(r.name for r in results[1:]),
                          parameters=tuple(Parameter(n, trainable=False, gradient=None) for n in shapes if n not in ("x", "dy")),
                          metadata={"unreached": ",".join(shapes)})  # fmt: skip
    return TrainingGraph(ir.Model(graph, ir_version=9), signature)


def values_of(graph):
    ort = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(0)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(kernels.library_path()))
    session = ort.InferenceSession(
        ir.serde.serialize_model(graph.model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in session.get_inputs()}
    return session.run(None, feeds)


def casts(graph):
    return sum(n.op_type == "Cast" for n in graph.graph)


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("precision", ["", "bf16"])
@pytest.mark.parametrize("convolutions", [1, 2])
def test_the_same_bits_without_the_casts(precision, convolutions, absent):
    graph = step_graph(precision=precision, convolutions=convolutions, absent=absent)
    before, there = values_of(graph), casts(graph)
    outcome = AbsorbKernelCasts().call(graph.model)
    verify(graph, "types")
    assert outcome.counts == {"casts": 6} and casts(graph) == there - 6
    assert {"BatchNorm_b", "BatchNormGrad_b"} <= {n.op_type for n in graph.graph}
    for a, b in zip(before, values_of(graph), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(
    "options,reason,left",
    [
        ({"other": "reader"}, "also read by Reshape", 1),
        ({"operand": "float"}, "has an operand in float32", 1),
        ({"convolutions": 3}, "4 convolutions read", 2),
        ({"other": "result"}, "also read by Neg", 1),
    ],
)
def test_near_misses(options, reason, left):
    graph = step_graph(**options)
    before = values_of(graph)
    outcome = AbsorbKernelCasts().call(graph.model)
    assert any(reason in refusal.reason for refusal in outcome.refusals)
    assert outcome.counts["casts"] == 6 - left - (options.get("operand") == "float")
    for a, b in zip(before, values_of(graph), strict=True):
        assert np.array_equal(a, b)


def test_what_is_computed_keeps_its_low_copy():
    """A float32 value that is no input of the graph would live longer than its copy."""
    graph = step_graph(inner=True)
    assert AbsorbKernelCasts().call(graph.model).counts == {"casts": 5}
    assert any(n.op_type == "Cast" and n.inputs[0].producer() is not None for n in graph.graph)


def test_a_cast_stays_for_its_other_readers():
    graph = step_graph(other="statistic")
    before = values_of(graph)
    assert AbsorbKernelCasts().call(graph.model).counts == {"casts": 6}
    for a, b in zip(before, values_of(graph), strict=True):
        assert np.array_equal(a, b)


def test_switched_off():
    graph = step_graph()
    outcome = AbsorbKernelCasts(kernels=False).call(graph.model)
    assert not outcome.modified and "switched off" in outcome.refusals[0].reason
