"""solve_best_fit against the independent validator, its bound, and a brute-force optimum on tiny problems."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgraph.errors import PlanError
from ortgraph.plan.memory import Buffer, MemoryProblem, MemorySolution, solve_best_fit, validate

buffers = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 1000)), max_size=40)


def problem_of(items) -> MemoryProblem:
    return MemoryProblem(tuple(Buffer(f"b{i}", low, low + n, size) for i, (low, n, size) in enumerate(items)))


def overlaps(problem: MemoryProblem, offsets) -> bool:
    """Every pair of buffers, step by step: slow and plain, unlike the validator."""
    for a, b in itertools.combinations(problem.buffers, 2):
        live_together = set(range(a.lower, a.upper)) & set(range(b.lower, b.upper))
        bytes_a = range(offsets[a.name], offsets[a.name] + a.size)
        bytes_b = range(offsets[b.name], offsets[b.name] + b.size)
        if live_together and max(bytes_a.start, bytes_b.start) < min(bytes_a.stop, bytes_b.stop) and a.size and b.size:
            return True
    return False


@given(buffers)
@settings(max_examples=150, deadline=None)
def test_no_two_live_buffers_overlap(items) -> None:
    problem = problem_of(items)
    solution = solve_best_fit(problem)
    validate(problem, solution)
    assert not overlaps(problem, solution.offsets)
    assert solution.arena_bytes >= solution.bound == problem.max_load()


@given(buffers.filter(len), st.data())
@settings(max_examples=150, deadline=None)
def test_validator_agrees_with_pairwise_check(items, data) -> None:
    problem = problem_of(items)
    arena = 64 * 64
    offsets = {b.name: 64 * data.draw(st.integers(0, 40)) for b in problem.buffers}
    solution = MemorySolution(offsets, max(arena, problem.max_load()), problem.max_load(), "random", 0.0)
    if not overlaps(problem, offsets):
        validate(problem, solution)
        return
    with pytest.raises(PlanError, match="overlap"):
        validate(problem, solution)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.sampled_from([64, 128, 192])), min_size=1, max_size=4)
)
@settings(max_examples=40, deadline=None)
def test_close_to_optimum_on_tiny_problems(items) -> None:
    problem = problem_of(items)
    best = solve_best_fit(problem).arena_bytes
    places = range(0, sum(b.size for b in problem.buffers), 64)
    optimum = min(
        max(o + b.size for o, b in zip(combination, problem.buffers, strict=True))
        for combination in itertools.product(places, repeat=len(problem.buffers))
        if not overlaps(problem, {b.name: o for o, b in zip(combination, problem.buffers, strict=True)})
    )
    assert optimum <= best <= optimum * 1.34


def test_three_thousand_buffers_in_two_seconds() -> None:
    rng = random.Random(0)
    items = [(rng.randrange(3000), rng.randrange(1, 400), rng.randrange(1, 1 << 20)) for _ in range(3000)]
    start = time.process_time()
    solution = solve_best_fit(problem_of(items))
    assert time.process_time() - start < 2.0
    validate(problem_of(items), solution)
    assert solution.gap < 0.25


def test_empty_problem() -> None:
    solution = solve_best_fit(MemoryProblem(()))
    assert (solution.arena_bytes, solution.bound, solution.gap) == (0, 0, 0.0)


def test_result_does_not_depend_on_the_order_of_buffers() -> None:
    rng = random.Random(3)
    items = [Buffer(f"b{i}", i // 3, i // 3 + rng.randrange(1, 9), rng.choice([64, 128, 500])) for i in range(60)]
    shuffled = items[:]
    rng.shuffle(shuffled)
    a, b = (solve_best_fit(MemoryProblem(tuple(x))) for x in (items, shuffled))
    assert dict(a.offsets) == dict(b.offsets)


TWO = MemoryProblem((Buffer("a", 0, 2, 100), Buffer("b", 1, 3, 50)))


@pytest.mark.parametrize(
    ("offsets", "arena", "words"),
    [
        ({"a": 0, "b": 64}, 192, "overlap"),
        ({"a": 0, "b": 130}, 192, "multiple of 64"),
        ({"a": 0, "b": -64}, 192, "multiple of 64"),
        ({"a": 64, "b": 192}, 192, "outside the arena"),
        ({"a": 0}, 192, "same buffers"),
        ({"a": 0, "b": 128, "c": 0}, 192, "same buffers"),
        ({"a": 0, "b": 128}, 128, "below the max-load"),
    ],
)
def test_validator_refuses(offsets, arena, words) -> None:
    with pytest.raises(PlanError, match=words):
        validate(TWO, MemorySolution(offsets, arena, 192, "by hand", 0.0))


def test_validator_accepts_touching_buffers() -> None:
    problem = MemoryProblem((Buffer("a", 0, 2, 64), Buffer("b", 2, 3, 64), Buffer("c", 1, 3, 64)))
    validate(problem, MemorySolution({"a": 0, "b": 0, "c": 64}, 128, 128, "by hand", 0.0))


@pytest.mark.parametrize("bad", [Buffer("a", 2, 2, 1), Buffer("a", -1, 2, 1), Buffer("a", 0, 1, -1)])
def test_impossible_buffer(bad) -> None:
    with pytest.raises(PlanError, match="impossible"):
        MemoryProblem((bad,))


def test_names_are_unique() -> None:
    with pytest.raises(PlanError, match="twice"):
        MemoryProblem((Buffer("a", 0, 1, 1), Buffer("a", 0, 1, 1)))
