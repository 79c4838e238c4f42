"""Running single kernels through ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from ortgraph.ops import kernels  # noqa: E402

_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(bool): TensorProto.BOOL,
}


class KernelRunner:
    """One kernel in a session of its own; ``None`` in ``inputs`` is an absent input."""

    def __init__(self, op, inputs, outputs, threads=2, domain="ortgraph.kernels", **attributes):
        if not kernels.available():
            pytest.skip(kernels.reason())
        self.feeds = {f"i{i}": np.array(x, order="C") for i, x in enumerate(inputs) if x is not None}
        self.names = [f"o{i}" for i in range(outputs) if f"o{i}" not in attributes.get("absent", ())]
        attributes.pop("absent", None)
        node = helper.make_node(
            op,
            ["" if x is None else f"i{i}" for i, x in enumerate(inputs)],
            [f"o{i}" if f"o{i}" in self.names else "" for i in range(outputs)],
            domain=domain,
            **attributes,
        )
        graph = helper.make_graph(
            [node],
            "kernel",
            [helper.make_tensor_value_info(k, _TYPES[x.dtype], x.shape) for k, x in self.feeds.items()],
            [helper.make_empty_tensor_value_info(n) for n in self.names],
        )
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("ortgraph.kernels", 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=9)
        self.model = model.SerializeToString()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.register_custom_ops_library(str(kernels.library_path()))
        self.session = onnxruntime.InferenceSession(self.model, options, providers=["CPUExecutionProvider"])

    def run(self, **feeds):
        return self.session.run(self.names, {**self.feeds, **feeds})

    def run_inplace(self, pairs, expected):
        """Bind output o over input i for every (i, o) of ``pairs``; the rest get buffers, and must not write behind."""
        feeds = {k: x.copy() for k, x in self.feeds.items()}
        over = {f"o{o}": feeds[f"i{i}"] for i, o in pairs}
        binding = self.session.io_binding()
        for name, x in feeds.items():
            binding.bind_input(name, "cpu", 0, x.dtype, x.shape, x.ctypes.data)
        rooms = {n: np.full(y.size + 64, 7, y.dtype) for n, y in zip(self.names, expected, strict=True)}
        buffers = {n: over.get(n, rooms[n][:-64]) for n in self.names}
        for name, y in zip(self.names, expected, strict=True):
            binding.bind_output(name, "cpu", 0, y.dtype, y.shape, buffers[name].ctypes.data)
        self.session.run_with_iobinding(binding)
        for name, room in rooms.items():
            assert (room[-64:] == np.full(64, 7, room.dtype)).all(), f"{name} is written behind its end"
        return [buffers[n].reshape(y.shape) for n, y in zip(self.names, expected, strict=True)]


@pytest.fixture
def kernel():
    """``kernel(op, inputs, outputs, threads=2, **attributes)``: a KernelRunner."""
    return KernelRunner


def run_low_precision(op, inputs, low_inputs, low_outputs, options):
    """A kernel between casts to and from bfloat16."""
    nodes, names = [], []
    for i, low in enumerate(low_inputs):
        names.append(f"c{i}" if low else f"i{i}")
        if low:
            nodes.append(helper.make_node("Cast", [f"i{i}"], [f"c{i}"], to=TensorProto.BFLOAT16))
    made = [f"k{o}" if low else f"o{o}" for o, low in enumerate(low_outputs)]
    nodes.append(helper.make_node(op, names, made, domain="ortgraph.kernels", **options))
    nodes += [
        helper.make_node("Cast", [f"k{o}"], [f"o{o}"], to=TensorProto.FLOAT) for o, low in enumerate(low_outputs) if low
    ]
    graph = helper.make_graph(
        nodes,
        "low",
        [helper.make_tensor_value_info(f"i{i}", TensorProto.FLOAT, a.shape) for i, a in enumerate(inputs)],
        [helper.make_empty_tensor_value_info(f"o{o}") for o in range(len(low_outputs))],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ortgraph.kernels", 1)]
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.register_custom_ops_library(str(kernels.library_path()))
    model = helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    return session.run(None, {f"i{i}": a for i, a in enumerate(inputs)})


@pytest.fixture
def run_low():
    """``run_low_precision(op, inputs, low_inputs, low_outputs, options)``, where kernels can be built."""
    if not kernels.available():
        pytest.skip(kernels.reason())
    return run_low_precision
