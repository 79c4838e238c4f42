"""Runs one operator through its reference expansion: in float64 by onnx.reference, in float32 by ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortgraph.graph import TrainingGraph
from ortgraph.ops import Builder
from ortgraph.ops.expand import expand_composites


class Erf(OpRun):
    """onnx.reference computes Erf in float32 whatever the input; the specification needs it in float64."""

    op_domain = ""

    def _run(self, x):
        return (np.vectorize(math.erf, otypes=[x.dtype])(x) if x.size else x,)


class ConvTranspose(OpRun):
    """onnx.reference fails on grouped ConvTranspose."""

    op_domain = ""

    def _run(self, x, w, bias=None, **attributes):
        import torch

        dims = x.ndim - 2
        call = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}[dims]
        full = call(
            torch.tensor(x), torch.tensor(w), None, tuple(attributes["strides"] or [1] * dims), 0, 0,
            attributes["group"] or 1, tuple(attributes["dilations"] or [1] * dims),
        ).numpy()  # fmt: skip
        extra = attributes["output_padding"] or [0] * dims
        pads = attributes["pads"] or [0] * (2 * dims)
        full = np.pad(full, [(0, 0), (0, 0), *((0, e) for e in extra)])
        crop = tuple(slice(pads[i], full.shape[2 + i] - pads[dims + i]) for i in range(dims))
        return (full[(slice(None), slice(None), *crop)],)


def make_graph(
    op_type: str,
    inputs: Sequence[np.ndarray | None],
    outputs: int,
    domain: str,
    opset: int,
    constants: Sequence[int],
    shapes: dict[int, list],
    **attributes,
) -> TrainingGraph:
    """A graph of one node. ``constants`` are inputs made initializers; ``shapes`` replaces recorded shapes."""
    values = []
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset, "ortgraph": 1}, name="case")
    for i, array in enumerate(inputs):
        if array is None:
            values.append(None)
            continue
        if i in constants:
            value = ir.Value(
                name=f"c{i}",
                const_value=ir.tensor(array),
                shape=ir.Shape(array.shape),
                type=ir.TensorType(ir.tensor(array).dtype),
            )
            graph.register_initializer(value)
        else:
            value = ir.Value(
                name=f"x{i}", shape=ir.Shape(shapes.get(i, array.shape)), type=ir.TensorType(ir.tensor(array).dtype)
            )
            graph.inputs.append(value)
        values.append(value)
    made = Builder(graph, "test").multi(op_type, *values, outputs=outputs, domain=domain, **attributes)
    for i, value in enumerate(made):
        value.name = f"y{i}"
    graph.outputs.extend(made)
    return TrainingGraph(ir.Model(graph, ir_version=10))


class OperatorCase:
    """One operator with example inputs (float64); ``None`` leaves an optional input out."""

    def __init__(
        self,
        op_type: str,
        inputs: Sequence[np.ndarray | None],
        outputs: int = 1,
        domain: str = "ortgraph",
        opset: int = 18,
        constants: Sequence[int] = (),
        shapes: dict[int, list] | None = None,
        result_shape: Sequence[int] | None = None,
        **attributes,
    ) -> None:
        self.op_type, self.inputs, self.outputs, self.domain = op_type, list(inputs), outputs, domain
        self.opset, self.constants, self.attributes, self.shapes = opset, constants, attributes, shapes or {}
        self.result_shape = result_shape

    def inputs_as(self, dtype: type) -> list[np.ndarray | None]:
        return [x.astype(dtype) if x is not None and x.dtype.kind == "f" else x for x in self.inputs]

    def composite(self, dtype: type) -> TrainingGraph:
        """The graph of the one operator, not expanded."""
        graph = make_graph(
            self.op_type,
            self.inputs_as(dtype),
            self.outputs,
            self.domain,
            self.opset,
            self.constants,
            self.shapes,
            **self.attributes,
        )
        if self.result_shape is not None:
            graph.graph.outputs[0].shape = ir.Shape(self.result_shape)
        return graph  # fmt: skip

    def expanded(self, dtype: type) -> TrainingGraph:
        graph = self.composite(dtype)
        self.inferred = [(v.dtype, v.shape) for v in graph.graph.outputs]
        only = None if self.domain == "ortgraph" else [f"{self.domain}.{self.op_type}".lstrip(".")]
        assert expand_composites(graph, only) >= 1
        if self.domain != "ortgraph":
            expand_composites(graph)
        assert not [n for n in graph.graph if n.domain == "ortgraph"]
        return graph

    def _feeds(self, dtype: type) -> dict[str, np.ndarray]:
        return {f"x{i}": x for i, x in enumerate(self.inputs_as(dtype)) if x is not None and i not in self.constants}

    def reference(self) -> list[np.ndarray]:
        """float64 results of the specification; also checks the inferred types."""
        graph = self.expanded(np.float64)
        proto = ir.serde.serialize_model(graph.model)
        onnx.checker.check_model(proto, full_check=True)
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(proto, new_ops=[Erf, ConvTranspose]).run(None, self._feeds(np.float64))
        for (dtype, shape), result in zip(self.inferred, results, strict=True):
            assert dtype is not None and dtype.numpy() == result.dtype, (dtype, result.dtype)
            if not self.shapes:
                assert tuple(shape) == result.shape, (shape, result.shape)
        return results

    def runtime(self, threads: int, expanded: bool = True) -> list[np.ndarray]:
        """float32 results of ONNX Runtime; of its own kernel when not ``expanded``."""
        ort = pytest.importorskip("onnxruntime")
        graph = self.expanded(np.float32) if expanded else self.composite(np.float32)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        session = ort.InferenceSession(
            ir.serde.serialize_model(graph.model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return session.run(None, self._feeds(np.float32))

    def check(self, expected: Sequence[np.ndarray | None], rtol: float = 2e-5, exact: float = 1e-10) -> None:
        """Compare float64 expansion and float32 runtime (1 and 2 threads) with ``expected`` (float64), norm-wise."""
        close(self.reference(), expected, exact)
        for threads in (1, 2):
            close(self.runtime(threads), expected, rtol)


def close(results: Sequence[np.ndarray], expected: Sequence[np.ndarray | None], tolerance: float) -> None:
    assert len(results) == len(expected)
    for i, (result, want) in enumerate(zip(results, expected, strict=True)):
        if want is None:
            continue
        want = np.asarray(want)
        assert result.shape == want.shape, (i, result.shape, want.shape)
        if want.dtype.kind != "f":
            np.testing.assert_array_equal(result, want)
            continue
        np.testing.assert_array_equal(np.isnan(result), np.isnan(want))
        a, w = (
            np.nan_to_num(result.astype(np.float64), posinf=1e30, neginf=-1e30),
            np.nan_to_num(want, posinf=1e30, neginf=-1e30),
        )
        error = np.linalg.norm((a - w).ravel()) / (np.linalg.norm(w.ravel()) + 1e-30)
        assert error < tolerance, f"output {i}: relative error {error:.2e}"


@pytest.fixture(scope="session")
def operator_case() -> type[OperatorCase]:
    return OperatorCase
