"""PyTorch's joint graphs as planning problems: operations, bytes, FLOPs, and what its partitions are judged as."""

from __future__ import annotations

import pytest

from bench.memory_pytorch import Point, frontier
from ortgraph.plan.simulate import simulate

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def traced():
    from torch._functorch import partitioners

    from bench.memory_pytorch_graph import convert, trace
    from bench.memory_pytorch_models import Gpt

    torch.manual_seed(0)
    found = trace(Gpt(layers=2, width=16, heads=2), torch.randn(2, 8, 16))
    return found, convert(found, found.run(partitioners.default_partition))


def test_flops_are_those_of_the_counter(traced) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from bench.memory_pytorch_models import Gpt

    torch.manual_seed(0)
    module, batch = Gpt(layers=2, width=16, heads=2), torch.randn(2, 8, 16)
    with FlopCounterMode(display=False) as counter:
        module(batch).backward()
    assert traced[1].problem.cost == counter.get_total_flops() > 0


def test_views_are_no_operations_and_read_what_they_show(traced) -> None:
    problem = traced[1].problem
    names = [o.name for o in problem.operations]
    assert not any(n.startswith(("view", "t_", "transpose", "getitem", "split", "expand", "detach")) for n in names)
    first = problem.operations[names.index("addmm")]  # reads a view of the norm's first result, not its statistics
    assert [problem.values[v].name for v in first.inputs] == ["native_layer_norm:0"]
    assert [problem.values[v].size for v in first.outputs] == [4 * 2 * 8 * 48]
    clone = problem.operations[names.index("clone")]  # reads a part of the joint projection: the whole memory
    assert [problem.values[v].name for v in clone.inputs] == ["addmm:0"]


def test_partitions_are_valid_sequences(traced) -> None:
    import torch._functorch.config as config
    from torch._functorch import partitioners

    found, joint = traced
    default = simulate(joint.problem, joint.sequence(found.run(partitioners.default_partition)))
    assert default.overhead == 0
    with config.patch(activation_memory_budget=0.3):
        less = simulate(joint.problem, joint.sequence(found.run(partitioners.min_cut_rematerialization_partition)))
    assert less.peak < default.peak and less.overhead > 0


def test_checkpoint_repeats_every_block_but_not_the_head(traced) -> None:
    from torch._functorch import partitioners

    found, joint = traced
    names = found.run(partitioners.min_cut_rematerialization_partition, checkpointed=True)
    assert simulate(joint.problem, joint.sequence(names)).overhead > 0.1
    repeated = {n for n in names if names.count(n) > 1 and n in joint.operation}
    blocks = {n.name for n in found.joint.graph.nodes if (n.meta.get("custom") or {}).get("block") is not None}
    assert repeated and repeated <= blocks
    assert {"addmm", "addmm_4"} <= repeated  # the first projection of each block


def test_frontier_keeps_what_nothing_beats() -> None:
    points = [Point("a", 10, 0.0), Point("b", 8, 1.0), Point("c", 9, 1.5), Point("d", 8, 2.0), Point("e", 5, 9.0)]
    assert [p.made_by for p in frontier(points)] == ["e", "b", "a"]
