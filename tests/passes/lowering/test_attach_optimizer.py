"""attach-optimizer as a pass: text, stage, counts, and a graph that still verifies."""

from __future__ import annotations

import pytest

from ortgraph.errors import InputError, PassError
from ortgraph.graph.verify import verify
from ortgraph.manager.pipeline_text import parse_pipeline, pipeline_text
from ortgraph.optim import AdamW, Group
from ortgraph.passes.lowering.attach_optimizer import AttachOptimizer


@pytest.mark.parametrize(
    "made",
    [
        AttachOptimizer(),
        AttachOptimizer.of(AdamW(lr=0.1, max_grad_norm=1.0, no_decay=("*.bias",)), accumulation_steps=4),
        AttachOptimizer.of(
            AdamW(groups=(Group(("a*", "b?"), lr=0.1, betas=(0.5, 0.75)), Group("c", weight_decay=0.0)))
        ),
    ],
    ids=str,
)
def test_text_round_trip(made) -> None:
    assert parse_pipeline(str(made)) == (made,)
    assert pipeline_text(parse_pipeline(f"eliminate-dead-code,{made}")) == f"eliminate-dead-code,{made}"


def test_counts_and_stage(classifier_graph) -> None:
    graph = classifier_graph()
    outcome = AttachOptimizer().call(graph.model)
    assert outcome.modified and outcome.counts == {"updates": 6}
    assert AttachOptimizer.sets_stage == "stepped"
    graph.signature = graph.signature.replace(stage="stepped")
    verify(graph)


def test_a_bad_optimizer_text(classifier_graph) -> None:
    with pytest.raises(InputError, match="does not parse"):
        AttachOptimizer("rmsprop").call(classifier_graph().model)


def test_twice(classifier_graph) -> None:
    graph = classifier_graph()
    AttachOptimizer().call(graph.model)
    with pytest.raises(PassError, match="cannot get an optimizer"):
        AttachOptimizer().call(graph.model)
