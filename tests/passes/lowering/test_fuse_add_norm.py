"""FuseAddNorm: sums in front of norms, in front of and behind their gradients; the same bits; near misses."""

from __future__ import annotations

import numpy as np
import pytest

import ortgraph
from ortgraph.ops import kernels
from ortgraph.passes.lowering.fuse_add_norm import FuseAddNorm

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")
SHAPE, WIDTH = (2, 3, 20), 20


def op(b, name, *inputs, outputs=1, **attributes):
    return b.multi(name, *inputs, outputs=outputs, domain=kernels.DOMAIN, **attributes)


def norm(bench, *, a=SHAPE, outputs=3, bias=True, swap=False, early=False, late=False, own=False, axis=-1):
    def make(b, x, y, scale, shift):
        total = b.op("Add", *((y, x) if swap else (x, y)))
        between = [b.op("Neg", total)] if early else []
        inputs = [total, b.op("Abs", scale) if own else scale, *([shift] if bias else [])]
        made = op(b, "LayerNorm", *inputs, outputs=outputs, axis=axis, epsilon=1e-3)
        return [*made, *between, *([b.op("Neg", total)] if late else [])]

    size = {"scale": SHAPE[axis:], "shift": SHAPE[axis:]}
    return bench.make(make, {"x": a, "y": SHAPE, **size})


def check_numbers(bench, graph, count, rtol=0.0):
    """Equal numbers at 1 and 2 threads; ``rtol`` is for sums that end in a fused multiply-add."""
    feeds = bench.feeds(graph)
    before = [bench.run(graph, feeds, threads) for threads in (1, 2)]
    assert bench.apply(graph, FuseAddNorm()) == {count: 1}
    for threads, old in zip((1, 2), before, strict=True):
        for one, other in zip(old, bench.run(graph, feeds, threads), strict=True):
            np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "case",
    [{}, {"outputs": 1}, {"bias": False}, {"swap": True}, {"late": True}, {"own": True}, {"axis": -2}, {"axis": 1}],
)
def test_norm(bench, case):
    graph = norm(bench, **case)
    check_numbers(bench, graph, "norms")
    assert "ortgraph.kernels.AddLayerNorm" in bench.ops(graph) and "Add" not in bench.ops(graph)
    fused = next(n for n in graph.graph if n.op_type == "AddLayerNorm")
    assert fused.attributes["epsilon"].as_float() == pytest.approx(1e-3)


def test_sum_as_graph_output(bench):
    seen = bench.expose_each(lambda: norm(bench), FuseAddNorm(), tolerance=0.0)
    assert ("Add", {"norms": 1}) in seen


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"early": True}, "before the normalization"),
        ({"a": (1, 3, 20)}, "broadcasts"),
        ({"a": (20,)}, "broadcasts"),
        ({"a": ("n", 3, 20)}, "broadcasts"),
    ],
)
def test_norm_near_misses(bench, case, word):
    reasons = bench.refusals(norm(bench, **case), FuseAddNorm())
    assert len(reasons) == 1 and word in reasons[0]


def gradient(bench, *, before=None, after=None, scale=True, own=False, shared=False, reader=False, outputs=3):
    """LayerNormGrad; ``before``/``after`` are shapes added to dY and dX. ``own``: the residual is made afterwards."""

    def make(b, dy, x, mean, inv, gain, one, two):
        incoming = dy if before is None else b.op("Add", dy, one)
        inputs = [incoming, x, mean, inv, *([gain] if scale else [])]
        dx, *rest = op(b, "LayerNormGrad", *inputs, outputs=outputs, axis=-1)
        extra = [b.op("Neg", rest[0])] if reader else []
        extra += [b.op("Neg", incoming)] if shared else []
        if after is not None:
            result = b.op("Add", b.op("Neg", two) if own else two, dx)
            extra += [b.op("Neg", dx)] if shared else []
            return [result, *rest, *extra]
        return [dx, *rest, *extra]

    row = (*SHAPE[:-1], 1)
    inputs = {
        "dy": SHAPE,
        "x": SHAPE,
        "mean": row,
        "inv": row,
        "gain": (WIDTH,),
        "one": before or (),
        "two": after or (),
    }
    return bench.make(make, inputs)


@pytest.mark.parametrize("case", [{}, {"scale": False}, {"outputs": 1}, {"reader": True}, {"after": SHAPE}])
def test_sum_before_gradient(bench, case):
    graph = gradient(bench, before=SHAPE, **case)
    check_numbers(bench, graph, "sums_before_gradients")
    assert "ortgraph.kernels.AddLayerNormGrad" in bench.ops(graph)
    assert bench.ops(graph).count("Add") == ("after" in case)


@pytest.mark.parametrize("case", [{}, {"scale": False}, {"outputs": 1}, {"reader": True}, {"own": True}])
def test_sum_after_gradient(bench, case):
    graph = gradient(bench, after=SHAPE, **case)
    check_numbers(bench, graph, "sums_after_gradients", 1e-6)
    assert "ortgraph.kernels.LayerNormGradAdd" in bench.ops(graph) and "Add" not in bench.ops(graph)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"before": (20,)}, "broadcasts"),
        ({"after": (1, 1, 20)}, "broadcasts"),
        ({"before": SHAPE, "shared": True}, "also read by Neg"),
        ({"after": SHAPE, "shared": True}, "also read by Neg"),
        ({"after": SHAPE, "own": True, "reader": True}, "reads dScale or dBias before"),
    ],
)
def test_gradient_near_misses(bench, case, word):
    reasons = bench.refusals(gradient(bench, **case), FuseAddNorm())
    assert len(reasons) == 1 and word in reasons[0]


def test_exposed_gradients(bench):
    for case in ({"before": SHAPE}, {"after": SHAPE}):
        seen = bench.expose_each(lambda case=case: gradient(bench, **case), FuseAddNorm(), tolerance=0.0)
        assert all(not counts for _, counts in seen) and seen


def test_added_to_itself(bench):
    def make(b, dy, x, mean, inv):
        dx = op(b, "LayerNormGrad", dy, x, mean, inv, axis=-1)[0]
        return b.op("Add", dx, dx)

    row = (*SHAPE[:-1], 1)
    graph = bench.make(make, {"dy": SHAPE, "x": SHAPE, "mean": row, "inv": row})
    (reason,) = bench.refusals(graph, FuseAddNorm())
    assert "added to itself" in reason


def test_without_kernels(bench):
    assert bench.refusals(norm(bench), FuseAddNorm(kernels=False)) == [
        "compiled kernels are switched off (kernels=false)"
    ]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_step_and_gradients(first, threads):
    """Residual blocks with the norm in front or behind: losses, parameters and gradients stay."""
    import torch

    from ortgraph.manager import PassManager, parse_pipeline
    from ortgraph.runtime.session import TrainingSession

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(12) for _ in range(3))
            self.maps = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(3))

        def forward(self, x, target):
            for layer, scale in zip(self.maps, self.norms, strict=True):
                x = x + torch.tanh(layer(scale(x))) if first else scale(x + torch.tanh(layer(x)))
            return torch.nn.functional.mse_loss(x, target)

    torch.manual_seed(0)
    module, batch = Model(), {"x": torch.randn(4, 5, 12), "target": torch.randn(4, 5, 12)}
    results = []
    for extra in ("", "fuse-add-norm,eliminate-dead-code,"):
        graph = ortgraph.capture(module, batch)
        text = f"mark-optimized,attach-optimizer{{optimizer=adamw(lr=0.01)}},lower{{prefer=kernel}},{extra}plan-memory"
        PassManager(parse_pipeline(text)).run(graph)
        wanted = {"AddLayerNorm", "LayerNormGradAdd" if first else "AddLayerNormGrad"}
        assert wanted <= {n.op_type for n in graph.graph} or not extra
        session = TrainingSession(graph, threads=threads)
        results.append(([session.step(batch) for _ in range(3)], session.state_dict(), session.gradients(batch)))
    (losses, *old), (fused_losses, *new) = results
    rtol = 1e-6 if first else 0.0
    np.testing.assert_allclose(losses, fused_losses, rtol=rtol)
    for one, other in zip(old, new, strict=True):
        assert set(one) == set(other)
        for key in one:
            np.testing.assert_allclose(np.asarray(one[key]), np.asarray(other[key]), rtol=rtol, atol=rtol)
