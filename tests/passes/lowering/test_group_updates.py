"""GroupUpdates: the same bits in one call per group, written in place; near misses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.manager.optimize import optimize
from ortgraph.ops import kernels
from ortgraph.optim import LAMB, SGD, AdamW, Group
from ortgraph.passes.lowering import group_updates
from ortgraph.passes.lowering.group_updates import GroupUpdates
from ortgraph.runtime.session import TrainingSession

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")
SHAPES = [(7, 5), (), (300,), (0, 2), (33000,)]


def updates(bench, op="AdamW", *, scale=True, skip=False, read=False, decays=(0.1,), momentum=0.9):
    """An update of every shape, with the decays in turn."""
    states = {"AdamW": 2, "LAMB": 2, "SGD": 1 if momentum else 0}[op]
    shapes = {"rate": (), "step": (), "scale": (), "skip": ()}
    for i, shape in enumerate(SHAPES):
        shapes.update({f"{k}{i}": shape for k in ("w", "g", "s", "t")[: 2 + states]})

    def make(b, rate, step, factor, skipped, *tensors):
        made = []
        per = 2 + states
        for i in range(len(SHAPES)):
            w, g, *s = tensors[per * i : per * (i + 1)]
            s = [b.op("Mul", x, x) for x in s] + [None] * (op == "SGD" and not momentum)
            inputs = [rate, step, w, g, *s, factor if scale else None, skipped if skip else None]
            while inputs[-1] is None:
                inputs.pop()
            attributes = {"weight_decay": decays[i % len(decays)], **({"momentum": momentum} if op == "SGD" else {})}
            made += b.multi(op, *inputs, outputs=1 + states, domain=kernels.DOMAIN, **attributes)
        return [*made, *([b.op("Neg", made[0])] if read else [])]

    return bench.make(make, shapes, {"step": ir.DataType.INT64, "skip": ir.DataType.BOOL})


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize(
    "case",
    [{}, {"skip": True}, {"scale": False, "skip": True}, {"op": "LAMB", "skip": True}, {"op": "SGD", "skip": True},
     {"op": "SGD", "momentum": 0.0}, {"decays": (0.1, 0.0), "skip": True}],
    ids=str,
)  # fmt: skip
def test_same_bits(bench, case, skipped, threads):
    graph = updates(bench, **case)
    feeds = bench.feeds(graph) | {"step": np.array(3), "skip": np.array(skipped)}
    before = bench.run(graph, feeds, threads)
    groups = len(case.get("decays", (0.1,)))
    assert bench.apply(graph, GroupUpdates()) == {"groups": groups}
    after = bench.run(graph, feeds, threads)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    name = f"ortgraph.kernels.{case.get('op', 'AdamW')}"
    assert name not in bench.ops(graph) and bench.ops(graph).count(name.replace("kernels.", "kernels.Multi")) == groups


@pytest.mark.parametrize(
    ("case", "groups", "reason"),
    [
        ({"scale": False}, 0, "waits for its own gradient only"),
        ({"read": True}, 1, "is read in the graph"),
        ({"decays": (0.1, 0.2, 0.3, 0.4, 0.5)}, 0, None),
    ],
)
def test_near_misses(bench, case, groups, reason):
    graph = updates(bench, **case)
    outcome = GroupUpdates().call(graph.model)
    assert outcome.counts.get("groups", 0) == groups
    reasons = [r.reason for r in outcome.refusals]
    assert (not reasons) if reason is None else any(reason in r for r in reasons)


def test_at_most_so_many_in_a_node(bench, monkeypatch):
    monkeypatch.setattr(group_updates, "MULTI", 2)
    graph = updates(bench)
    assert bench.apply(graph, GroupUpdates()) == {"groups": 2}
    assert bench.ops(graph).count("ortgraph.kernels.AdamW") == 1


@pytest.mark.parametrize(
    ("optimizer", "groups"),
    [
        (AdamW(lr=0.01, max_grad_norm=0.5, groups=(Group("norm.*", lr=0.1, weight_decay=0.0),)), 2),
        (LAMB(lr=0.01, loss_scale=1024), 1), (SGD(lr=0.01, momentum=0.9, max_grad_norm=1.0), 1),
    ],
    ids=str,
)  # fmt: skip
def test_in_a_session_everything_is_written_in_place(classifier_graph, classifier_batch, optimizer, groups):
    grouped = TrainingSession(optimize(classifier_graph(), "O1", optimizer=optimizer).graph, threads=2, poison=True)
    plain = TrainingSession(optimize(classifier_graph(), "O0", optimizer=optimizer).graph, threads=2)
    batches = [classifier_batch(seed=i) for i in range(3)]
    for batch in batches:
        for session in (grouped, plain):
            session.step(batch)
    program = grouped.program("step", batches[0])
    nodes = [n for n in program.order if n.op_type.endswith(optimizer.COMPOSITE)]
    assert [n.op_type for n in nodes] == [f"Multi{optimizer.COMPOSITE}"] * groups
    assert {v.name for n in nodes for v in n.outputs} <= set(program.placement.at_input), "no update is copied"
    a, b = grouped.state_dict(), plain.state_dict()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)
