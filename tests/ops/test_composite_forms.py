"""Composites that a foreign pass malformed: the verifier names node and fault, and nothing else is ever raised."""

from __future__ import annotations

import pathlib
import re

import onnx_ir as ir
import pytest

from ortgraph.errors import OrtgraphError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import Names
from ortgraph.graph.verify import check
from ortgraph.ops import infer_node, spec_of
from ortgraph.ops.composite_forms import FORMS
from ortgraph.ops.expand import expand_node
from ortgraph.ops.spec import COMPOSITE, all_specs

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "operators.md"
X, ROW, ONE = (4, 6), (6,), ()
IMAGE, HALF, CHANNELS = (2, 3, 4, 4), (2, 3, 2, 2), (3,)
HEADS = (2, 2, 4, 8)
_LOSS = {"reduction": "mean", "ignore_index": -100}
_DRAWS = {"ratio": 0.1, "node": 3}
_ADAM = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.01}

# Shapes of all inputs, number of outputs, attributes.
CASES: dict[str, tuple[list[tuple[int, ...]], int, dict]] = {
    "Product": ([X, (6, 5), (5,), (4, 5)], 2, {"precision": "bf16", "activation": "gelu", "to": 1, "alpha": 1.0}),
    "Gelu": ([X], 1, {"approximate": "none"}),
    "GeluGrad": ([X, X], 1, {"approximate": "tanh"}),
    "Silu": ([X], 1, {}),
    **{f"{name}Grad": ([X, X], 1, {}) for name in ("Silu", "Relu", "Tanh", "Sigmoid")},
    **{f"{name}Grad": ([X, X], 1, {"axis": -1}) for name in ("Softmax", "LogSoftmax")},
    "LayerNormGrad": ([X, X, (4, 1), (4, 1), ROW], 3, {"axis": -1}),
    "BatchNorm": ([IMAGE, CHANNELS, CHANNELS, CHANNELS, CHANNELS], 5, {"epsilon": 1e-5, "momentum": 0.1}),
    "BatchNormGrad": ([IMAGE, IMAGE, CHANNELS, CHANNELS, CHANNELS], 3, {}),
    "NllLoss": ([X, (4,), ROW], 2, _LOSS),
    "NllLossGrad": ([ONE, X, (4,), ROW, ONE], 1, _LOSS),
    "CrossEntropy": ([X, (4,), ROW], 3, _LOSS),
    "CrossEntropyGrad": ([ONE, X, (4,), ROW, ONE], 1, _LOSS),
    "CrossEntropyAndGrad": ([ONE, X, (4,), ROW], 2, {"ignore_index": -100}),
    "CtcLoss": ([(5, 2, 6), (2, 3), (2,), (2,)], 2, {"blank": 0}),
    "CtcLossGrad": ([(2,), (5, 2, 6), (2, 3), (2,), (2,), (2,), (2, 5, 7)], 1, {"blank": 0}),
    "EmbeddingGrad": ([X, (4,)], 1, {"rows": 9, "padding_idx": -1}),
    "ConvGrad": ([(2, 5, 2, 2), IMAGE, (5, 3, 3, 3)], 3, {"strides": [1, 1], "pads": [0] * 4, "dilations": [1, 1]}),
    "MaxPoolGrad": ([HALF, HALF, IMAGE], 1, {}),
    "AveragePoolGrad": ([HALF, IMAGE], 1, {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0] * 4}),
    "Attention": ([HEADS, HEADS, HEADS, (4, 4), ONE, ONE], 2, {"scale": 0.3, "layout": "bhsd", **_DRAWS}),
    "AttentionGrad": (
        [HEADS, HEADS, HEADS, HEADS, HEADS, HEADS[:3], (4, 4), ONE, ONE], 3, {"scale": 0.3, "is_causal": 0, **_DRAWS},
    ),
    "Dropout": ([X, ONE, ONE], 2, _DRAWS),
    "DropoutGrad": ([X, X], 1, {"ratio": 0.1, "draw": 3}),
    "RandomUniform": ([ONE, ONE], 1, {"node": 3, "shape": [4, 6]}),
    "AdamW": ([ONE, ONE, X, X, X, X, ONE, ONE], 3, _ADAM),
    "LAMB": (
        [ONE, ONE, X, X, X, X, ONE, ONE], 3,
        {**_ADAM, "bias_correction": 1, "min_trust": 0.0, "max_trust": 10.0, "adapt": 1},
    ),
    "SGD": ([ONE, ONE, X, X, X, ONE, ONE], 2, {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0}),
    "SquaredNorm": ([X, ROW], 1, {}),
}  # fmt: skip
_INTEGERS, _BOOLEANS = {"Key", "Step", "Target", "Indices", "Labels", "Lengths", "Counts"}, {"Kept", "Skip"}
_WRONG_ATTRIBUTES = {
    "a word": "nonsense", "a number": 0.5, "a negative number": -0.5, "no number": float("nan"), "too large": 7e9,
    "a count": 1, "a negative count": -3, "a long count": 1 << 40, "some": [1, 2], "none": [], "negatives": [-1, -1],
    "decimals": [0.1, 0.2], "zeros": [0, 0], "a tensor": ir.tensor([0.1, 0.2]), "a tensor of one": ir.tensor([0.1]),
}  # fmt: skip


def make(name: str) -> tuple[TrainingGraph, ir.Node]:
    shapes, outputs, attributes = CASES[name]
    inputs = []
    for i, shape in enumerate(shapes):
        role = FORMS[name].inputs[min(i, len(FORMS[name].inputs) - 1)].rstrip("?*")
        dtype = ir.DataType.INT64 if role in _INTEGERS else ir.DataType.FLOAT
        dtype = ir.DataType.BOOL if role in _BOOLEANS else dtype
        inputs.append(ir.val(f"i{i}", dtype=dtype, shape=shape))
    node = ir.node(name, inputs, attributes, domain=COMPOSITE, num_outputs=outputs, name="it")
    for i, value in enumerate(node.outputs):
        value.name = f"o{i}"
    infer_node(node, {"": 18, COMPOSITE: 1})
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 18, COMPOSITE: 1}, name="g")
    return TrainingGraph(ir.Model(graph, ir_version=10)), node


def mutations(name: str):
    """(what, change of a node) of everything that is done to a composite."""
    shapes, _, attributes = CASES[name]
    for i, shape in enumerate(shapes):
        yield f"input {i} gone", lambda n, i=i: n.replace_input_with(i, None)
        yield f"inputs from {i} gone", lambda n, i=i: n.resize_inputs(i)
        for dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL, ir.DataType.STRING, ir.DataType.FLOAT16):
            yield f"input {i} as {dtype}", lambda n, i=i, t=dtype: retype(n, i, t, None)
        yield f"input {i} without type", lambda n, i=i: retype(n, i, None, None)
        for other in ((), (1,), (1, *shape), shape[1:], (*shape, 1), (7,) * len(shape), (0,) * len(shape), None):
            yield f"input {i} as {other}", lambda n, i=i, s=other: reshape(n, i, s)
    yield "more inputs", lambda n: n.resize_inputs(len(n.inputs) + 1)
    yield "more outputs", lambda n: n.resize_outputs(len(n.outputs) + 1)
    yield "fewer outputs", lambda n: n.resize_outputs(1)
    yield "another operator", lambda n: setattr(n, "op_type", "Nonsense")
    for key in attributes:
        yield f"{key} gone", lambda n, k=key: n.attributes.pop(k)
        for what, value in _WRONG_ATTRIBUTES.items():
            yield f"{key}: {what}", lambda n, k=key, v=value: n.attributes.__setitem__(k, attr(k, v))


def attr(name, value):
    if value == []:
        return ir.AttrInt64s(name, [])
    return ir.convenience.convert_attribute(name, value)


def retype(node, i, dtype, shape):
    old = node.inputs[i]
    node.replace_input_with(
        i, ir.Value(name=f"m{i}", type=None if dtype is None else ir.TensorType(dtype), shape=old.shape)
    )
    node.graph.inputs[i] = node.inputs[i]


def reshape(node, i, shape):
    old = node.inputs[i]
    new = ir.Value(name=f"m{i}", type=old.type, shape=None if shape is None else ir.Shape(shape))
    node.replace_input_with(i, new)
    node.graph.inputs[i] = new


def test_every_composite_has_a_form_as_the_page_says():
    rows = [line.split("|") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    page = {r[1].strip(): r for r in rows if re.fullmatch(r"[A-Z]\w+", r[1].strip())}
    assert set(FORMS) == set(CASES) == {s.op_type for s in all_specs() if s.domain == COMPOSITE} == set(page)
    for name, form in FORMS.items():
        shared = "Attention Loss ignore_index reduction strides" if "Grad" in name or "Loss" in name else ""
        for attribute in form.attributes:
            row = "|".join(page[name]) + shared
            assert re.search(rf"\b{attribute}\b", row) or "as Attention" in row, (name, attribute)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_malformed_composite_is_named_or_harmless(name):
    found, silent = 0, []
    assert check(make(name)[0], "types") == []
    for what, change in mutations(name):
        graph, node = make(name)
        change(node)
        try:
            violations = check(graph, "types")
        except Exception as error:
            raise AssertionError(f"{what}: the verifier raised {error!r}") from error
        if violations:
            found += 1
            assert all(v.what for v in violations)
            continue
        silent.append(what)
        try:
            infer_node(node, graph.graph.opset_imports)
            cost = spec_of(node).flops
            if cost is not None:
                cost(node)
            expand_node(node, Names(graph.graph), "test")
        except OrtgraphError:
            continue
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__} {error}, and the verifier saw nothing") from error
    assert found > len(CASES[name][0])
    if FORMS[name].attributes:
        assert "another operator" not in silent and "input 0 gone" not in silent
