"""Brute force: every declared in-place pair, bound with the output at the input's own address.

All outputs must equal those of a run with separate buffers, bit for bit, at 1 and 2 threads.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from ortgraph.ops.spec import CONTRIB, all_specs, lookup

ort = pytest.importorskip("onnxruntime")
TRAINING = hasattr(ort, "training")
SHAPES = [(7,), (1,), (3, 5), (33, 17), (4, 1, 6), (257, 129), (1 << 15,)]
rng = np.random.default_rng(0)


def f(shape):
    return np.asarray(rng.uniform(-0.9, 0.9, shape).astype(np.float32))


def as_dtype(make, dtype):
    """The same inputs as booleans, or as odd integers (never 0, so that they divide)."""
    if dtype is np.bool_:
        return lambda s: [[np.asarray(x > 0) for x in case] for case in make(s)]
    return lambda s: [[np.asarray((np.abs(x) * 10).astype(dtype) * 2 + 1) for x in case] for case in make(s)]


def one(s):
    return [[f(s)]]


def two(s):
    return [[f(s), f(s)]]


def broadcast(s):
    """Each side as the one with the full shape, the other broadcast in every way."""
    others = [s[-1:], ()] + ([(*s[:-1], 1), (s[0], *[1] * (len(s) - 1))] if len(s) > 1 else [])
    return [*two(s), *([f(s), f(o)] for o in others), *([f(o), f(s)] for o in others)]


def variadic(s):
    return [*broadcast(s), [f(s), f(s), f(s)], [f(s[-1:]), f(s), f(s)], [f(s), f(()), f(s)]]


def where(s):
    conditions = [np.asarray(f(c) > 0) for c in (s, s[-1:], ())]
    cases = [[c, f(s), f(s)] for c in conditions]
    return [
        *cases,
        *([conditions[0], f(s), f(o)] for o in (s[-1:], ())),
        *([conditions[0], f(o), f(s)] for o in (s[-1:], ())),
    ]


def norm(s):
    return [[f(s), f(s[-1:]), f(s[-1:])]]


def scatter(s):
    return [[f(s), rng.integers(0, s[0], s), f(s)], [f(s), rng.integers(0, s[0], (1, *s[1:])), f((1, *s[1:]))]]


def gemm(s):
    rows, columns = (s[0], s[-1]) if len(s) > 1 else (3, s[0])
    return [[f((rows, k)), f((k, columns)), f((rows, columns))] for k in (1, 9, 40)]


def adam(s):
    return [[np.array(0.1, np.float32), np.array(1, np.int64), f(s), f(s), f(s), np.abs(f(s))]]


BITS = ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "Mod")
BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "PRelu")
# Inputs by operator; the rest take one float tensor. PRelu broadcasts only its slope.
INPUTS = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow"), [broadcast]),
    **dict.fromkeys(("Max", "Min", "Sum", "Mean"), [variadic]),
    **dict.fromkeys(("And", "Or", "Xor"), [as_dtype(broadcast, np.bool_)]),
    **dict.fromkeys(
        ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "Mod"), [as_dtype(broadcast, t) for t in (np.int32, np.int64)]
    ),
    "PRelu": [lambda s: [[f(s), f(s)], [f(s), f(s[-1:])]]],
    "BitShift": [as_dtype(broadcast, np.uint32)],
    "BitwiseNot": [as_dtype(one, np.int32)],
    "Not": [as_dtype(one, np.bool_)],
    "Where": [where],
    "ScatterElements": [scatter],
    "Gemm": [gemm],
    "LayerNormalization": [norm],
    "Clip": [lambda s: [[f(s), np.array(-0.2, np.float32), np.array(0.5, np.float32)]]],
    **dict.fromkeys(
        (
            "ReluGrad",
            "TanhGrad",
            "SigmoidGrad",
            "LeakyReluGrad",
            "GeluGrad",
            "FastGeluGrad",
            "SoftmaxGrad_13",
            "LogSoftmaxGrad_13",
            "InPlaceAccumulator",
            "InPlaceAccumulatorV2",
        ),
        [two],
    ),
    "BiasGelu": [lambda s: [[f(s), f(s[-1:])]]],
    "BiasGeluGrad_dX": [lambda s: [[f(s), f(s), f(s[-1:])]]],
    "DropoutGrad": [lambda s: [[f(s), np.asarray(f(s) > 0), np.array(0.3, np.float32)]]],
    "Scale": [lambda s: [[f(s), np.array(0.3, np.float32)]]],
    "AdamOptimizer": [adam],
}
ATTRIBUTES = {
    "BitShift": [{"direction": "LEFT"}],
    "Cast": [{"to": onnx.TensorProto.FLOAT}, {"to": onnx.TensorProto.INT32}],
    "ScatterElements": [{"axis": 0, "reduction": "add"}, {"axis": 0}],
    "Softmax": [{"axis": -1}, {"axis": 0}],
    "LogSoftmax": [{"axis": -1}, {"axis": 0}],
    "SoftmaxGrad_13": [{"axis": -1}, {"axis": 0}],
    "Gemm": [{}, {"alpha": 0.5, "beta": 0.7}],
}
OUTPUTS = {"InPlaceAccumulatorV2": 2, "AdamOptimizer": 4}
INFERENCE_CONTRIB = {"BiasGelu"}
DECLARED = sorted((spec.domain, spec.op_type) for spec in all_specs() if spec.inplace and spec.domain in ("", CONTRIB))


def session_of(domain, op_type, arrays, attributes, threads):
    info = onnx.helper.make_tensor_value_info
    names = [f"x{i}" for i in range(len(arrays))]
    outputs = [f"y{i}" for i in range(OUTPUTS.get(op_type, 1))]
    node = onnx.helper.make_node(op_type, names, outputs, domain=domain, **attributes)
    inputs = [
        info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in zip(names, arrays, strict=True)
    ]
    graph = onnx.helper.make_graph([node], "g", inputs, [onnx.helper.make_empty_tensor_value_info(o) for o in outputs])
    imports = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(CONTRIB, 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=9)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bound_run(session, arrays, shared, made):
    """Run with fresh input buffers; output ``made`` at the address of input ``shared`` (None: all apart)."""
    binding = session.io_binding()
    kept = [np.array(a, copy=True, order="C") for a in arrays]
    for i, array in enumerate(kept):
        binding.bind_input(f"x{i}", "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    results = []
    for j, (dtype, shape) in enumerate(made[1]):
        array = kept[shared] if shared is not None and j == made[0] else np.empty(shape, dtype)
        results.append(array)
        binding.bind_output(f"y{j}", "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    session.run_with_iobinding(binding)
    return results


def broken_pairs(domain, op_type, pairs, shapes=SHAPES):
    """Declared pairs that gave a wrong result, and pairs never met with equal shape and dtype."""
    broken, met = set(), set()
    for make in INPUTS.get(op_type, [one]):
        for attributes in ATTRIBUTES.get(op_type, [{}]):
            for shape in shapes:
                for arrays in make(shape) if attributes.get("to") != 6 else as_dtype(make, np.int32)(shape):
                    for threads in (1, 2):
                        session = session_of(domain, op_type, arrays, attributes, threads)
                        feeds = {f"x{i}": np.array(a, copy=True) for i, a in enumerate(arrays)}
                        types = [(y.dtype, y.shape) for y in session.run(None, feeds)]
                        want = bound_run(session, arrays, None, (0, types))
                        for i, o in pairs:
                            if i >= len(arrays) or types[o] != (arrays[i].dtype, arrays[i].shape):
                                continue
                            met.add((i, o))
                            got = bound_run(session, arrays, i, (o, types))
                            same = (
                                np.array_equal(g, w, equal_nan=g.dtype.kind == "f")
                                for g, w in zip(got, want, strict=True)
                            )
                            if not all(same):
                                broken.add((i, o))
    return broken, set(pairs) - met


@pytest.mark.parametrize("domain,op_type", DECLARED, ids=[f"{d}.{o}" if d else o for d, o in DECLARED])
def test_declared_pairs(domain, op_type):
    if domain == CONTRIB and not TRAINING and op_type not in INFERENCE_CONTRIB:
        pytest.skip("a kernel of onnxruntime-training only")
    broken, untested = broken_pairs(domain, op_type, lookup(domain, op_type).inplace)
    assert not broken
    assert not untested


@pytest.mark.parametrize("op_type", ["FastGelu", "QuickGelu"])
def test_the_probe_sees_kernels_that_are_not_in_place(op_type):
    assert not lookup(CONTRIB, op_type).inplace
    assert broken_pairs(CONTRIB, op_type, [(0, 0)], [(33, 17)])[0] == {(0, 0)}


def test_scatter_updates_may_not_be_overwritten():
    assert broken_pairs("", "ScatterElements", [(2, 0)], [(33, 17)])[0] == {(2, 0)}
