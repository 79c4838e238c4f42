"""Fixtures for generated kernels: a small graph, fused, run in ONNX Runtime and compared with float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortgraph.graph import TrainingGraph
from ortgraph.ops import generated
from ortgraph.ops.builder import Builder
from ortgraph.ops.expand import expand_composites, expand_node
from ortgraph.passes.fusion.fuse_regions import FuseRegions
from ortgraph.runtime.binding import bind_input, bind_output

F32 = ir.DataType.FLOAT


class Fused:
    """A graph of one or more regions.

    Args:
        body: ``body(builder, *inputs)`` gives the outputs.
        inputs: Shapes by name, or (dtype, shape).
        regions: How many generated nodes are expected; None for any number.
    """

    def __init__(self, body, inputs, regions=1):
        values = []
        for name, shape in inputs.items():
            dtype, dims = shape if isinstance(shape[0] if shape else None, ir.DataType) else (F32, shape)
            values.append(ir.val(name, dtype=dtype, shape=list(dims)))
        graph = ir.Graph(values, [], nodes=[], opset_imports={"": 18, "ortgraph": 1}, name="g")
        found = body(Builder(graph, "capture"), *values)
        for i, value in enumerate(found if isinstance(found, (list, tuple)) else [found]):
            value.name = f"out{i}"
            graph.outputs.append(value)
        self.plain = TrainingGraph(ir.Model(graph, ir_version=10))
        self.graph = self.plain.clone()
        self.changes = FuseRegions(least_bytes=0).run(self.graph)
        self.nodes = [n for n in self.graph.graph if n.domain == generated.DOMAIN]
        if regions is not None:
            assert len(self.nodes) == regions, self.graph.text()
        self._sessions = {}

    @property
    def node(self):
        (node,) = self.nodes
        return node

    def proto(self, graph):
        g, proto = graph.graph, onnx.ModelProto(ir_version=10)
        proto.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in g.opset_imports.items() if d != "ortgraph")
        proto.graph.name = "g"
        proto.graph.node.extend(generated.serialize_node(n) for n in g)
        for value in g.initializers.values():
            tensor = ir.serde.serialize_tensor(value.const_value)
            tensor.name = value.name
            proto.graph.initializer.append(tensor)
        for values, to in ((g.inputs, proto.graph.input), (g.outputs, proto.graph.output)):
            for v in values:
                to.append(onnx.helper.make_tensor_value_info(v.name, int(v.dtype), list(v.shape)))
        return proto

    def session(self, threads=2):
        import onnxruntime as ort

        if threads not in self._sessions:
            options = ort.SessionOptions()
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.intra_op_num_threads = threads
            options.log_severity_level = 4
            options.register_custom_ops_library(str(generated.library_path(self.graph.model)))
            model = self.proto(self.graph).SerializeToString()
            self._sessions[threads] = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return self._sessions[threads]

    def run(self, feeds, threads=2, inplace=()):
        """Outputs; ``inplace`` holds (input name, output name) pairs that share memory."""
        session = self.session(threads)
        feeds = {k: np.array(v, order="C") for k, v in feeds.items()}
        binding, over = session.io_binding(), {o: feeds[i] for i, o in inplace}
        for name, x in feeds.items():
            bind_input(binding, name, x)
        outputs = {}
        for value in self.graph.graph.outputs:
            y = over.get(value.name)
            if y is None:
                y = np.full(tuple(value.shape), 7).astype(value.dtype.numpy())
            outputs[value.name] = y
            bind_output(binding, value.name, y.dtype, y.shape, y.ctypes.data)
        session.run_with_iobinding(binding)
        return list(outputs.values())

    def feeds(self, seed=0, scale=1.0):
        rng = np.random.default_rng(seed)
        made = {}
        for v in self.plain.graph.inputs:
            shape = tuple(v.shape)
            if v.dtype == ir.DataType.BOOL:
                made[v.name] = rng.random(shape) < 0.7
            elif v.dtype == ir.DataType.INT64:
                made[v.name] = rng.integers(1, 9, shape)
            else:
                made[v.name] = (rng.standard_normal(shape) * scale).astype(v.dtype.numpy())
        return made

    def reference(self, feeds):
        """The graph before fusion, composites expanded, in float64."""
        return evaluate(self.plain, feeds)

    def inlined(self, feeds):
        """The graph after fusion with every body in its node's place, in float64."""
        graph = self.graph.clone()
        for node in [n for n in graph.graph if n.domain == generated.DOMAIN]:
            expand_node(node)
        return evaluate(graph, feeds)

    def check(self, seed=0, scale=1.0, tolerance=3e-6, feeds=None):
        """Compare with float64 at one and two threads, and the body with the graph."""
        feeds = self.feeds(seed, scale) if feeds is None else feeds
        want = self.reference(feeds)
        one = self.run(feeds, threads=1)
        for a, b in zip(one, self.run(feeds, threads=2), strict=True):
            assert np.array_equal(a, b, equal_nan=a.dtype != bool)
        for got, body, wanted in zip(one, self.inlined(feeds), want, strict=True):
            compare(got, wanted, tolerance)
            compare(body, wanted, 1e-6)
        return one


def evaluate(graph, feeds):
    graph = graph.clone()
    expand_composites(graph)
    proto = ir.serde.serialize_model(graph.model)
    del proto.functions[:]
    _widen(proto)
    wide = {k: v.astype(np.float64) if _is_float(v) else v for k, v in feeds.items()}
    with np.errstate(all="ignore"):
        return onnx.reference.ReferenceEvaluator(proto).run(None, wide)


def _widen(proto):
    """float32 constants and casts in float64."""
    double = onnx.TensorProto.DOUBLE
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            wide = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
            tensor.CopyFrom(wide)
    for node in proto.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in (1, 16):
                attribute.i = double


def _is_float(x):
    return np.issubdtype(x.dtype, np.floating) or x.dtype == ml_dtypes.bfloat16


def compare(got, want, tolerance):
    """Infinities and NaN at the same places; the rest within ``tolerance`` of the largest number of the same row."""
    assert got.shape == want.shape
    if got.dtype == bool:
        assert np.array_equal(got, want)
        return
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert np.array_equal(got[~finite & ~np.isnan(want)], want[~finite & ~np.isnan(want)])
    if not finite.any():
        return
    held = np.where(finite, np.abs(want), 0)
    size = np.broadcast_to(held.max(-1, keepdims=True) if want.ndim else held, want.shape)
    error = np.abs(got - np.where(finite, want, 0))[finite]
    limit = tolerance * np.maximum(size[finite], 1e-2 * held.max()) + 1e-30
    assert (error <= limit).all(), float((error / limit).max())


@pytest.fixture(scope="session")
def fused():
    """``fused(body, inputs, regions=1)``: a Fused graph."""
    if not generated.available():
        pytest.skip(generated.reason())
    return Fused
