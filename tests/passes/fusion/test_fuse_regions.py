"""fuse-regions on small graphs and on captured models: what is fused, what is not, and that nothing changes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.errors import InputError
from ortgraph.manager import registry
from ortgraph.manager.numerics import relative_errors
from ortgraph.ops import generated
from ortgraph.ops.spec import GENERATED, spec_of
from ortgraph.passes.fusion.fuse_regions import FuseRegions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(not generated.available(), reason="no compiler")
F32 = ir.DataType.FLOAT


def fused_nodes(graph):
    return [n for n in graph.graph if n.domain == GENERATED]


def test_a_chain_becomes_one_node(bench):
    graph = bench.make(lambda b, x, y: b.op("Mul", b.op("Tanh", b.op("Add", x, y)), x), {"x": (4, 8), "y": (8,)})
    feeds = bench.feeds(graph)
    want = bench.run(graph, feeds)
    changes = FuseRegions(least_bytes=0).run(graph)
    assert changes.counts == {"regions": 1, "nodes": 3} and graph.node_count() == 1
    assert "fused Add, Mul, Tanh: saves 640 bytes" in changes.refusals[0].reason
    (node,) = fused_nodes(graph)
    spec = spec_of(node)
    assert spec.known and spec.deterministic and spec.recompute and spec.expand is not None
    assert (0, 0) in spec.inplace and spec.flops(node) > 0
    session = ortgraph.TrainingSession(graph, threads=1)
    assert np.allclose(session.results(feeds)["out0"], want[0], rtol=1e-6)


def test_layers_share_a_kernel_and_the_text_shows_it_once(bench):
    def body(b, x, w):
        for _ in range(3):
            x = b.op("MatMul", b.op("Tanh", b.op("Neg", x)), w)
        return x

    graph = bench.make(body, {"x": (4, 8), "w": (8, 8)})
    FuseRegions(least_bytes=0).run(graph)
    assert len(fused_nodes(graph)) == 3 and len(graph.model.functions) == 1
    text = graph.text()
    assert text.count("function ortgraph.generated.Fused_") == 1 and text.count("= Tanh(") == 1


@pytest.mark.parametrize(
    ("body", "inputs", "reason"),
    [
        (lambda b, x: b.op("Neg", b.op("Softmax", x, axis=0)), {"x": (4, 8)}, "another axis"),
        (lambda b, x: b.op("Neg", b.op("CumSum", x, b.const(1, np.int64))), {"x": (4, 8)}, "no neighbour"),
    ],
)  # fmt: skip
def test_near_misses(bench, body, inputs, reason):
    graph = bench.make(body, inputs)
    before = graph.text()
    changes = FuseRegions(least_bytes=0).run(graph)
    assert not changes.counts and graph.text() == before
    assert reason == "another axis" or any(reason in r.reason for r in changes.refusals)


def test_a_value_that_repeats_along_rows_is_made_outside(bench):
    """exp(m) [2, 1, 8] is broadcast along the rows of x: made once, not for every row."""
    graph = bench.make(lambda b, x, m: b.op("Tanh", b.op("Mul", x, b.op("Exp", m))), {"x": (2, 5, 8), "m": (2, 1, 8)})
    FuseRegions(least_bytes=0).run(graph)
    assert [n.op_type.partition("_")[0] for n in graph.graph] == ["Exp", "Fused"]


def test_integers_and_doubles_are_left_alone(bench):
    for dtype in (ir.DataType.INT64, ir.DataType.DOUBLE):
        graph = bench.make(lambda b, x: b.op("Abs", b.op("Neg", x)), {"x": (4, 8)}, dtypes={"x": dtype})
        assert not FuseRegions(least_bytes=0).run(graph).counts


def test_forward_and_backward_do_not_mix(classifier_graph, classifier_batch):
    """A session's loss must not compute gradients."""
    graph = classifier_graph()
    result = ortgraph.optimize(graph, "fuse-regions{least_bytes=0}").graph
    assert fused_nodes(result)
    session = ortgraph.TrainingSession(result, threads=1)
    batch = classifier_batch()
    loss = len(session.program("loss", batch).order)
    assert loss < len(session.program("gradients", batch).order)


def test_switched_off_and_without_compiler(bench, monkeypatch):
    def make():
        return bench.make(lambda b, x: b.op("Abs", b.op("Neg", x)), {"x": (4, 8)})

    (refusal,) = FuseRegions(kernels=False).run(make()).refusals
    assert "switched off" in refusal.reason
    graph = make()
    FuseRegions(least_bytes=0).run(graph)
    feeds = bench.feeds(graph)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    (refusal,) = FuseRegions(least_bytes=0).run(make()).refusals
    assert "no C++ compiler" in refusal.reason
    # A graph that was fused elsewhere runs as single operators.
    session = ortgraph.TrainingSession(graph, threads=1)
    assert np.array_equal(session.results(feeds)["out0"], np.abs(feeds["x"]))
    assert not any(n.domain == GENERATED for n in session.programs[-1].order)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=97, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 97, (2, 13))
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


def bert():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=97,
        max_position_embeddings=32,
    )  # fmt: skip
    config._attn_implementation = "eager"
    batch = {
        "input_ids": torch.randint(0, 97, (3, 11)),
        "attention_mask": torch.ones(3, 11, dtype=torch.long),
        "labels": torch.randint(0, 2, (3,)),
    }
    return transformers.BertForSequenceClassification(config).train(), batch


def t5():
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, vocab_size=97, decoder_start_token_id=0,
        use_cache=False, dropout_rate=0.1,
    )  # fmt: skip
    ids = torch.randint(0, 97, (2, 9))
    return transformers.T5ForConditionalGeneration(config).train(), {"input_ids": ids, "labels": ids.clone()}


def preset():
    return registry.preset(
        "O2", optimizer=ortgraph.optim.AdamW(lr=1e-2), target="onnxruntime-training", shapes={}, accumulation_steps=1
    )


def _anything(p):
    return FuseRegions(least_bytes=0) if isinstance(p, FuseRegions) else p


def test_small_regions_do_not_pay(bench):
    graph = bench.make(lambda b, x: b.op("Abs", b.op("Neg", x)), {"x": (4, 8)})
    (refusal,) = FuseRegions().run(graph).refusals[:1]
    assert "saves 256 bytes, less than 65536" in refusal.reason and not fused_nodes(graph)


@pytest.mark.parametrize("make", [llama, pytest.param(bert, marks=pytest.mark.slow), t5])
def test_models_keep_their_gradients(make, tmp_path):
    """Dropout on: the same masks are drawn. Saved, loaded, planned: the same bits again."""
    torch.manual_seed(0)
    module, batch = make()
    graph = ortgraph.capture(module, batch)
    fused = ortgraph.optimize(graph, [_anything(p) for p in preset()]).graph
    plain = ortgraph.optimize(graph, "O1", optimizer=ortgraph.optim.AdamW(lr=1e-2)).graph
    assert len(fused_nodes(fused)) > 5 and not fused_nodes(plain)
    session, other = (ortgraph.TrainingSession(g, threads=2) for g in (fused, plain))
    assert session.loss(batch) == pytest.approx(other.loss(batch), rel=1e-5)
    gradients = session.gradients(batch)
    want = other.gradients(batch)
    small = 1e-4 * np.median([np.linalg.norm(v) for v in want.values()])
    errors = relative_errors(gradients, want, dict.fromkeys(want, small / 10))
    assert max(errors.values()) < 1e-4, max(errors, key=errors.get)
    session.check_memory(batch)
    loaded = ortgraph.TrainingSession(ortgraph.load(fused.save(tmp_path / "g.onnx")), threads=1)
    again = loaded.gradients(batch)
    assert all(np.array_equal(again[k], gradients[k]) for k in gradients)
    evaluated = session.evaluate(batch)  # no dropout
    assert np.allclose(evaluated["logits"], module.eval()(**batch).logits.detach().numpy(), atol=2e-5)


def test_a_fresh_process_finds_or_compiles_the_kernels(bench, tmp_path):
    graph = bench.make(lambda b, x: b.op("Abs", b.op("Neg", x)), {"x": (4, 8)})
    FuseRegions(least_bytes=0).run(graph)
    path = graph.save(tmp_path / "g.onnx")
    code = (
        "import sys, numpy as np, ortgraph; s = ortgraph.TrainingSession(ortgraph.load(sys.argv[1]), threads=1);"
        "x = -np.ones((4, 8), np.float32); assert (s.results({'x': x})['out0'] == 1).all()"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=120)


def test_a_function_under_another_name_is_refused(bench):
    graph = bench.make(lambda b, x: b.op("Abs", b.op("Neg", x)), {"x": (4, 8)})
    FuseRegions(least_bytes=0).run(graph)
    proto = ir.serde.serialize_model(graph.model)
    proto.functions[0].name = proto.graph.node[0].op_type = "Fused_0000000000000000"
    with pytest.raises(InputError, match="not what its name says"):
        ortgraph.graph.TrainingGraph(ir.serde.deserialize_model(proto))


def test_one_kernel_serves_all_batch_sizes():
    """Fused while the batch is a symbol; sizes are read when a session binds it, a batch of one among them."""
    torch.manual_seed(0)
    module, batch = llama()
    dynamic = {name: {0: "batch"} for name in batch}
    graph = ortgraph.capture(module, batch, dynamic=dynamic)
    fused = ortgraph.optimize(graph, [_anything(p) for p in preset()]).graph
    plain = ortgraph.optimize(graph, "O1", optimizer=ortgraph.optim.AdamW(lr=1e-2)).graph
    assert len(fused_nodes(fused)) > 5
    session, other = (ortgraph.TrainingSession(g, threads=2) for g in (fused, plain))
    for size in (2, 5, 1):
        ids = torch.randint(0, 97, (size, 13))
        given = {"input_ids": ids, "labels": ids.clone()}
        errors = relative_errors(session.gradients(given), other.gradients(given))
        assert max(errors.values()) < 1e-5
        assert sum(n.domain == GENERATED for n in session.programs[-1].order) == len(fused_nodes(fused))


def test_a_gradient_alone_draws_its_mask_again(bench):
    """The forward region writes no mask for it."""

    def body(b, x, w, key, step):
        y, mask = b.multi("Dropout", b.op("Neg", x), key, step, outputs=2, domain="ortgraph", node=4, ratio=0.5)
        return [b.op("MatMul", b.op("DropoutGrad", b.op("MatMul", y, w), mask, domain="ortgraph", ratio=0.5), w)]

    integers = dict.fromkeys(("key", "step"), ir.DataType.INT64)
    graph = bench.make(body, {"x": (4, 8), "w": (8, 8), "key": (), "step": ()}, integers)
    changes = FuseRegions(least_bytes=0).run(graph)
    assert changes.counts == {"regions": 1, "nodes": 2, "redrawn": 1}
    assert [n.op_type for n in graph.graph if n.domain == "ortgraph"] == ["Dropout"]
    assert not any(o.dtype == ir.DataType.BOOL for n in fused_nodes(graph) for o in n.outputs)
