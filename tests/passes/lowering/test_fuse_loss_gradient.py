"""FuseLossGradient: the loss from row sums alone, and its gradient in the type that is read; numbers in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.ops import kernels
from ortgraph.ops.spec import KERNELS
from ortgraph.passes.lowering.fuse_loss_gradient import FuseLossGradient

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")

F32, BF16, I64 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.INT64
INPUTS = {"x": (37, 150), "t": (37,), "d": (), "n": ()}
TYPES = {"t": I64}


def head(b, x, t, d, n, *, low=None, axis=-1, pick_axis=1, expose=False, reader=None):
    """Loss per row, and the gradient of the mean; the gradient as float32 again where it was rounded."""
    log_prob = b.op("LogSoftmax", x, axis=axis)
    picked = b.op("GatherElements", log_prob, b.op("Unsqueeze", t, b.ints([1])), axis=pick_axis)
    dx = b.op("CrossEntropyGrad", d, log_prob, t, None, n, domain=KERNELS, reduction="mean", ignore_index=-100)
    results = [b.op("Neg", picked), b.op("Cast", b.op("Cast", dx, to=low), to=F32) if low else dx]
    if reader == "probabilities":
        results.append(b.op("Exp", log_prob))
    if reader == "gradient":
        results.append(b.op("Neg", dx))
    return [*results, log_prob] if expose else results


def made(bench, **options):
    inputs = dict(INPUTS)
    return bench.make(lambda b, *values: head(b, *values, **options), inputs, TYPES)


def wanted(feeds):
    x = feeds["x"].astype(np.float64)
    log_prob = x - np.log(np.exp(x).sum(1, keepdims=True))
    rows = np.arange(len(x))
    gradient = np.exp(log_prob)
    gradient[rows, feeds["t"]] -= 1
    return -log_prob[rows, feeds["t"]][:, None], gradient * (feeds["d"] / feeds["n"])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("axis", [-1, 1])
def test_in_float32(bench, threads, axis):
    graph = made(bench, axis=axis)
    feeds = bench.feeds(graph)
    assert bench.apply(graph, FuseLossGradient()) == {"rows": 1, "picked": 1, "gradients": 1}
    assert sorted(bench.ops(graph)) == [
        "GatherElements", "Neg", "Sub", "Unsqueeze", "ortgraph.kernels.CrossEntropyStatisticsGrad",
        "ortgraph.kernels.LogSumExp",
    ]  # fmt: skip
    for got, expected in zip(bench.run(graph, feeds, threads), wanted(feeds), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("threads", [1, 2])
def test_the_cast_goes_in(bench, threads):
    graph = made(bench, low=BF16)
    feeds = bench.feeds(graph)
    before = bench.run(graph, feeds)
    assert bench.apply(graph, FuseLossGradient()) == {"rows": 1, "picked": 1, "casts": 1}
    assert "ortgraph.kernels.CrossEntropyStatisticsGrad_b" in bench.ops(graph)
    assert bench.ops(graph).count("Cast") == 1
    _, gradient = bench.run(graph, feeds, threads)
    expected = wanted(feeds)[1]
    np.testing.assert_allclose(gradient, expected, rtol=2**-8, atol=1e-6 * np.abs(expected).max())
    assert (gradient.astype(ml_dtypes.bfloat16).astype(np.float32) == gradient).all()
    assert (gradient != before[1]).mean() < 0.01  # a last bit of float32 may decide a tie


def test_ignored_rows_are_zero(bench):
    graph = made(bench, low=BF16)
    feeds = bench.feeds(graph)
    feeds["t"][::3] = -100
    FuseLossGradient()(graph.model)
    (gradient,) = bench.run(graph, {**feeds, "x": feeds["x"]})[1:]
    assert (gradient[::3] == 0).all() and (gradient[1::3] != 0).any(1).all()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"axis": 0}, "not over the last"),
        ({"expose": True}, "graph output"),
        ({"reader": "probabilities"}, "read by Exp"),
        ({"pick_axis": 0}, "read by GatherElements"),
    ],
)
def test_near_misses(bench, options, word):
    reasons = bench.refusals(made(bench, **options), FuseLossGradient())
    assert len(reasons) == 1 and word in reasons[0]


@pytest.mark.parametrize(
    ("options", "word"),
    [({"low": ir.DataType.FLOAT16}, "cast to FLOAT16"), ({"low": BF16, "reader": "gradient"}, "in float32 too")],
)
def test_casts_that_stay(bench, options, word):
    graph = made(bench, **options)
    assert "casts" not in FuseLossGradient()(graph.model).counts
    (reason,) = bench.refusals(graph, FuseLossGradient())
    assert word in reason
    assert "Cast" in bench.ops(graph)


def test_each_value_may_be_an_output(bench):
    bench.expose_each(lambda: made(bench), FuseLossGradient())


def test_other_log_softmaxes_stay(bench):
    graph = bench.make(lambda b, x: b.op("LogSoftmax", x, axis=-1), {"x": (4, 5)})
    assert bench.refusals(graph, FuseLossGradient()) == []


def test_without_kernels(bench):
    assert bench.refusals(made(bench), FuseLossGradient(kernels=False)) == [
        "compiled kernels are switched off (kernels=false)"
    ]
