"""DistributedDataParallel over ORTModule and torch.compile, in two processes on this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(scope="module")
def ranks(saved: Any) -> Any:
    return saved("ddp_ranks.py")


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **tolerance, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("kind", ["module", "compile", "zero"])
def test_gradients_and_updates_are_those_of_the_joint_batch(ranks: Any, kind: str) -> None:
    same(ranks[0][kind], ranks[0]["joint"], **TOLERANCE)
    same(ranks[1][kind], ranks[0][kind], rtol=0, atol=0)


def test_each_rank_has_a_part_of_the_states(ranks: Any) -> None:
    parts = [rank["zero states"] for rank in ranks]
    assert sorted(sum(parts, [])) == sorted(v.numel() for n, v in ranks[0]["joint"].items() if not n.endswith(".grad"))
    assert all(0.25 < sum(p) / sum(sum(parts, [])) < 0.75 for p in parts)


def test_accumulation_without_sync(ranks: Any) -> None:
    same(ranks[0]["accumulated"], ranks[0]["accumulated joint"], **TOLERANCE)
    same(ranks[1]["accumulated"], ranks[0]["accumulated"], rtol=0, atol=0)


@pytest.mark.parametrize("what", ["buffers", "spare"])
def test_buffers_and_unused_parameters_are_those_of_pytorch(ranks: Any, what: str) -> None:
    for rank in ranks:
        same(rank[f"{what} module"], rank[f"{what} eager"], **TOLERANCE)
    assert what == "buffers" or "spare.weight" in ranks[0]["spare module"]


def test_one_graph_although_gradients_leave_in_several_buckets(ranks: Any) -> None:
    assert ranks[0]["graphs of a wide module"] == 1
