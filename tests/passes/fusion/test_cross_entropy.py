"""FuseCrossEntropy: both halves from composites and the standard operator; near misses."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.passes.fusion.cross_entropy import FuseCrossEntropy

OG = "ortgraph"


def pair(bench, reduction="mean", ignore_index=1, weight=False, axis=1, dims=(), standard=False, other=False):
    options = {"reduction": reduction, "ignore_index": ignore_index}

    def body(b, logits, target, w, d_loss):
        log_prob = b.op("LogSoftmax", logits, axis=axis)
        early = b.op("Exp", log_prob)  # a reader between the log-softmax and the loss
        w = w if weight else None
        if standard:
            loss = b.op("NegativeLogLikelihoodLoss", log_prob, target, *([w] if weight else []), **options)
            return loss, early
        loss, total = b.multi("NllLoss", log_prob, target, w, outputs=2, domain=OG, **options)
        grad = b.op("NllLossGrad", d_loss, log_prob, target, w, total, domain=OG, **options)
        y = b.op("LogSoftmax", b.op("Neg", logits), axis=axis) if other else log_prob
        return loss, early, b.op("LogSoftmaxGrad", grad, y, domain=OG, axis=axis)

    shapes = {
        "logits": (6, 3, *dims),
        "target": (6, *dims),
        "w": (3,),
        "d_loss": (6, *dims) if reduction == "none" else (),
    }
    return bench.make(body, shapes, {"target": ir.DataType.INT64})


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("dims", [(), (2,)])
def test_both_halves(bench, reduction, weight, dims):
    graph = pair(bench, reduction, weight=weight, dims=dims)
    assert bench.apply(graph, FuseCrossEntropy()) == {"loss": 1, "gradient": 1}
    assert sorted(bench.ops(graph)) == ["Exp", "ortgraph.CrossEntropy", "ortgraph.CrossEntropyGrad"]


@pytest.mark.parametrize("weight", [False, True])
def test_standard_operator(bench, weight):
    graph = pair(bench, standard=True, weight=weight, axis=-1)
    assert bench.apply(graph, FuseCrossEntropy()) == {"loss": 1}


def test_wrong_axis(bench):
    reasons = bench.refusals(pair(bench, axis=0, standard=True), FuseCrossEntropy())
    assert reasons == ["LogSoftmax runs along axis 0, the classes are axis 1"]


def test_other_log_probabilities(bench):
    graph = pair(bench, other=True)
    outcome = FuseCrossEntropy()(graph.model)
    assert dict(outcome.counts) == {"loss": 1}
    assert "different log-probabilities" in outcome.refusals[0].reason


def test_exposed_inner_values(bench):
    seen = bench.expose_each(lambda: pair(bench), FuseCrossEntropy())
    # The gradient of the log-probabilities is the only value that goes away.
    assert [c for o, c in seen if o == "NllLossGrad"] == [{"loss": 1}]
    assert all(c == {"loss": 1, "gradient": 1} for o, c in seen if o != "NllLossGrad")


def test_loss_alone(bench):
    def body(b, p, t):
        return b.multi("NllLoss", p, t, outputs=2, domain=OG)[0]

    graph = bench.make(body, {"p": (6, 3), "t": (6,)}, {"t": ir.DataType.INT64})
    assert bench.refusals(graph, FuseCrossEntropy()) == []
