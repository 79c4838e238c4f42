"""Sanity of the operator table, and its shape rules against ONNX's own inference."""

from __future__ import annotations

import pathlib
import re
import time

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortgraph.graph import TrainingGraph
from ortgraph.ops import Builder, infer_graph, spec_of
from ortgraph.ops.infer import _standard
from ortgraph.ops.spec import COMPOSITE, CONTRIB, all_specs, lookup

SPECS = list(all_specs())
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "operators.md"


def documented():
    """Outputs by operator in the contract's table."""
    rows = [line.split("|") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    return {row[1].strip(): row[3] for row in rows if re.fullmatch(r"[A-Z]\w+", row[1].strip())}


def test_every_operator_says_what_it_computes():
    assert [s.op_type for s in SPECS if len(s.doc) < 5 or "\n" in s.doc] == []


def test_composites_are_those_of_the_contract():
    outputs = documented()
    assert {s.op_type for s in SPECS if s.domain == COMPOSITE} == set(outputs)
    for spec in SPECS:
        if spec.domain == COMPOSITE:
            assert spec.infer is not None and spec.expand is not None and spec.deterministic, spec.op_type
            marked = re.sub(r"\(.*?\)|\[.*?\]", "", outputs[spec.op_type]).split(",")
            assert spec.optional_outputs == tuple(i for i, o in enumerate(marked) if "?" in o), spec.op_type


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.domain}.{s.op_type}")
def test_facts_are_consistent(spec):
    assert spec.precision in ("low", "any", "accumulate", "float32")
    assert bool(spec.low_inputs) == bool(spec.low_outputs) == (spec.precision == "low")
    assert not (spec.commutative and not spec.elementwise)
    assert set(spec.alias).isdisjoint(spec.inplace) or spec.domain not in ("", CONTRIB, COMPOSITE)
    assert spec.deterministic or not spec.recompute
    if spec.domain == "" and onnx.defs.has(spec.op_type):
        schema = onnx.defs.get_schema(spec.op_type)
        assert all(o < schema.max_output for _, o in (*spec.inplace, *spec.alias))
        assert all(i < schema.max_input for i, _ in (*spec.inplace, *spec.alias))


def test_operators_that_draw_are_never_merged():
    drawing = {
        "Dropout",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
    }
    assert {s.op_type for s in SPECS if s.domain == "" and not s.deterministic} == drawing


def test_unknown_operators_get_safe_defaults():
    spec = lookup("some.vendor", "Mystery")
    assert not spec.deterministic and not spec.recompute and not spec.inplace and not spec.known


@pytest.mark.parametrize("name", ["If", "Loop", "Scan", "SequenceMap"])
def test_control_flow_is_left_unknown(name):
    assert not lookup("", name).known


def value(name, shape, dtype=ir.DataType.FLOAT):
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def node_of(op_type, inputs, outputs=1, **attributes):
    """A node whose inputs are shapes (float), dtypes with shapes, or arrays (constants)."""
    values = []
    for i, x in enumerate(inputs):
        if isinstance(x, np.ndarray):
            values.append(
                ir.Value(
                    name=f"c{i}",
                    const_value=ir.tensor(x),
                    shape=ir.Shape(x.shape),
                    type=ir.TensorType(ir.tensor(x).dtype),
                )
            )
        elif x is None:
            values.append(None)
        elif len(x) == 2 and isinstance(x[0], ir.DataType):
            values.append(value(f"x{i}", x[1], x[0]))
        else:
            values.append(value(f"x{i}", x))
    return ir.node(op_type, values, {k: v for k, v in attributes.items()}, num_outputs=outputs)


I64, BOOL = ir.DataType.INT64, ir.DataType.BOOL


def a(*values):
    return np.array(values, np.int64)


STATIC = [
    ("Add", [(3, 1, 5), (4, 1)], 1, {}),
    ("Add", [(), (2,)], 1, {}),
    ("Mul", [(0, 3), (1, 3)], 1, {}),
    ("Greater", [(2, 3), (3,)], 1, {}),
    ("Where", [(BOOL, (3, 1)), (1, 4), ()], 1, {}),
    ("Max", [(2, 1), (3,), ()], 1, {}),
    ("Cast", [(2, 3)], 1, {"to": 7}),
    ("Relu", [(2, 3)], 1, {}),
    ("IsNaN", [(2,)], 1, {}),
    ("And", [(BOOL, (2, 1)), (BOOL, (3,))], 1, {}),
    ("Clip", [(2, 3), (), ()], 1, {}),
    ("MatMul", [(2, 3), (3, 4)], 1, {}),
    ("MatMul", [(5, 1, 2, 3), (4, 3, 6)], 1, {}),
    ("MatMul", [(3,), (3, 4)], 1, {}),
    ("MatMul", [(2, 3), (3,)], 1, {}),
    ("MatMul", [(3,), (3,)], 1, {}),
    ("MatMul", [(3,), (5, 3, 4)], 1, {}),
    ("Gemm", [(2, 3), (4, 3), (4,)], 1, {"transB": 1}),
    ("Gemm", [(3, 2), (3, 4)], 1, {"transA": 1}),
    ("Reshape", [(2, 3, 4), a(0, -1)], 1, {}),
    ("Reshape", [(2, 3, 4), a(4, 6)], 1, {}),
    ("Reshape", [(0, 3), a(3, 0)], 1, {"allowzero": 1}),
    ("Reshape", [(2, 3), a(-1, 1, 6)], 1, {}),
    ("Squeeze", [(1, 3, 1), a(0, -1)], 1, {}),
    ("Squeeze", [(1, 3, 1)], 1, {}),
    ("Unsqueeze", [(3, 4), a(0, -1)], 1, {}),
    ("Unsqueeze", [(), a(0)], 1, {}),
    ("Flatten", [(2, 3, 4)], 1, {"axis": 2}),
    ("Flatten", [(2, 3)], 1, {"axis": 0}),
    ("Transpose", [(2, 3, 4)], 1, {"perm": [2, 0, 1]}),
    ("Transpose", [(2, 3, 4)], 1, {}),
    ("Identity", [(2,)], 1, {}),
    ("Gather", [(5, 6, 7), (I64, (2, 3))], 1, {"axis": 1}),
    ("Gather", [(5, 6), (I64, ())], 1, {"axis": -1}),
    ("GatherElements", [(5, 6), (I64, (2, 6))], 1, {"axis": 0}),
    ("ScatterElements", [(5, 6), (I64, (2, 3)), (2, 3)], 1, {"reduction": "add"}),
    ("Concat", [(2, 3), (4, 3)], 1, {"axis": 0}),
    ("Concat", [(2, 3), (2, 1), (2, 5)], 1, {"axis": -1}),
    ("Split", [(6, 4), a(1, 5)], 2, {"axis": 0}),
    ("Split", [(6, 4)], 2, {"axis": 1, "num_outputs": 2}),
    ("Split", [(5, 4)], 2, {"num_outputs": 2}),
    ("Slice", [(9, 8), a(1, -3), a(7, 100), a(0, 1), a(2, 1)], 1, {}),
    ("Slice", [(9,), a(-1), a(-100), a(0), a(-2)], 1, {}),
    ("Slice", [(9, 8), a(2), a(4), a(-1)], 1, {}),
    ("Slice", [(9, 8), a(2, 2), a(4, -1)], 1, {}),
    ("Slice", [(5,), a(7), a(9)], 1, {}),
    ("Slice", [(5,), a(3), a(0), a(0), a(-1)], 1, {}),
    ("Slice", [(5,), a(9), a(-9), a(0), a(-3)], 1, {}),
    ("Expand", [(3, 1), a(2, 1, 4)], 1, {}),
    ("Expand", [(3, 4), a(1)], 1, {}),
    ("Trilu", [(3, 4)], 1, {}),
    ("ConstantOfShape", [a(2, 3)], 1, {}),
    ("CumSum", [(2, 3), a(1)[0:1].reshape(())], 1, {}),
    ("ReduceSum", [(2, 3, 4), a(0, -1)], 1, {"keepdims": 0}),
    ("ReduceSum", [(2, 3)], 1, {}),
    ("ReduceSum", [(2, 3), a()], 1, {"noop_with_empty_axes": 1}),
    ("ReduceMean", [(2, 3, 4), a(1)], 1, {}),
    ("ReduceMax", [(2, 3)], 1, {"keepdims": 0}),
    ("ReduceLogSumExp", [(2, 3), a(-1)], 1, {"keepdims": 0}),
    ("Softmax", [(2, 3)], 1, {}),
    ("LogSoftmax", [(2, 3)], 1, {"axis": 0}),
    ("LayerNormalization", [(2, 3, 4), (4,), (4,)], 3, {}),
    ("LayerNormalization", [(2, 3, 4), (3, 4)], 3, {"axis": 1}),
]


@pytest.mark.parametrize("op_type,inputs,outputs,attributes", STATIC, ids=[f"{i}-{c[0]}" for i, c in enumerate(STATIC)])
def test_shape_rules_agree_with_onnx(op_type, inputs, outputs, attributes):
    node = node_of(op_type, inputs, outputs, **attributes)
    rule = spec_of(node).infer
    assert rule is not None
    own, theirs = rule(node), _standard(node, {"": 18})
    if own is None:
        return
    assert len(own) == len(theirs) == outputs
    for (dtype, shape), (onnx_dtype, onnx_shape) in zip(own, theirs, strict=True):
        assert dtype == onnx_dtype and tuple(shape) == tuple(onnx_shape)


SYMBOLIC = [
    ("Add", [("B", "S", 8), ("B", "S", 1)], {}, "B,S,8"),
    ("Add", [("B", 1, "S"), ("S",)], {}, "B,1,S"),
    ("Mul", [("2*B", 4), ("2*B", 4)], {}, "2*B,4"),
    ("Add", [("B", 4), (6, 1)], {}, "6,4"),
    ("Add", [("B",), ("C",)], {}, "None"),
    ("Add", [(None,), (None,)], {}, "None"),
    ("MatMul", [("B", "H", "S", 16), ("B", "H", 16, "T")], {}, "B,H,S,T"),
    ("Reshape", [("B", "S", 64), a(0, 0, 4, 16)], {}, "B,S,4,16"),
    ("Reshape", [("B", 128, 64), a(-1, 64)], {}, "128*B,64"),
    ("Reshape", [("128*B", 64), a(-1, 128, 64)], {}, "B,128,64"),
    ("Reshape", [("B", "S", 64), a(-1, 64)], {}, "B*S,64"),
    ("Reshape", [("B", "S"), a(-1)], {}, "B*S"),
    ("Reshape", [(None, 4), a(-1, 4)], {}, "None,4"),
    ("Transpose", [("B", "S", 64)], {"perm": [1, 0, 2]}, "S,B,64"),
    ("Flatten", [("B", "S", 64)], {"axis": 2}, "B*S,64"),
    ("Concat", [("B", 2), ("B", 3)], {"axis": 1}, "B,5"),
    ("Concat", [("B", 2), (1, 2)], {"axis": 0}, "B + 1,2"),
    ("Gather", [(100, 64), (I64, ("B", "S"))], {}, "B,S,64"),
    ("Slice", [("B", 9), a(0), a(4), a(1)], {}, "B,4"),
    ("Slice", [("B", 9), a(0), a(2**63 - 1), a(0)], {}, "B,9"),
    ("ReduceSum", [("B", "S", 64), a(-1)], {}, "B,S,1"),
    ("Expand", [("B", 1, 64), a(1, 7, 64)], {}, "B,7,64"),
]


@pytest.mark.parametrize(
    "op_type,inputs,attributes,expected", SYMBOLIC, ids=[f"{i}-{c[0]}" for i, c in enumerate(SYMBOLIC)]
)
def test_symbolic_dimensions_are_kept(op_type, inputs, attributes, expected):
    node = node_of(op_type, inputs, **attributes)
    ((_, shape),) = spec_of(node).infer(node)
    assert ",".join(str(d.value) if isinstance(d, ir.SymbolicDim) else str(d) for d in shape) == expected


def test_flops():
    node = node_of("MatMul", [(5, 2, 3), (3, 4)])
    node.outputs[0].shape = ir.Shape([5, 2, 4])
    assert spec_of(node).flops(node) == 2 * 5 * 2 * 4 * 3
    node = node_of("Gemm", [(3, 2), (3, 4)], transA=1)
    node.outputs[0].shape = ir.Shape([2, 4])
    assert spec_of(node).flops(node) == 2 * 2 * 4 * 3
    node = node_of("Conv", [(1, 6, 8, 8), (4, 3, 3, 3)], group=2)
    node.outputs[0].shape = ir.Shape([1, 4, 6, 6])
    assert spec_of(node).flops(node) == 2 * 4 * 36 * 27
    node = node_of("MatMul", [("B", 3), (3, 4)])
    node.outputs[0].shape = ir.Shape(["B", 4])
    assert spec_of(node).flops(node) == 0


def test_three_thousand_nodes_in_a_second():
    graph = ir.Graph([value("x", ["B", "S", 64]), value("w", [64, 64])], [], nodes=[], opset_imports={"": 18})
    build = Builder(graph, "test")
    x, w = graph.inputs
    scale = build.const(2.0, np.float32)
    while len(build.made) < 3000:
        x = build.op("Add", build.op("MatMul", x, w), build.op("Mul", x, scale))
        heads = build.op("Transpose", build.op("Reshape", x, build.ints([0, 0, 4, 16])), perm=[0, 2, 1, 3])
        p = build.op("Softmax", build.op("MatMul", heads, build.op("Transpose", heads, perm=[0, 1, 3, 2])))
        back = build.op("Transpose", build.op("MatMul", p, heads), perm=[0, 2, 1, 3])
        x = build.op("Reshape", back, build.ints([0, 0, 64]))
    graph.outputs.append(x)
    start = time.process_time()
    assert infer_graph(TrainingGraph(ir.Model(graph, ir_version=10)).graph) == []
    assert time.process_time() - start < 1.0
    assert [str(d) for d in x.shape] == ["B", "S", "64"]
