"""Putting expansions into graphs: names, provenance, graph outputs, refusal."""

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.errors import UnsupportedError
from ortgraph.graph import Names, TrainingGraph
from ortgraph.graph.edit import MODULE_KEY, PASS_KEY
from ortgraph.ops import Builder
from ortgraph.ops.expand import can_expand, expand_composites, expand_node


def float_value(name, shape):
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))


def gelu_chain(opset=18):
    graph = ir.Graph([float_value("x", [2, 3])], [], nodes=[], opset_imports={"": opset, "ortgraph": 1})
    build = Builder(graph, "capture")
    y = build.op("Gelu", graph.inputs[0], domain="ortgraph", name="act")
    y.producer().metadata_props[MODULE_KEY] = "layer.0.act"
    z = build.op("Silu", y, domain="ortgraph", name="act")
    y.name, z.name = "inner", "result"
    graph.outputs.extend([z, y])
    return TrainingGraph(ir.Model(graph, ir_version=10))


def test_outputs_keep_their_names_and_nodes_their_origin():
    graph = gelu_chain()
    assert expand_composites(graph, by="lower") == 2
    assert [o.name for o in graph.graph.outputs] == ["result", "inner"]
    nodes = list(graph.graph)
    assert all(n.domain == "" and n.metadata_props[PASS_KEY] == "lower" for n in nodes)
    assert nodes[0].metadata_props[MODULE_KEY] == "layer.0.act"
    names = [v.name for n in nodes for v in n.outputs]
    assert len(set(names)) == len(names)
    assert all(v.dtype is not None and v.shape is not None for n in nodes for v in n.outputs)


def test_only_the_named_operators():
    graph = gelu_chain()
    assert expand_composites(graph, only=["Silu"]) == 1
    assert [n.op_type for n in graph.graph if n.domain] == ["Gelu"]
    assert expand_composites(graph, only=["ortgraph.Gelu"]) == 1
    assert expand_composites(graph) == 0


def test_two_expansions_do_not_collide_in_names():
    graph = gelu_chain()
    names = Names(graph.graph)
    for node in tuple(graph.graph):
        expand_node(node, names)
    values = [v.name for n in graph.graph for v in n.outputs] + list(graph.graph.initializers)
    assert len(set(values)) == len(values)


def test_a_gradient_that_is_its_own_input_becomes_an_output():
    # With axis 0 nothing is summed: dBias is dY itself, here a graph input.
    inputs = [float_value(n, s) for n, s in (("dy", [4]), ("x", [4]), ("mean", [1]), ("inv", [1]), ("scale", [4]))]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 18, "ortgraph": 1})
    made = Builder(graph, "t").multi("LayerNormGrad", *inputs, outputs=3, domain="ortgraph", axis=0)
    for value, name in zip(made, ("dx", "dscale", "dbias"), strict=True):
        value.name = name
    graph.outputs.extend(made)
    expand_composites(TrainingGraph(ir.Model(graph, ir_version=10)))
    assert [o.name for o in graph.outputs] == ["dx", "dscale", "dbias"]
    assert graph.outputs[2].producer().op_type == "Identity"


def test_composites_in_subgraphs():
    body = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="body")
    x = float_value("x", [3])
    made = ir.node("Gelu", [x], domain="ortgraph", name="inside")
    made.outputs[0].name, made.outputs[0].dtype, made.outputs[0].shape = "inside.y", ir.DataType.FLOAT, ir.Shape([3])
    body.append(made)
    body.outputs.append(made.outputs[0])
    condition = ir.Value(name="c", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
    copy = ir.node("Identity", [x], name="copy")
    copy.outputs[0].name = "copy.y"
    other = ir.Graph([], [copy.outputs[0]], nodes=[copy], opset_imports={"": 18}, name="other")
    branch = ir.node("If", [condition], {"then_branch": body, "else_branch": other}, name="if")
    branch.outputs[0].name, branch.outputs[0].dtype = "y", ir.DataType.FLOAT
    graph = ir.Graph([condition, x], [branch.outputs[0]], nodes=[branch], opset_imports={"": 18, "ortgraph": 1})
    assert expand_composites(TrainingGraph(ir.Model(graph, ir_version=10))) == 1
    assert {n.domain for n in body} == {""}
    assert body.outputs[0].name == "inside.y"


@pytest.mark.parametrize("opset", [17, 22])
def test_opsets_outside_the_window_are_refused(opset):
    with pytest.raises(UnsupportedError, match=f"opset 18 to 21, the graph imports {opset}"):
        expand_composites(gelu_chain(opset))


def test_operators_without_expansion_are_refused_by_name():
    graph = gelu_chain()
    node = ir.node("Relu", [graph.graph.inputs[0]], name="r")
    graph.graph.append(node)
    assert not can_expand(node)
    with pytest.raises(UnsupportedError, match="Relu 'r' has no reference expansion"):
        expand_node(node)


@pytest.mark.parametrize("opset", [18, 19, 20, 21])
def test_every_opset_of_the_window(operator_case, opset):
    ort = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(0)
    x, dy, indices = rng.standard_normal((4, 6)), rng.standard_normal((4, 6)), rng.integers(0, 3, 4)
    images, weight = rng.standard_normal((2, 3, 5, 5)), rng.standard_normal((4, 3, 3, 3))
    out = rng.standard_normal((2, 4, 3, 3))
    counters = [np.array(1), np.array(2)]
    total = np.array(4.0)
    cases = [
        operator_case("Gelu", [x], opset=opset),
        operator_case("CrossEntropy", [x, indices], 3, opset=opset),
        operator_case("CrossEntropyGrad", [np.array(1.0), x, indices, None, total], opset=opset),
        operator_case("CrossEntropyAndGrad", [np.array(1.0), x, indices], 2, opset=opset),
        operator_case("NllLossGrad", [np.array(1.0), x, indices, None, total], opset=opset),
        operator_case("EmbeddingGrad", [dy, indices], rows=3, padding_idx=1, opset=opset),
        operator_case("Dropout", [x, *counters], 2, ratio=0.3, node=1, opset=opset),
        operator_case("ConvGrad", [out, images, weight], 3, opset=opset),
        operator_case("BatchNorm", [images, x[0, :3], x[1, :3], x[2, :3], x[3, :3] ** 2], 5, opset=opset),
        operator_case("AdamW", [np.array(0.1), np.array(3), x, dy, x, x**2], 3, opset=opset),
    ]
    assert ort is not None
    for case in cases:
        for result, want in zip(case.runtime(2), case.reference(), strict=True):
            np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-5)
