"""Fixtures for pass tests: make a small graph from a function, run one, compare two."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.graph import Signature, TrainingGraph
from ortgraph.graph.text import text_hash
from ortgraph.graph.verify import verify
from ortgraph.ops import kernels
from ortgraph.ops.alternatives import SHIPPED_TABLE
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.lowering.lower import Lower

F32 = ir.DataType.FLOAT


@pytest.fixture(scope="session")
def decomposed_attention(tmp_path_factory) -> str:
    """Path of a cost table by which attention is lowered to products and softmax."""
    table = json.loads(SHIPPED_TABLE.read_text(encoding="utf-8"))
    for name in ("Attention.kernel", "AttentionGrad.kernel"):
        table["entries"][name]["fixed_us"] = 1e9
    path = tmp_path_factory.mktemp("table") / "dear.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    return str(path)


class Workbench:
    """Makes, runs and compares small graphs. Graph outputs are called out0, out1, ..."""

    def make(
        self,
        body: Callable[..., ir.Value | Sequence[ir.Value]],
        inputs: dict[str, tuple],
        dtypes: dict[str, ir.DataType] | None = None,
        opset: int = 18,
    ) -> TrainingGraph:
        """``body(builder, *input values)`` gives the outputs; ``inputs`` maps names to shapes."""
        dtypes = dtypes or {}
        values = [ir.val(n, dtype=dtypes.get(n, F32), shape=list(s)) for n, s in inputs.items()]
        graph = ir.Graph(values, [], nodes=[], opset_imports={"": opset}, name="joint")
        build = Builder(graph, "capture")
        found = body(build, *values)
        outputs = [found] if isinstance(found, ir.Value) else list(found)
        for i, value in enumerate(outputs):
            value.name = f"out{i}"
            graph.outputs.append(value)
        signature = Signature(
            loss="out0", outputs=tuple(f"out{i}" for i in range(1, len(outputs))), inputs=tuple(inputs)
        )
        return TrainingGraph(ir.Model(graph, ir_version=10), signature)

    def feeds(self, graph: TrainingGraph, seed: int = 0) -> dict[str, np.ndarray]:
        """Random inputs; integers are drawn from 0, 1, 2."""
        rng = np.random.default_rng(seed)
        feeds = {}
        for value in graph.graph.inputs:
            dtype = value.dtype.numpy()
            shape = tuple(d if isinstance(d, int) else 3 for d in value.shape)
            integers = rng.integers(0, 3, shape).astype(dtype)
            feeds[value.name] = (
                rng.standard_normal(shape).astype(dtype) if np.issubdtype(dtype, np.floating) else integers
            )
        return feeds

    def run(self, graph: TrainingGraph, feeds: dict[str, np.ndarray], threads: int = 1) -> list[np.ndarray]:
        """Lower a copy by expansion and run it in ONNX Runtime, its own optimizations off."""
        import onnxruntime as ort

        lowered = graph.clone()
        Lower(prefer="expansion", kernels=False)(lowered.model)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if any(n.domain == KERNELS for n in lowered.graph):
            options.register_custom_ops_library(str(kernels.library_path()))
        proto = ir.serde.serialize_model(lowered.model)
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})

    def apply(self, graph: TrainingGraph, a_pass: ir.passes.PassBase, tolerance: float = 2e-5) -> dict[str, int]:
        """Run a pass on the graph; check truthfulness, structure and numbers (1 and 2 threads). Returns the counts."""
        feeds = self.feeds(graph)
        before, text = self.run(graph, feeds), text_hash(graph)
        outcome = a_pass(graph.model)
        assert outcome.modified == (text_hash(graph) != text), "the pass did not tell the truth about change"
        verify(graph)
        for old, new in zip(before, self.run(graph, feeds, threads=2), strict=True):
            assert old.dtype == new.dtype and old.shape == new.shape
            scale = max(1.0, float(np.abs(old).max(initial=0.0)))
            np.testing.assert_allclose(new, old, rtol=0, atol=tolerance * scale)
        assert not a_pass(graph.model).counts, "the pass is not idempotent"
        return dict(outcome.counts)

    def refusals(self, graph: TrainingGraph, a_pass: ir.passes.PassBase) -> list[str]:
        """Run a pass that must leave the graph alone; the reasons it gave."""
        text = text_hash(graph)
        outcome = a_pass(graph.model)
        assert not outcome.modified and text_hash(graph) == text, f"changed: {outcome.counts}"
        return [r.reason for r in outcome.refusals]

    def ops(self, graph: TrainingGraph) -> list[str]:
        """Operators in order."""
        return [f"{n.domain}.{n.op_type}" if n.domain else n.op_type for n in graph.graph]

    def expose_each(
        self, make: Callable[[], TrainingGraph], a_pass: ir.passes.PassBase, tolerance: float = 2e-5
    ) -> list[tuple[str, dict[str, int]]]:
        """Make each inner value a graph output in turn: results stay right. Returns (operator, counts) of each."""
        seen = []
        for i in range(make().node_count()):
            graph = make()
            node = list(graph.graph)[i]
            for value in node.outputs:
                if value.is_graph_output() or not value.name:
                    continue
                exposed = make()
                inner = next(o for n in exposed.graph for o in n.outputs if o.name == value.name)
                exposed.graph.outputs.append(inner)
                s = exposed.signature
                exposed.signature = s.replace(outputs=(*s.outputs, inner.name))
                seen.append((node.op_type, self.apply(exposed, a_pass, tolerance)))
        return seen


@pytest.fixture
def bench() -> Workbench:
    """The workbench of pass tests."""
    return Workbench()
