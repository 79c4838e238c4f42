"""redraw-dropout: the same bits without a mask, at one and two threads, and what keeps its mask."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.analysis.liveness import Liveness
from ortgraph.ops import kernels
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.memory.redraw_dropout import RedrawDropout
from ortgraph.runtime.session import TrainingSession

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a compiler")
INPUTS = {"x": (3, 300), "key": (), "step": (), "dy": (3, 300)}
DTYPES = {"key": ir.DataType.INT64, "step": ir.DataType.INT64}


def halves(b, x, key, step, dy, back=0.25, view=None, expose=False):
    y, mask = b.multi("Dropout", x, key, step, outputs=2, domain=KERNELS, ratio=0.25, node=3)
    if view is not None:
        mask, dy = (b.op("Reshape", v, b.ints(view)) for v in (mask, dy))
    dx = b.op("DropoutGrad", dy, mask, domain=KERNELS, ratio=back)
    return [y, dx, b.op("Identity", mask)] if expose else [y, dx]


@pytest.mark.parametrize("options", [{}, {"view": [900]}, {"expose": True}])
def test_the_gradient_draws_its_own_mask(bench, options):
    graph = bench.make(lambda b, *v: halves(b, *v, **options), INPUTS, DTYPES)
    before = bench.run(graph, bench.feeds(graph))
    assert bench.apply(graph, RedrawDropout(), tolerance=0) == {"redrawn": 1}
    assert bench.ops(graph).count("ortgraph.kernels.Dropout") == 2
    assert "ortgraph.kernels.DropoutGrad" not in bench.ops(graph)
    assert 0 < np.count_nonzero(before[1] == 0) < before[1].size


def test_different_ratios_keep_the_mask(bench):
    graph = bench.make(lambda b, *v: halves(b, *v, back=0.5), INPUTS, DTYPES)
    assert bench.refusals(graph, RedrawDropout()) == ["the halves have different ratios"]


def test_a_mask_from_elsewhere_stays(bench):
    def body(b, x, key, step, dy):
        return b.op("DropoutGrad", dy, b.op("Greater", x, dy), domain=KERNELS, ratio=0.25)

    graph = bench.make(body, INPUTS, DTYPES)
    assert bench.refusals(graph, RedrawDropout()) == ["its mask is not drawn by the Dropout kernel"]


def test_without_kernels_nothing_happens(bench):
    graph = bench.make(halves, INPUTS, DTYPES)
    assert bench.refusals(graph, RedrawDropout(kernels=False)) == ["compiled kernels are switched off (kernels=false)"]


class Dropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        return x.square().mean()


@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_are_bit_equal_and_no_mask_lives(threads):
    batch = {"x": torch.randn(64, 40, generator=torch.Generator().manual_seed(1))}
    captured = ortgraph.capture(Dropped(), batch)
    optimizer = ortgraph.optim.AdamW(lr=1e-2)
    graph = ortgraph.optimize(captured, "O2", optimizer=optimizer).graph
    kept = ortgraph.optimize(captured, "O0", optimizer=optimizer).graph
    assert any(n.op_type == "DropoutGrad" for n in kept.graph)
    live = Liveness(graph.graph)
    assert not [v.name for v in live.storages() if v.dtype == ir.DataType.BOOL]
    feeds = {k: v.numpy() for k, v in batch.items()}
    first, second = (TrainingSession(g, threads=threads) for g in (graph, kept))
    for _ in range(3):  # the step counter draws another mask each time
        assert np.isclose(first.step(feeds), second.step(feeds), rtol=1e-6)


def test_bits_of_every_gradient():
    batch = {"x": torch.randn(64, 40, generator=torch.Generator().manual_seed(1))}
    lowered = ortgraph.optimize(ortgraph.capture(Dropped(), batch), "mark-optimized,lower").graph
    redrawn = ortgraph.optimize(lowered, "redraw-dropout,eliminate-dead-code").graph
    assert all(len(n.outputs) == 1 for n in redrawn.graph if n.op_type == "Dropout")
    feeds = {k: v.numpy() for k, v in batch.items()}
    runs = [TrainingSession(g, threads=t).gradients(feeds) for g in (lowered, redrawn) for t in (1, 2)]
    for other in runs[1:]:
        for name, want in runs[0].items():
            np.testing.assert_array_equal(other[name], want)


def test_without_kernels_the_mask_is_kept_as_booleans():
    batch = {"x": torch.randn(64, 40, generator=torch.Generator().manual_seed(1))}
    passes = "mark-optimized,lower{kernels=false},eliminate-common-subexpressions,eliminate-dead-code"
    graph = ortgraph.optimize(ortgraph.capture(Dropped(), batch), passes).graph
    masks = [n.outputs[0] for n in graph.graph if n.op_type == "Cast" and n.inputs[0].dtype == ir.DataType.BOOL]
    assert len(masks) == 3 and all(len(v.uses()) == 1 for v in masks)
    assert sum(n.op_type == "Where" and n.inputs[0].shape == [64, 40] for n in graph.graph) == 3
