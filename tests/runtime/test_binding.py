"""bfloat16 inputs and outputs at addresses of ours, which ONNX Runtime's own interface does not take."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import onnx
import pytest

from ortgraph.runtime import binding as bound

ort = pytest.importorskip("onnxruntime")
FLOAT, BF16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16


def session(shape):
    helper = onnx.helper
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=BF16), helper.make_node("Transpose", ["z"], ["w"], perm=[1, 0])]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", FLOAT, shape), helper.make_tensor_value_info("z", BF16, [2, 3])],
        [helper.make_tensor_value_info("y", BF16, shape), helper.make_tensor_value_info("w", BF16, [3, 2])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("shape", [[4], [], [2, 3]])
def test_bfloat16_is_read_and_written_in_place(shape):
    x = np.asarray(np.random.default_rng(0).standard_normal(shape), np.float32)
    z = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    y, w = np.zeros(shape, ml_dtypes.bfloat16), np.zeros((3, 2), ml_dtypes.bfloat16)
    run = session(shape)
    binding = run.io_binding()
    for name, array in (("x", x), ("z", z)):
        bound.bind_input(binding, name, array)
    for name, array in (("y", y), ("w", w)):
        bound.bind_output(binding, name, array.dtype, array.shape, array.ctypes.data)
    for factor in (1, 3):
        x *= factor
        z *= ml_dtypes.bfloat16(factor)
        run.run_with_iobinding(binding)
        np.testing.assert_array_equal(y, x.astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(w, z.T)


def test_descriptions_live_as_long_as_the_binding():
    before = len(bound._alive)
    run, y = session([4]), np.zeros(4, ml_dtypes.bfloat16)
    binding = run.io_binding()
    for _ in range(3):
        bound.bind_output(binding, "y", y.dtype, y.shape, y.ctypes.data)
    del binding
    gc.collect()
    assert len(bound._alive) == before


def test_what_the_runtime_allocates_is_copied():
    run = session([4])
    binding = run.io_binding()
    x, z = np.ones(4, np.float32), np.ones((2, 3), ml_dtypes.bfloat16)
    bound.bind_input(binding, "x", x)
    bound.bind_input(binding, "z", z)
    binding.bind_output("y", "cpu", 0)
    binding.bind_output("w", "cpu", 0)
    run.run_with_iobinding(binding)
    copies = [bound.copy_of(value) for value in binding.get_outputs()]
    del binding
    assert [c.dtype for c in copies] == [ml_dtypes.bfloat16] * 2 and [c.shape for c in copies] == [(4,), (3, 2)]
    assert all((c == 1).all() for c in copies)
