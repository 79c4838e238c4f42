"""narrow-rows: gradients stay what they were, and products get smaller only where nobody reads the other rows."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.graph import Signature, TrainingGraph, static_shape
from ortgraph.manager import PassManager, parse_pipeline
from ortgraph.manager.numerics import compare
from ortgraph.ops import Builder

torch = pytest.importorskip("torch", reason="capture needs PyTorch")

import ortgraph  # noqa: E402

CLEAN = "eliminate-dead-code,fold-constants,fold-shapes,eliminate-identity,eliminate-common-subexpressions"
CLEAN += ",simplify-reshapes,simplify-transposes"


class Block(torch.nn.Module):
    """Attention and feed-forward, then a head on what ``pick`` takes."""

    def __init__(self, pick, causal=False, dropout=0.0, width=8):
        super().__init__()
        self.pick, self.causal = pick, causal
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.drop = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(width, 3)

    def forward(self, x, labels):
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = self.first(x + self.out(y.transpose(1, 2).reshape(b, s, d)))
        x = self.second(x + self.down(self.drop(torch.nn.functional.gelu(self.up(x)))))
        return torch.nn.functional.cross_entropy(self.head(self.pick(x)), labels)


def narrowed(pick, tokens=6, **options):
    torch.manual_seed(0)
    module = Block(pick, **options)
    batch = {"x": torch.randn(3, tokens, 8), "labels": torch.randint(0, 3, (3,))}
    graph = ortgraph.capture(module, batch)
    PassManager(parse_pipeline(CLEAN)).run(graph)
    after = graph.clone()
    record = PassManager(parse_pipeline("narrow-rows"), verify="types").run(after).passes[0]
    return graph, after, record, {k: v.numpy() for k, v in batch.items()}


def product_rows(graph: TrainingGraph) -> int:
    """Rows of all matrix product results together."""
    results = [n.outputs[0] for n in graph.graph if n.op_type in ("MatMul", "Gemm")]
    return sum(int(np.prod(static_shape(v)[:-1])) for v in results)


@pytest.mark.parametrize(
    "pick",
    [
        pytest.param(lambda x: x[:, 0], id="first"),
        pytest.param(lambda x: x[:, -1], id="last"),
        pytest.param(lambda x: x[:, 2], id="middle"),
        pytest.param(lambda x: x[:, 1:3].mean(1), id="two rows"),
        pytest.param(lambda x: x[:, 0] * 2 + 1, id="scaled"),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_stay(pick, threads):
    before, after, record, batch = narrowed(pick)
    assert record.counts["products"] >= 6
    assert product_rows(after) < 0.75 * product_rows(before)
    result = compare(before, after, batch, threads)
    assert result.loss < 1e-6 and result.worst_gradient[1] < 1e-5, result.worst_gradient


@pytest.mark.parametrize(
    ("pick", "options"),
    [
        pytest.param(lambda x: x.mean(1), {}, id="all rows are read"),
        pytest.param(lambda x: x[:, 0] + x.mean(1), {}, id="another reader"),
        pytest.param(lambda x: x[:, 1:].mean(1), {}, id="more than half"),
        pytest.param(lambda x: x[:, 0] + x[:, 1], {}, id="two different rows"),
    ],
)
def test_leaves_alone(pick, options):
    before, after, record, batch = narrowed(pick, **options)
    assert compare(before, after, batch).worst_gradient[1] < 1e-5
    assert product_rows(after) > 0.75 * product_rows(before)


@pytest.mark.parametrize("options", [{"causal": True}, {"dropout": 0.5}], ids=["causal", "dropout"])
def test_stops_at_what_is_not_row_wise(options):
    """Above a causal attention or a random operator everything is computed in full; the rest may be narrowed."""
    before, after, _, batch = narrowed(lambda x: x[:, 0], **options)
    full = {"causal": "Attention", "dropout": "Dropout"}[next(iter(options))]
    shapes = [[static_shape(o) for o in n.outputs] for g in (before, after) for n in g.graph if n.op_type == full]
    assert len(shapes) == 2 and shapes[0] == shapes[1]
    assert compare(before, after, batch).worst_gradient[1] < 1e-5


def test_graph_output_keeps_all_rows():
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[2, 4, 3])
    w = ir.val("w", dtype=ir.DataType.FLOAT, shape=[3, 3])
    graph = ir.Graph([x, w], [], nodes=[], opset_imports={"": 18}, name="g")
    build = Builder(graph, "capture")
    hidden = build.op("MatMul", x, w, name="hidden")
    first = build.op("Gather", hidden, build.const(0, ir.DataType.INT64), axis=1)
    loss = build.op("ReduceSum", first, keepdims=0, name="loss")
    graph.outputs.extend([loss, hidden])
    made = TrainingGraph(
        ir.Model(graph, ir_version=10),
        Signature(loss="loss", inputs=("x", "w"), outputs=("hidden",)),
    )
    record = PassManager(parse_pipeline("narrow-rows")).run(made).passes[0]
    assert not record.modified
    assert record.refusals[0].reason == "no matrix product would get smaller"
