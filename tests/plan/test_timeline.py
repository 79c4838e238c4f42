"""Live memory by role: it sums to what the simulator says, at every step, for any plan."""

from __future__ import annotations

import numpy as np
import pytest

import ortgraph
from ortgraph.graph.edit import MODULE_KEY, PHASE_KEY
from ortgraph.optim import AdamW
from ortgraph.plan.footprint import footprint
from ortgraph.plan.program_plan import plan_program, program_problem, replan
from ortgraph.plan.rebuild import apply_sequence
from ortgraph.plan.simulate import simulate
from ortgraph.plan.timeline import ROLES, find_roles, recomputed_operators, timeline


def gradient_bytes(graph) -> int:
    return sum(graph.values[p.name].nbytes for p in graph.signature.parameters if p.gradient is not None)


OPTIMIZERS = [None, AdamW(lr=1e-2), AdamW(lr=1e-2, max_grad_norm=0.5)]


@pytest.mark.parametrize("budget", [None, "80%", "60%"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_bands_sum_to_the_simulation(blocks, optimizer, budget) -> None:
    graph = blocks(64, optimizer)
    plan = plan_program(graph, budget, seconds=2)
    picture = timeline(find_roles(graph, plan.problem), plan.sequence)
    profile = simulate(plan.problem.operations, plan.sequence)
    np.testing.assert_array_equal(picture.live, profile.live)
    assert set(picture.bands) == set(ROLES)
    assert all((band >= 0).all() for band in picture.bands.values())
    assert picture.live[picture.peak_step] == profile.peak
    assert sum(o.bytes for o in picture.occupants) + picture.scratch == profile.peak
    assert [o.bytes for o in picture.occupants] == sorted((o.bytes for o in picture.occupants), reverse=True)
    assert picture.bands["recomputed"].any() == (plan.recomputed > 0)
    assert all(o.lower <= picture.peak_step <= o.upper for o in picture.occupants)


def test_roles_and_phases_of_a_step(blocks) -> None:
    graph = blocks(64)
    program, problem = program_problem(graph)
    roles = find_roles(graph, problem)
    names = {v.name: i for i, v in enumerate(problem.operations.values)}
    gradients = {names[n] for n in graph.signature.gradients.values() if n in names}
    assert program == "gradients" and gradients and gradients <= roles.gradients
    assert len(roles.gradients) == len(graph.signature.gradients)
    picture = timeline(roles, range(len(problem.nodes)))
    # Without an optimizer every gradient is read after the run, so that all of them live at the end.
    assert picture.bands["gradients"][-1] >= gradient_bytes(graph)
    forward = [t for t, phase in enumerate(roles.phases) if phase == "forward"]
    assert picture.backward_step == len(forward) and forward == list(range(len(forward)))
    saved = [o for o in picture.occupants if o.role == "activations"]
    assert saved and all(o.phase == "forward" and o.upper >= picture.backward_step for o in saved)
    assert any(o.module.startswith("blocks.") for o in saved)
    assert not any(o.role == "activations" and o.upper < picture.backward_step for o in picture.occupants)


def test_what_is_dropped_before_the_backward_half_is_no_saved_activation(blocks) -> None:
    graph = blocks(64)
    given = plan_program(graph)
    plan = replan(given, "60%", seconds=2)
    roles = find_roles(graph, plan.problem)
    before, after = timeline(roles, given.sequence), timeline(roles, plan.sequence)
    saved = [int(p.bands["activations"][p.backward_step - 1]) for p in (before, after)]
    assert saved[1] < 0.8 * saved[0]


def test_an_optimizer_frees_gradients_early(blocks) -> None:
    graph = blocks(64, AdamW(lr=1e-2))
    plan = plan_program(graph)
    picture = timeline(find_roles(graph, plan.problem), plan.sequence)
    assert 0 < picture.bands["gradients"].max() < gradient_bytes(graph) / 2


def test_phases_do_not_need_what_capture_wrote(blocks) -> None:
    graph = blocks(64, AdamW(lr=1e-2))
    bare = graph.clone()
    for node in bare.graph:
        for key in (PHASE_KEY, MODULE_KEY):
            node.metadata_props.pop(key, None)
    written = find_roles(graph, program_problem(graph)[1]).phases
    assert find_roles(bare, program_problem(bare)[1]).phases == written
    assert set(written) == {"forward", "backward", "optimizer"}


def test_copies_of_an_earlier_plan_stay_recomputed(blocks) -> None:
    graph = blocks(64).clone()
    plan = plan_program(graph, "60%", seconds=2)
    counts = recomputed_operators(plan.problem, plan.sequence)
    assert sum(counts.values()) == plan.recomputed > 0
    apply_sequence(graph.graph, plan.problem, plan.sequence, "select-recompute")
    again = plan_program(graph)
    assert again.recomputed == 0 and again.before.peak == plan.after.peak
    assert recomputed_operators(again.problem, again.sequence) == counts
    picture = timeline(find_roles(graph, again.problem), again.sequence)
    assert picture.bands["recomputed"].any()


def test_footprint_is_what_the_session_holds(blocks, captured_blocks) -> None:
    graph = blocks(64, AdamW(lr=1e-2))
    fixed = footprint(graph)
    session = ortgraph.TrainingSession(graph, threads=1)
    assert (
        fixed.parameters
        == session.parameter_bytes
        == sum(graph.values[p.name].nbytes for p in graph.signature.parameters)
    )
    assert fixed.states == session.state_bytes
    assert fixed.batch == 64 * 16 * 4 + sum(4 for _ in graph.signature.scalars) + 4 * (
        graph.signature.loss_gradient is not None
    )
    assert fixed.total == fixed.parameters + fixed.states + fixed.batch + fixed.constants
    with pytest.raises(ortgraph.errors.PlanError, match="no static size"):
        footprint(captured_blocks)


def test_replan_agrees_with_planning_from_scratch(blocks) -> None:
    graph = blocks(64)
    once = plan_program(graph, "70%", seconds=5)
    twice = replan(replan(plan_program(graph), "60%"), "70%")
    assert twice.sequence == once.sequence and twice.budget == once.budget
    assert replan(once, "100%").sequence == tuple(range(len(once.problem.nodes)))
