"""Sweeps: budgets from all the memory to the floor, overhead that never grows with the budget."""

from __future__ import annotations

import pytest

from ortgraph.errors import InputError, PlanError
from ortgraph.optim import AdamW
from ortgraph.plan.program_plan import plan_program
from ortgraph.plan.simulate import simulate
from ortgraph.plan.sweep import sweep


@pytest.mark.parametrize("optimizer", [None, AdamW(lr=1e-2)], ids=str)
def test_points_go_from_the_given_order_to_the_floor(blocks, optimizer) -> None:
    told: list[str] = []
    swept = sweep(blocks(64, optimizer), points=6, seconds=1, tell=told.append)
    budgets = [p.budget for p in swept.points]
    given = swept.given
    assert len(told) == len(budgets) == 6 and budgets == sorted(budgets, reverse=True)
    assert budgets[0] == given.arena_before.arena_bytes + given.scratch_bytes
    assert budgets[-1] == given.floor.bytes + given.scratch_bytes
    assert swept.points[0].plan.recomputed == 0 and swept.points[0].plan.after.overhead == 0
    overheads = [p.plan.after.overhead for p in swept.points if p.plan is not None]
    assert len(overheads) >= 3 and overheads == sorted(overheads) and overheads[-1] > 0
    for point in swept.points:
        if point.plan is None:
            assert point.reason
            continue
        profile = simulate(given.problem.operations, point.plan.sequence)
        assert profile.peak == point.plan.after.peak
        assert point.plan.arena.arena_bytes + given.scratch_bytes <= point.budget == point.plan.budget
    assert swept.lowest is [p for p in swept.points if p.plan is not None][-1]


def test_points_are_the_plans_of_their_budgets(blocks) -> None:
    graph = blocks(64)
    middle = sweep(graph, points=3, seconds=4).points[1]
    alone = plan_program(graph, middle.budget, seconds=4)
    assert middle.plan.after.overhead <= alone.after.overhead


@pytest.mark.slow
def test_two_sweeps_are_equal(blocks) -> None:
    first, second = (sweep(blocks(64), points=3, seconds=2) for _ in range(2))
    assert [(p.budget, p.plan and p.plan.sequence) for p in first.points] == [
        (p.budget, p.plan and p.plan.sequence) for p in second.points
    ]


@pytest.mark.parametrize("options", [{"points": 1}, {"seconds": 0}, {"program": "steps"}])
def test_nonsense_is_refused(blocks, options) -> None:
    with pytest.raises(InputError):
        sweep(blocks(64), **options)


def test_symbolic_shapes_are_refused(captured_blocks) -> None:
    with pytest.raises(PlanError, match="numbers for all dimensions"):
        sweep(captured_blocks)
