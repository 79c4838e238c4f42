"""Random small graphs: every canonical pass, and all of them in turn, keep the numbers of every output."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ortgraph.manager.registry import get

NAMES = (
    "eliminate-dead-code",
    "fold-constants",
    "fold-shapes",
    "eliminate-identity",
    "eliminate-cast-pairs",
    "simplify-reshapes",
    "simplify-transposes",
    "eliminate-common-subexpressions",
    "sort-nodes",
)
UNARY = ("Neg", "Abs", "Identity", "Sigmoid", "Relu")
BINARY = ("Add", "Mul", "Sub")
SHAPES = ([2, 3], [3, 2], [6], [1, 6], [2, 1, 3])
OTHERS = {onnx.TensorProto.FLOAT16: "half", onnx.TensorProto.DOUBLE: "double"}


class Maker:
    """Grows a graph over float values of six elements, one node at a time, from drawn numbers."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.shapes: dict[str, list[int]] = {"x": [2, 3], "w": [2, 3]}  # w stands for a parameter

    def new(self, op: str, inputs: list[str], shape: list[int], **attributes: object) -> str:
        name = str(len(self.nodes))  # numbers as names, on purpose
        self.nodes.append(onnx.helper.make_node(op, inputs, [name], **attributes))
        self.shapes[name] = shape
        return name

    def constant(self, values: object, dtype: type) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def grow(self, kind: int, pick: int, choice: int) -> None:
        values = list(self.shapes)
        x = values[pick % len(values)]
        shape = self.shapes[x]
        if kind == 0:
            self.new(UNARY[choice % len(UNARY)], [x], shape)
        elif kind == 1:
            same = [v for v in values if self.shapes[v] == shape]
            self.new(BINARY[choice % len(BINARY)], [x, same[choice % len(same)]], shape)
        elif kind == 2:
            constant = self.constant((0.0, 1.0, 2.0, -0.0)[choice % 4], np.float32)
            pair = [x, constant] if choice % 2 else [constant, x]
            self.new(BINARY[choice // 4 % len(BINARY)], pair, shape)
        elif kind == 3:
            target = SHAPES[choice % len(SHAPES)]
            self.new("Reshape", [x, self.constant(target, np.int64)], target)
        elif kind == 4:
            perm = list(np.random.default_rng(choice).permutation(len(shape)))
            self.new("Transpose", [x], [shape[p] for p in perm], perm=perm)
        elif kind == 5:
            other = list(OTHERS)[choice % 2]
            wide = self.new("Cast", [x], [-1], to=other)
            self.new("Cast", [wide], shape, to=onnx.TensorProto.FLOAT)
        elif kind == 6:
            axis = self.constant([choice % (len(shape) + 1)], np.int64)
            inner = self.new("Unsqueeze", [x, axis], [-1])
            self.new("Squeeze", [inner, axis], shape)
        elif kind == 7:
            like = self.new("Shape", [x], [-1])
            source = values[choice % len(values)]
            self.new("Reshape", [source, like], shape)
        elif kind == 8:
            a = self.constant([1.0, 2.0, 3.0], np.float32)
            total = self.new("ReduceSum", [self.new("Mul", [a, a], [-1])], [-1], keepdims=0)
            self.new("Mul", [x, total], shape)
        for name in [n for n, s in self.shapes.items() if s == [-1]]:
            del self.shapes[name]

    def model(self, outputs: list[int]) -> ir.Model:
        made = [n for n in self.shapes if n not in ("x", "w")]
        chosen = sorted({made[o % len(made)] for o in outputs}, key=made.index)
        tensor = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            self.nodes, "g", [tensor("x", 1, [2, 3]), tensor("w", 1, [2, 3])],
            [tensor(n, 1, self.shapes[n]) for n in chosen], self.constants,
        )  # fmt: skip
        proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
        return ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True))


STEP = st.tuples(st.integers(0, 8), st.integers(0, 30), st.integers(0, 30))
GRAPHS = st.tuples(st.lists(STEP, min_size=1, max_size=14), st.lists(st.integers(0, 30), min_size=1, max_size=3))
FEEDS = {
    "x": np.array([[0.5, -1.25, 3.0], [0.0, 2.5, -7.0]], np.float32),
    "w": np.zeros((2, 3), np.float32),  # a zero-valued parameter
}


def build(drawn) -> ir.Model:
    steps, outputs = drawn
    maker = Maker()
    maker.new("Mul", ["x", "w"], [2, 3])
    for step in steps:
        maker.grow(*step)
    return maker.model(outputs)


@pytest.mark.parametrize("name", NAMES)
@given(drawn=GRAPHS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_each_pass_keeps_every_output(run, name, drawn):
    run(build(drawn), get(name)(), FEEDS)


@given(drawn=GRAPHS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_all_passes_in_turn(run, drawn):
    model = build(drawn)
    before = sum(1 for _ in model.graph)
    for name in NAMES + NAMES[:1]:
        model = run(model, get(name)(), FEEDS).graph.model
    assert sum(1 for _ in model.graph) <= before
    assert [v.name for v in model.graph.inputs] == ["x", "w"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(drawn=GRAPHS)
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
def test_each_pass_keeps_every_output_of_many_graphs(run, name, drawn):
    run(build(drawn), get(name)(), FEEDS)
