"""Expansions of com.microsoft operators against the training wheel's own kernels."""

import numpy as np
import pytest

from ortgraph.errors import UnsupportedError
from ortgraph.ops.expand import expand_composites
from ortgraph.ops.spec import CONTRIB, all_specs

ort = pytest.importorskip("onnxruntime")
rng = np.random.default_rng(0)
pytestmark = pytest.mark.skipif(not hasattr(ort, "training"), reason="needs the kernels of onnxruntime-training")


def f(*shape):
    return rng.standard_normal(shape)


def probabilities(*shape, axis=-1):
    e = np.exp(f(*shape))
    return e / e.sum(axis, keepdims=True)


def ints(*values):
    return np.array(values, np.int64)


def normalized(x):
    mean = x.mean(-1, keepdims=True)
    return mean, 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


X = f(3, 4, 7)
MEAN, INV_STD = normalized(X)
POOL_DY = f(2, 3, 3, 2)
POOL_INDICES = (np.arange(18).reshape(2, 3, 3, 1) * 6 + np.array([1, 4])).astype(np.int64)
LABELS = rng.integers(0, 5, 6)
LABELS[2] = 3
LOG_PROB = np.log(probabilities(6, 5))
CONV = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0], "dilations": [1, 1], "group": 1}

# name: (operator, inputs, outputs, constant inputs, attributes, shape of the first output where inputs do not tell it)
CASES = {
    "ReluGrad": ("ReluGrad", [f(3, 5), f(3, 5)], 1, (), {}),
    "TanhGrad": ("TanhGrad", [f(3, 5), np.tanh(f(3, 5))], 1, (), {}),
    "SigmoidGrad": ("SigmoidGrad", [f(3, 5), probabilities(3, 5)], 1, (), {}),
    "LeakyReluGrad": ("LeakyReluGrad", [f(3, 5), f(3, 5)], 1, (), {"alpha": 0.2}),
    "GeluGrad": ("GeluGrad", [f(3, 5), f(3, 5)], 1, (), {}),
    "FastGeluGrad": ("FastGeluGrad", [f(3, 5), f(3, 5)], 1, (), {}),
    "QuickGeluGrad": ("QuickGeluGrad", [f(3, 5), f(3, 5)], 1, (), {"alpha": 1.3}),
    "BiasGeluGrad_dX": ("BiasGeluGrad_dX", [f(3, 5), f(3, 5), f(5)], 1, (), {}),
    "BiasFastGeluGrad_dX": ("BiasFastGeluGrad_dX", [f(3, 5), f(3, 5), f(5)], 1, (), {}),
    "Gelu": ("Gelu", [f(3, 5)], 1, (), {}),
    "FastGelu": ("FastGelu", [f(3, 5)], 1, (), {}),
    "FastGelu with bias": ("FastGelu", [f(3, 5), f(5)], 1, (), {}),
    "BiasGelu": ("BiasGelu", [f(3, 5), f(5)], 1, (), {}),
    "QuickGelu": ("QuickGelu", [f(3, 5)], 1, (), {"alpha": 1.3}),
    "SoftmaxGrad_13": ("SoftmaxGrad_13", [f(3, 4, 5), probabilities(3, 4, 5, axis=1)], 1, (), {"axis": 1}),
    "LogSoftmaxGrad_13": ("LogSoftmaxGrad_13", [f(3, 5), np.log(probabilities(3, 5))], 1, (), {"axis": -1}),
    "SoftmaxGrad": ("SoftmaxGrad", [f(3, 4, 5), probabilities(3, 20).reshape(3, 4, 5)], 1, (), {"axis": 1}),
    "LogSoftmaxGrad": (
        "LogSoftmaxGrad",
        [f(3, 4, 5), np.log(probabilities(3, 20)).reshape(3, 4, 5)],
        1,
        (),
        {"axis": 1},
    ),
    "LayerNormalizationGrad": ("LayerNormalizationGrad", [f(3, 4, 7), X, f(7), MEAN, INV_STD], 3, (), {"axis": -1}),
    "SimplifiedLayerNormalizationGrad": (
        "SimplifiedLayerNormalizationGrad",
        [f(3, 4, 7), X, f(7), 1 / np.sqrt((X**2).mean(-1, keepdims=True))],
        2,
        (),
        {"axis": -1},
    ),
    "BatchNormInternal": (
        "BatchNormInternal",
        [f(4, 3, 2, 5), f(3), f(3), f(3), f(3) ** 2],
        5,
        (),
        {"epsilon": 1e-3, "momentum": 0.8},
    ),
    "BatchNormalizationGrad": (
        "BatchNormalizationGrad",
        [f(4, 3, 2, 5), f(4, 3, 2, 5), f(3), f(3), f(3) ** 2 + 0.5],
        3,
        (),
        {"epsilon": 1e-5},
    ),
    "SoftmaxCrossEntropyLossInternal": ("SoftmaxCrossEntropyLossInternal", [f(6, 5), LABELS, f(5) ** 2], 2, (), {}),
    "SoftmaxCrossEntropyLossInternal ignoring": (
        "SoftmaxCrossEntropyLossInternal",
        [f(6, 5), LABELS, None, np.array(3)],
        2,
        (3,),
        {"reduction": "sum"},
    ),
    "SoftmaxCrossEntropyLossInternal per row": (
        "SoftmaxCrossEntropyLossInternal",
        [f(6, 5), LABELS],
        2,
        (),
        {"reduction": "none"},
    ),
    "SoftmaxCrossEntropyLossInternalGrad": (
        "SoftmaxCrossEntropyLossInternalGrad",
        [f(), LOG_PROB, LABELS, f(5) ** 2, np.array(3)],
        1,
        (4,),
        {},
    ),
    "SoftmaxCrossEntropyLossInternalGrad with bias": (
        "SoftmaxCrossEntropyLossInternalGrad",
        [f(), LOG_PROB, LABELS, None, None, f(6, 5)],
        1,
        (),
        {"reduction": "sum"},
    ),
    "SoftmaxCrossEntropyLossGrad": (
        "SoftmaxCrossEntropyLossGrad",
        [f(), LOG_PROB, LABELS],
        1,
        (),
        {"reduction": "mean", "ignore_index": 3},
    ),
    "NegativeLogLikelihoodLossInternal": ("NegativeLogLikelihoodLossInternal", [LOG_PROB, LABELS], 1, (), {}),
    "GatherGrad": ("GatherGrad", [ints(5, 4), rng.integers(0, 5, (2, 3)), f(2, 3, 4)], 1, (0,), {"axis": 0}),
    "GatherGrad on an inner axis": (
        "GatherGrad",
        [ints(2, 5, 3), rng.integers(0, 5, (4,)), f(2, 4, 3)],
        1,
        (0,),
        {"axis": 1},
    ),
    "GatherGrad with a scalar": ("GatherGrad", [ints(5, 4), np.array(2), f(4)], 1, (0,), {"axis": 0}),
    "GatherGrad on the last axis": (
        "GatherGrad",
        [ints(3, 6), rng.integers(0, 6, (2, 2)), f(3, 2, 2)],
        1,
        (0,),
        {"axis": -1},
    ),
    "GatherElementsGrad": (
        "GatherElementsGrad",
        [f(2, 3), ints(2, 5), rng.integers(0, 5, (2, 3))],
        1,
        (1,),
        {"axis": 1},
    ),
    "ReduceSumTraining": ("ReduceSumTraining", [f(3, 4, 5), ints(0, 2)], 1, (1,), {"keepdims": 0}),
    "ReduceSumTraining of nothing": (
        "ReduceSumTraining",
        [f(3, 4), ints()],
        1,
        (1,),
        {"keepdims": 1, "noop_with_empty_axes": 1},
    ),
    "ConcatTraining": ("ConcatTraining", [f(2, 3), f(2, 5)], 2, (), {"axis": 1}),
    "SplitTraining": ("SplitTraining", [f(2, 8), ints(3, 5)], 2, (1,), {"axis": 1}),
    "DropoutGrad": ("DropoutGrad", [f(3, 5), f(3, 5) > 0, np.array(0.3)], 1, (2,), {}),
    "DropoutGrad of a computed ratio": ("DropoutGrad", [f(3, 5), f(3, 5) > 0, np.array(0.3)], 1, (), {}),
    "ConvGrad": ("ConvGrad", [f(2, 4, 3, 4), f(2, 3, 6, 5), f(4, 3, 3, 2)], 3, (), CONV),
    "MaxPoolGrad": ("MaxPoolGrad", [POOL_DY, POOL_INDICES], 1, (), {}, (2, 3, 6, 3)),
    "AveragePoolGrad": (
        "AveragePoolGrad",
        [f(2, 3, 3, 3)],
        1,
        (),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        (2, 3, 6, 6),
    ),
    "DivGrad": ("DivGrad", [f(3, 4), f(3, 4), f(3, 4) ** 2 + 0.5], 2, (), {}),
    "DivGrad broadcast": ("DivGrad", [f(3, 4), f(3, 1), f(4) ** 2 + 0.5], 2, (), {}),
    "Scale": ("Scale", [f(3, 4), np.array(3, np.int64)], 1, (), {}),
    "Scale down": ("Scale", [f(3, 4), np.array(3.0)], 1, (), {"scale_down": 1}),
    "SliceGrad": (
        "SliceGrad",
        [f(2, 3), ints(4, 7), ints(1, 2), ints(3, 5), ints(0, 1), ints(1, 1)],
        1,
        (1, 2, 3, 4, 5),
        {},
    ),
    "SliceGrad with steps": (
        "SliceGrad",
        [f(2, 3), ints(4, 7), ints(3, 1), ints(-9, 7), ints(0, 1), ints(-2, 2)],
        1,
        (1, 2, 3, 4, 5),
        {},
    ),
    "BroadcastGradientArgs": ("BroadcastGradientArgs", [ints(2, 1, 4), ints(3, 1)], 2, (0, 1), {}),
    "FusedMatMul of turned batches": (
        "FusedMatMul",
        [f(4, 2, 3, 5), f(6, 2, 3, 5)],
        1,
        (),
        {"transBatchA": 1, "transBatchB": 1, "transB": 1},
        (2, 3, 4, 6),
    ),
    "FusedMatMul turned and transposed": (
        "FusedMatMul",
        [f(5, 2, 4), f(6, 2, 5)],
        1,
        (),
        {"transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1},
        (2, 4, 6),
    ),
    "FusedMatMul": ("FusedMatMul", [f(2, 5, 3), f(2, 4, 5)], 1, (), {"transA": 1, "transB": 1, "alpha": 0.3}),
}

STANDARD_DOMAIN = {"MaxPoolGrad", "AveragePoolGrad"}  # where ONNX Runtime registers them
NO_KERNEL = {"DivGrad", "DivGrad broadcast", "NegativeLogLikelihoodLossInternal"}  # functions of the wheel


def case_of(operator_case, name, **extra):
    op_type, inputs, outputs, constants, attributes, *shape = CASES[name]
    return operator_case(
        op_type,
        inputs,
        outputs,
        domain="" if op_type in STANDARD_DOMAIN else CONTRIB,
        constants=constants,
        result_shape=shape[0] if shape else None,
        **attributes,
        **extra,
    )


def compare(op_type, result, want):
    assert result.shape == want.shape and result.dtype == want.dtype
    if op_type == "BroadcastGradientArgs":
        result, want = np.sort(result), np.sort(want)
    np.testing.assert_allclose(result, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_expansion_equals_the_kernel(operator_case, name):
    case = case_of(operator_case, name)
    exact = case.reference()
    for threads in (1, 2):
        for result, want in zip(case.runtime(threads), exact, strict=True):
            np.testing.assert_allclose(result, want, rtol=1e-4, atol=2e-5)
    if name in NO_KERNEL:
        return
    for result, want in zip(case.runtime(1), case.runtime(1, expanded=False), strict=True):
        compare(case.op_type, result, want)


def test_every_expansion_is_tested():
    tested = {op_type for op_type, *_ in CASES.values()}
    other = {"TransposeMatMul", "NegativeLogLikelihoodLossInternal2"}  # the same function as a tested one
    assert {
        s.op_type for s in all_specs() if s.domain in (CONTRIB, "") and s.expand is not None
    } - tested - other == set()


def test_unknown_result_shape_is_refused(operator_case):
    dy, indices = POOL_DY, POOL_INDICES
    with pytest.raises(UnsupportedError, match="MaxPoolGrad(.|\n)*bind the symbolic dimensions first"):
        operator_case("MaxPoolGrad", [dy, indices], domain="").expanded(np.float32)


def test_computed_slice_bounds_are_refused(operator_case):
    inputs = [f(2, 3), ints(4, 7), ints(1, 2), ints(3, 5)]
    case = operator_case("SliceGrad", inputs, domain=CONTRIB, constants=(1, 3))
    with pytest.raises(UnsupportedError, match="SliceGrad.*bounds are not constants"):
        case.expanded(np.float32)


def test_refused_expansion_leaves_the_graph_unchanged(operator_case):
    inputs = [f(2, 3), ints(4, 7), ints(1, 2), ints(3, 5)]
    graph = operator_case("SliceGrad", inputs, domain=CONTRIB, constants=(1, 3)).composite(np.float32)
    before = graph.text(), len(graph.graph.initializers)
    with pytest.raises(UnsupportedError):
        expand_composites(graph, ["com.microsoft.SliceGrad"])
    assert (graph.text(), len(graph.graph.initializers)) == before
