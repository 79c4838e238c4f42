"""Runs small graphs on the bound arena and compares them with plain, unbound ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.graph import Signature, TrainingGraph
from ortgraph.ops.builder import Builder
from ortgraph.runtime.arena import Memory
from ortgraph.runtime.ort_session import program_model
from ortgraph.runtime.program import Program


class Bench:
    """A graph in the making, with the values of its inputs."""

    def __init__(self, opset: int = 18) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="g")
        self.build = Builder(self.graph, "test")
        self.values: dict[str, np.ndarray] = {}
        self.pairs: list[tuple[str, str]] = []

    def input(self, name: str, array: np.ndarray) -> ir.Value:
        value = ir.val(name, dtype=ir.DataType.from_numpy(array.dtype), shape=list(array.shape))
        self.graph.inputs.append(value)
        self.values[name] = array
        return value

    def op(self, op_type: str, *inputs: ir.Value | None, name: str = "", **attributes) -> ir.Value:
        value = self.build.op(op_type, *inputs, **attributes)
        value.name = name or value.name
        return value

    def output(self, *values: ir.Value) -> None:
        self.graph.outputs.extend(values)

    def update(self, old: ir.Value, new: ir.Value) -> None:
        """``new`` replaces ``old`` after a run."""
        if not new.is_graph_output():
            self.output(new)
        self.pairs.append((old.name or "", new.name or ""))

    def training_graph(self) -> TrainingGraph:
        names = [v.name or "" for v in self.graph.outputs]
        signature = Signature(loss=names[0], stage="lowered", inputs=tuple(self.values), outputs=tuple(names[1:]))
        return TrainingGraph(ir.Model(self.graph, ir_version=10), signature)

    def plain(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by ONNX Runtime itself: nothing bound, nothing of ours but the file."""
        import onnxruntime as ort

        computed = [v for v in self.graph.outputs if v.producer() is not None]
        inputs = [v for v in self.graph.inputs if v.uses()]
        if not computed:
            return self._direct(values)
        model = program_model(ir.Model(self.graph, ir_version=10), list(self.graph), inputs, computed)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = [v.name or "" for v in computed]
        found = dict(zip(names, session.run(names, {v.name: values[v.name or ""] for v in inputs}), strict=True))
        return found | self._direct(values)

    def _direct(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs that are inputs or constants."""
        direct = [v for v in self.graph.outputs if v.producer() is None]
        return {v.name: values[v.name] if v.const_value is None else v.const_value.numpy() for v in direct}


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


@pytest.fixture
def run_like_plain() -> Callable[..., Program]:
    """Run a Bench on the poisoned arena, at 1 and 2 threads; every output and update is bit-equal to plain."""

    def check(bench: Bench, runs: int = 3, threads: Sequence[int] = (1, 2)) -> Program:
        graph = bench.training_graph()
        wanted = list(dict.fromkeys(v.name or "" for v in bench.graph.outputs))
        program = None
        for count in threads:
            memory = Memory()
            persistent = {old for old, _ in bench.pairs}
            for name, array in bench.values.items():
                if name in persistent:
                    memory.add(name, array.dtype, array.shape)[...] = array
            program = Program("step", graph, wanted, bench.pairs, memory, threads=count, poison=True)
            present = dict(bench.values)
            for name, array in present.items():
                if name in program.inputs:
                    program.inputs[name][...] = array
            for _ in range(runs):
                expected = bench.plain(present)
                program.run()
                updated = {new for _, new in bench.pairs}
                for name in wanted:
                    if name not in updated and name not in persistent:
                        assert same(program.value(name), expected[name]), name
                for old, new in bench.pairs:
                    assert same(memory.persistent[old], expected[new]), (old, new)
                present.update({old: expected[new].copy() for old, new in bench.pairs})
                for name, array in bench.values.items():
                    if name in program.inputs and name not in persistent:
                        assert same(program.inputs[name], array), f"batch input {name} was overwritten"
        assert program is not None
        return program

    return check


@pytest.fixture
def bench() -> Callable[..., Bench]:
    """Makes an empty Bench."""
    return Bench
