"""Forward models whose weights do not fit into one protobuf message."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortgraph

ROWS, WIDTH = 1_100_000, 512  # 2.25 GB of float32, a hole in the file


@pytest.mark.slow
def test_external_data_over_two_gigabytes(tmp_path):
    """``pytest -m slow -n 0 tests/capture/onnx/test_large_files.py``: 20 s, 7 GB of memory."""
    size = 4 * ROWS * WIDTH
    with (tmp_path / "table.bin").open("wb") as file:
        file.truncate(size)
    table = TensorProto(
        name="table", data_type=TensorProto.FLOAT, dims=[ROWS, WIDTH], data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": "table.bin", "offset": "0", "length": str(size)}.items():
        table.external_data.add(key=key, value=value)
    head = np.random.default_rng(0).standard_normal((WIDTH, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["rows"]), helper.make_node("MatMul", ["rows", "head"], ["y"])],
        "large",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 3])],
        [table, onnx.numpy_helper.from_array(head, "head")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "a.onnx")
    training = ortgraph.from_onnx(tmp_path / "a.onnx", loss="cross_entropy")
    session = ortgraph.TrainingSession(ortgraph.optimize(training, "O2", optimizer=ortgraph.optim.SGD(lr=0.1)).graph)
    ids, labels = np.array([0, 5, ROWS - 1, 7]), np.array([0, 1, 2, 0])
    assert session.step({"ids": ids, "labels": labels}) == pytest.approx(np.log(3))
    wanted = -0.1 / 4 * (np.full((4, 3), 1 / 3) - np.eye(3)[labels]) @ head.T
    np.testing.assert_allclose(session.state_dict()["table"][ids], wanted, rtol=1e-5, atol=1e-6)
