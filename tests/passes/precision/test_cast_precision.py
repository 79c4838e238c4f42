"""Where casts stand, what is saved in which type, and overrides: on graphs as capture and fusions leave them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.errors import InputError, PassError
from ortgraph.graph.text import text_hash
from ortgraph.ops.precision import LOW
from ortgraph.ops.spec import COMPOSITE

torch = pytest.importorskip("torch")
F = torch.nn.functional
BF16, FLOAT = ir.DataType.BFLOAT16, ir.DataType.FLOAT


def casts(graph):
    """(from, to) of every cast between float types."""
    found = Counter()
    for node in graph.graph:
        types = node.inputs[0].dtype if node.inputs else None, node.outputs[0].dtype
        if node.op_type == "Cast" and set(types) <= {FLOAT, *LOW}:
            found[f"{types[0].short_name()}->{types[1].short_name()}"] += 1
    return dict(found)


def products(graph):
    return [n for n in graph.graph if n.op_type == "Product" and n.domain == COMPOSITE]


def captured(tools, function, *shapes, **inputs):
    """A module of parameters with these shapes, whose loss is ``function(x, *parameters)``."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.p = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(s) / 4) for s in shapes])

        def forward(self, x):
            return {"loss": function(x, *self.p)}

    torch.manual_seed(1)
    sample = tools.Sample(Model(), {"x": torch.randn(inputs.get("x", (6, 8)))})
    return sample, tools.optimized(sample.capture())


# -- golden figures -----------------------------------------------------------------------------------------------


def test_one_bert_layer(samples, tools):
    """28 casts. Down: 8 weights; the embeddings, rows of them that the pooler reads, the first norm, GELU, the last
    norm, Tanh; 5 incoming gradients. Up: GELU and Tanh, 2 for the gradient of each, 3 gradients of biases."""
    graph = tools.optimized(tools.bert(layers=1, problem_type="regression", num_labels=1).capture(), "O2")
    graph, record = tools.cast(graph)
    assert record.counts == {"products": 24, "low": 2, "casts": 28, "casts-unshared": 86}
    assert casts(graph) == {"f32->bf16": 19, "bf16->f32": 9}
    assert tools.round_trips(graph) == []
    assert Counter(n.op_type for n in graph.graph if n.outputs[0].dtype == BF16)["Attention"] == 1


@pytest.mark.parametrize("name", ["mlp", "cnn", "bert", "vit"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_holds_of_every_cast_graph(samples, tools, name, precision):
    sample, source = samples(name)
    before = text_hash(source)
    graph, record = tools.cast(tools.optimized(source), f"cast-precision{{precision={precision}}}")
    assert text_hash(source) == before  # clones share type objects
    low = ir.DataType.BFLOAT16 if precision == "bf16" else ir.DataType.FLOAT16
    assert graph.stage == "cast" and graph.signature.metadata["precision"] == precision
    assert tools.round_trips(graph) == []
    assert record.counts["casts"] < record.counts["casts-unshared"]
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        assert value.dtype not in LOW, f"{value.name} is no longer float32"
    for value in graph.graph.inputs:  # one cast per parameter, shared by both halves
        assert sum(tools.is_low_cast(use.node) for use in value.uses()) <= 1, value.name
    types = {v.dtype for n in graph.graph for v in n.outputs if v.dtype in (*LOW, FLOAT)}
    assert types == {low, FLOAT}


def test_o0_and_o1_take_a_precision_too(samples):
    sample, source = samples("mlp")
    for level in ("O0", "O1"):
        session = ortgraph.TrainingSession(ortgraph.optimize(source, level, precision="bf16", optimizer="adamw").graph)
        assert np.isfinite(session.step(sample.arrays))


# -- single rules -------------------------------------------------------------------------------------------------


def test_a_product_that_the_loss_reads_is_float32(tools):
    _, graph = captured(tools, lambda x, w: (x @ w).pow(2).sum(), (8, 4))
    graph, record = tools.cast(graph)
    assert [n.outputs[0].dtype for n in products(graph)] == [FLOAT, FLOAT]
    assert casts(graph) == {"f32->bf16": 3}  # x, w and the gradient of the product


def test_between_two_products_values_are_low_and_saved_once(tools):
    _, graph = captured(tools, lambda x, u, v: F.gelu(x @ u).matmul(v).sum(), (8, 16), (16, 4))
    graph, _ = tools.cast(graph)
    inner = next(n for n in products(graph) if n.outputs[0].dtype == BF16)
    readers = {u.node.outputs[0].uses()[0].node.op_type for u in inner.outputs[0].uses()}
    assert readers == {"Gelu", "GeluGrad"}  # each through a cast of its own: float32 is not kept for the backward half
    gelu = next(n for n in graph.graph if n.op_type == "Gelu")
    (low,) = [u.node for u in gelu.outputs[0].uses()]
    assert tools.is_low_cast(low) and {u.node.op_type for u in low.outputs[0].uses()} == {"Product"}


def test_a_residual_stays_float32(tools):
    def block(x, u, v):
        h = x @ u
        return (h + F.relu(h @ v)).pow(2).sum()

    _, graph = captured(tools, block, (8, 8), (8, 8))
    graph, _ = tools.cast(graph)
    forward = products(graph)[:2]
    assert [n.outputs[0].dtype for n in forward] == [FLOAT, BF16] or [n.outputs[0].dtype for n in forward] == [
        FLOAT,
        FLOAT,
    ]
    total = next(n for n in graph.graph if n.op_type == "Add")
    assert all(v.dtype == FLOAT for v in (*total.inputs, *total.outputs))


def test_casts_stand_above_movement(tools):
    def heads(x, u, v):
        h = F.layer_norm(x, (8,)).reshape(3, 2, 8).transpose(0, 1)
        return (h @ u).pow(2).sum() + (h @ v).pow(2).sum()

    _, graph = captured(tools, heads, (8, 4), (8, 4))
    graph, _ = tools.cast(graph)
    for node in graph.graph:
        if tools.is_low_cast(node) and node.inputs[0].producer() is not None:
            assert node.inputs[0].producer().op_type not in ("Transpose", "Reshape")
    moved = [n for n in graph.graph if n.op_type == "Transpose" and n.outputs[0].dtype == BF16]
    assert moved


def test_gathers_from_a_table_stay_float32(samples, tools):
    graph, _ = tools.cast(tools.optimized(samples("bert")[1]))
    tables = [n for n in graph.graph if n.op_type == "Gather" and n.inputs[0].is_graph_input()]
    assert tables and all(n.outputs[0].dtype in (FLOAT, ir.DataType.INT64) for n in tables)


def test_statistics_of_norms_are_float32(samples, tools):
    for name in ("bert", "cnn"):
        graph, _ = tools.cast(tools.optimized(samples(name)[1]))
        for node in graph.graph:
            if node.op_type in ("LayerNormGrad", "BatchNormGrad"):
                small = [
                    v for v in node.inputs[1:] if v is not None and np.prod(v.shape) < np.prod(node.inputs[0].shape)
                ]
                makers = [v.producer().op_type for v in small if v.producer() is not None]
                assert "Cast" not in makers


def test_probabilities_are_saved_low_and_scores_are_not_rounded(tools):
    def attention(x, u, v):
        q, k = x @ u, x @ v
        return ((q @ k.T).softmax(-1) @ k).pow(2).sum()

    _, graph = captured(tools, attention, (8, 8), (8, 8))
    graph, record = tools.cast(graph)
    softmax = next(n for n in graph.graph if n.op_type == "Softmax")
    assert softmax.inputs[0].dtype == FLOAT and softmax.inputs[0].producer().op_type == "Product"
    gradient = next(n for n in graph.graph if n.op_type == "SoftmaxGrad")
    saved = gradient.inputs[1].producer()
    assert saved.op_type == "Cast" and saved.inputs[0].dtype == BF16
    assert tools.round_trips(graph) == []
    assert any("Softmax stays in float32: float32 by policy" in r.reason for r in record.refusals)


def test_a_mask_of_the_least_float_keeps_scores_in_float32(tools):
    least = torch.finfo(torch.float32).min

    def masked(x, u):
        h = (x @ u).masked_fill(x > 0.5, least)
        return F.relu(h).matmul(u).sum()

    sample, graph = captured(tools, masked, (8, 8))
    graph, record = tools.cast(graph)
    reasons = [r.reason for r in record.refusals]
    assert any("beyond bf16" in r for r in reasons) and any("an operand may hold a mask" in r for r in reasons)
    assert any(n.op_type in ("MatMul", "Gemm", "FusedMatMul") for n in graph.graph)
    got = ortgraph.TrainingSession(graph).loss(sample.arrays)
    want = float(sample.module(**sample.batch)["loss"])
    assert got == pytest.approx(want, rel=2e-2)


def test_gemm_with_a_bias_of_another_shape(tools):
    f = ir.DataType.FLOAT
    for shape in ([5], [1, 5], [4, 1], [4, 5], [1]):
        a, b, c = ir.val("a", f, [4, 8]), ir.val("b", f, [8, 5]), ir.val("c", f, shape)
        from ortgraph.graph import Signature, TrainingGraph
        from ortgraph.ops.builder import Builder

        g = ir.Graph([a, b, c], [], nodes=[], opset_imports={"": 18}, name="g")
        y = Builder(g, "test").op("Gemm", a, b, c, alpha=0.5)
        y.name = "y"
        g.outputs.append(y)
        signature = Signature(loss="y", stage="optimized", inputs=("a", "b", "c"))
        graph, _ = tools.cast(TrainingGraph(ir.Model(g, ir_version=10), signature))
        rng = np.random.default_rng(0)
        batch = {v.name: rng.standard_normal(tuple(v.shape)).astype(np.float32) for v in (a, b, c)}
        got = ortgraph.TrainingSession(graph).results(batch)["y"]
        want = 0.5 * batch["a"] @ batch["b"] + batch["c"]
        np.testing.assert_allclose(got, want, atol=3e-2)


# -- options ------------------------------------------------------------------------------------------------------


def test_an_override_that_names_nothing_is_told(samples, tools, caplog):
    _, record = tools.cast(tools.optimized(samples("bert")[1]), "cast-precision{keep=layer.0.*|layr.1.* low=Geluu}")
    said = [r.reason for r in record.refusals if "names no" in r.reason]
    assert said == [f"{p} names no operator and no module of the graph" for p in ("keep=layr.1.*", "low=Geluu")]
    assert all(reason in caplog.text for reason in said)


def test_keep_leaves_a_layer_in_float32(samples, tools):
    graph, record = tools.cast(tools.optimized(samples("bert")[1]), "cast-precision{keep=layer.0.*|Gelu}")
    for node in products(graph):
        assert ".layer.0." not in node.metadata_props.get("ortgraph.module", "")
    kept = [r for r in record.refusals if "keep=layer.0.*" in r.reason]
    assert any("Gemm" in r.reason for r in kept)
    assert any(r.reason == "ortgraph.Gelu stays in float32: keep=Gelu" for r in record.refusals)


def test_low_stores_residuals_low(samples, tools):
    source = tools.optimized(samples("bert")[1])
    plain, _ = tools.cast(source)
    stored, _ = tools.cast(source, "cast-precision{low=Add}")

    def low_sums(graph):
        return [
            n for n in graph.graph if n.op_type == "Add" and any(tools.is_low_cast(u.node) for u in n.outputs[0].uses())
        ]

    assert len(low_sums(stored)) > len(low_sums(plain))
    sample = samples("bert")[0]
    assert np.isfinite(ortgraph.TrainingSession(stored).loss(sample.arrays))


def test_everything_kept_changes_no_number(samples, tools):
    sample, source = samples("mlp")
    graph, record = tools.cast(tools.optimized(source), "cast-precision{keep=*}")
    assert record.counts == {}
    got = ortgraph.TrainingSession(graph).gradients(sample.arrays)
    want = ortgraph.TrainingSession(tools.optimized(source)).gradients(sample.arrays)
    assert all((got[k] == want[k]).all() for k in want)


def test_stages_and_errors(linear_graph):
    with pytest.raises(PassError, match="runs at stage optimized"):
        ortgraph.optimize(linear_graph, "cast-precision")
    with pytest.raises(InputError, match="unknown precision 'tf32'"):
        ortgraph.optimize(linear_graph, "mark-optimized,cast-precision{precision=tf32}")
    with pytest.raises(InputError, match="unknown precision 'half'"):
        ortgraph.optimize(linear_graph, "O2", precision="half")
    with pytest.raises(InputError, match="a precision goes with a preset"):
        ortgraph.optimize(linear_graph, "eliminate-dead-code", precision="bf16")
    with pytest.raises(InputError, match="overrides go with a low precision"):
        ortgraph.optimize(linear_graph, "O2", precision_overrides="keep=Gelu")


def test_a_hand_written_graph(classifier_graph, classifier_batch, tools):
    graph = ortgraph.optimize(classifier_graph(), "O2", precision="bf16", optimizer="adamw", verify="types").graph
    session, plain = ortgraph.TrainingSession(graph), ortgraph.TrainingSession(classifier_graph())
    got, want = session.gradients(classifier_batch()), plain.gradients(classifier_batch())
    for name, value in want.items():
        assert got[name].dtype == np.float32
        assert np.linalg.norm(got[name] - value) <= 3e-2 * np.linalg.norm(value), name
    losses = [session.step(classifier_batch()) for _ in range(20)]
    assert losses[-1] < losses[0]
