"""ZeroEmptyRows: the attention expansion with rows that see nothing; every reader that would notice."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.manager import PassManager
from ortgraph.manager.registry import preset
from ortgraph.ops import kernels
from ortgraph.ops.spec import CONTRIB
from ortgraph.passes.lowering.lower import Lower
from ortgraph.passes.lowering.zero_empty_rows import ZeroEmptyRows

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")
SCORES, VALUES, KEYS = (2, 3, 4, 19), (2, 3, 4, 5), (2, 3, 19, 5)


def attention(bench, *, mask=(2, 1, 4, 19), floor=0.0, axis=-1, other_max=False, half="both", read="", backward=True):
    """Forward and backward products around P; ``read`` names a value that another node reads."""

    def make(b, scores, v, dy, bias, other):
        highest = b.op("ReduceMax", other if other_max else bias, b.ints([axis]), keepdims=1)
        blind = b.op("Equal", highest, b.scalar(-np.inf, bias))
        lifted = b.op("Max", bias, b.op("Where", blind, b.scalar(floor, bias), b.scalar(-np.inf, bias)))
        seeing = b.op("Cast", b.op("Not", blind), to=ir.DataType.FLOAT)
        p = b.op("ScaledMaskedSoftmax", scores, lifted, domain=kernels.DOMAIN, scale=0.5)
        product = b.op("MatMul", p, v)
        y = b.op("Mul", product, seeing) if half in ("both", "forward") else product
        inner = {"p": p, "product": product}
        results = [y]
        if backward:
            g = b.op("Mul", seeing, dy) if half in ("both", "backward") else dy
            dp = b.op("FusedMatMul", g, v, domain=CONTRIB, transB=1)
            dv = b.op("FusedMatMul", p, g, domain=CONTRIB, transA=1)
            results += [dv, b.op("SoftmaxGrad", dp, p, domain=kernels.DOMAIN, axis=-1)]
            inner |= {"g": g, "dp": dp}
        return [*results, *([b.op("Neg", inner[read])] if read else [])]

    shapes = {"scores": SCORES, "v": KEYS, "dy": VALUES, "bias": mask, "other": mask}
    return bench.make(make, shapes)


def masked(bench, graph):
    """Inputs with a row of the mask that sees nothing, and one that sees a single key."""
    feeds = bench.feeds(graph)
    bias = np.where(feeds["bias"] > 0, 0, -np.inf).astype(np.float32)
    bias.reshape(-1, bias.shape[-1])[:2] = -np.inf
    bias.reshape(-1, bias.shape[-1])[-1, 1:] = -np.inf
    return feeds | {"bias": bias}


@pytest.mark.parametrize(
    "case",
    [
        {}, {"backward": False}, {"mask": (2, 1, 1, 19)}, {"mask": SCORES}, {"mask": (4, 19)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2])
def test_same_numbers(bench, case, threads):
    graph = attention(bench, **case)
    feeds = masked(bench, graph)
    before = bench.run(graph, feeds, threads)
    assert bench.apply(graph, ZeroEmptyRows(), tolerance=0.0) == {"softmaxes": 1}
    for old, new in zip(before, bench.run(graph, feeds, threads), strict=True):
        np.testing.assert_array_equal(new, old)
    assert "Mul" not in bench.ops(graph)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"read": "p"}, "the probabilities"),
        ({"read": "product"}, "also read by Neg"),
        ({"read": "g"}, "also read by Neg"),
        ({"read": "dp"}, "also read by FusedMatMul"),
        ({"half": "forward"}, "not zeroed"),
        ({"half": "backward"}, "keeps what rows without keys see"),
        ({"half": "neither", "backward": False}, "keeps what rows without keys see"),
    ],
)
def test_near_misses(bench, case, word):
    (reason,) = bench.refusals(attention(bench, **case), ZeroEmptyRows())
    assert word in reason


@pytest.mark.parametrize("case", [{"floor": 1.0}, {"axis": 2}, {"other_max": True}])
def test_other_masks_are_no_candidates(bench, case):
    assert bench.refusals(attention(bench, **case), ZeroEmptyRows()) == []


def test_exposed_inner_values(bench):
    """Whatever is exposed, results stay for masks with empty rows."""
    names = [o.name for n in attention(bench).graph for o in n.outputs if not o.is_graph_output()]
    fused = 0
    for name in names:
        graph = attention(bench)
        graph.graph.outputs.append(next(o for n in graph.graph for o in n.outputs if o.name == name))
        graph.signature = graph.signature.replace(outputs=(*graph.signature.outputs, name))
        feeds = masked(bench, graph)
        before = bench.run(graph, feeds)
        fused += bool(ZeroEmptyRows()(graph.model).counts)
        for old, new in zip(before, bench.run(graph, feeds), strict=True):
            np.testing.assert_array_equal(new, old, err_msg=name)
    assert 0 < fused < len(names)


def test_without_kernels(bench):
    (reason,) = bench.refusals(attention(bench), ZeroEmptyRows(kernels=False))
    assert "kernels=false" in reason


@pytest.mark.parametrize("threads", [1, 2])
def test_step_and_gradients(threads, decomposed_attention):
    import torch

    from ortgraph.manager import parse_pipeline
    from ortgraph.runtime.session import TrainingSession

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 24)

        def forward(self, x, seen, target):
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen[:, None, None, :])
            return torch.nn.functional.mse_loss(y, target)

    torch.manual_seed(0)
    seen = torch.ones(3, 5, dtype=torch.bool)
    seen[0, 3:], seen[1] = False, False
    module, batch = Model(), {"x": torch.randn(3, 5, 8), "seen": seen, "target": torch.randn(3, 2, 5, 4)}
    results = []
    for extra in ("", "zero-empty-rows,"):
        graph = ortgraph.capture(module, batch)
        middle = "fold-constants,fuse-matmul-transpose,eliminate-common-subexpressions,eliminate-dead-code"
        text = (
            f"mark-optimized,attach-optimizer{{optimizer=adamw(lr=0.01)}},lower{{table={decomposed_attention}}},{middle},"
            f"fuse-attention-gradient,fuse-masked-softmax,{extra}eliminate-dead-code,plan-memory"
        )
        PassManager(parse_pipeline(text)).run(graph)
        assert ("ReduceMax" not in {n.op_type for n in graph.graph}) == bool(extra)
        session = TrainingSession(graph, threads=threads)
        gradients = session.gradients(batch)
        results.append(([session.step(batch) for _ in range(3)], gradients))
    (losses, gradients), (fused_losses, fused_gradients) = results
    assert fused_losses == losses
    for key, value in gradients.items():
        np.testing.assert_array_equal(fused_gradients[key], value)
    loss = module(**batch)
    loss.backward()
    np.testing.assert_allclose(losses[0], loss.item(), rtol=1e-5)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(fused_gradients[name], parameter.grad.numpy(), rtol=0, atol=1e-6)


def test_preset_computes_the_mask_once(decomposed_attention):
    """Two layers, both halves: one mask, nothing left of its rows without keys, no node twice."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 24) for _ in range(2))

        def forward(self, x, seen, target):
            for layer in self.layers:
                q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in layer(x).chunk(3, -1))
                y = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, seen[:, None, None, :].expand(-1, 1, 5, 5)
                )
                x = x + y.transpose(1, 2).flatten(2)
            return torch.nn.functional.mse_loss(x, target)

    torch.manual_seed(0)
    seen = torch.ones(3, 5, dtype=torch.bool)
    seen[0, 3:], seen[1] = False, False
    batch = {"x": torch.randn(3, 5, 8), "seen": seen, "target": torch.randn(3, 5, 8)}
    graph = ortgraph.capture(Model(), batch)
    passes = preset(
        "O2", optimizer=ortgraph.optim.AdamW(lr=0.01), target="onnxruntime-training", shapes={}, accumulation_steps=1
    )
    chosen = [dataclasses.replace(p, table=decomposed_attention) if isinstance(p, Lower) else p for p in passes]
    PassManager(chosen).run(graph)
    ops = [n.op_type for n in graph.graph]
    assert ops.count("ScaledMaskedSoftmax") == 2 and ops.count("Where") == 1
    assert not {"Softmax", "ReduceMax", "Max", "Not", "Equal"} & set(ops)
    keys = [(n.domain, n.op_type, n.inputs, str(n.attributes)) for n in graph.graph]
    assert len(set(keys)) == len(keys)
