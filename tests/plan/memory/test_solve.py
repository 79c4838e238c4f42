"""The any-time solver: valid, never worse than greedy, optimal on packings known to be perfect, in time."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgraph.plan.memory import Buffer, MemoryProblem, solve, solve_best_fit, solve_by_size, validate
from ortgraph.plan.memory import best_fit as best_fit_module
from ortgraph.plan.memory.arrays import Arrays, compiled

needs_compiler = pytest.mark.skipif(compiled() is None, reason="no C++ compiler")


def training(layers: int, seed: int) -> MemoryProblem:
    """Saved activations between a forward and a backward chain, temporaries, gradients; sizes without a common unit."""
    rng = random.Random(seed)
    end, rows = 6 * layers, []
    for layer in range(layers):
        t, back, size = 3 * layer, end - 3 * layer - 1, rng.randint(1 << 10, 1 << 20)
        rows += [(t, back, size)]
        rows += [(t, t + rng.randint(1, 6), int(size * rng.choice([0.25, 1, 2, 4]))) for _ in range(rng.randint(1, 4))]
        rows += [(back - 2, back + rng.randint(0, 6), int(size * rng.choice([0.3, 1, 2]))) for _ in range(3)]
    return MemoryProblem(tuple(Buffer(f"b{i}", a, b, s) for i, (a, b, s) in enumerate(rows)), alignment=1)


items = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(0, 1000)), max_size=30)


@given(items, st.sampled_from([1, 64]))
@settings(max_examples=80, deadline=None)
def test_valid_and_not_worse_than_greedy(rows, alignment) -> None:
    problem = MemoryProblem(tuple(Buffer(f"b{i}", a, a + n, s) for i, (a, n, s) in enumerate(rows)), alignment)
    solution = solve(problem, seconds=5.0, max_rounds=2)
    validate(problem, solution)
    assert solution.arena_bytes <= solve_best_fit(problem).arena_bytes <= solve_by_size(problem).arena_bytes
    assert problem.max_load() <= solution.bound <= solution.arena_bytes


@needs_compiler
@pytest.mark.parametrize("seed", range(4))
def test_cut_rectangles_are_put_together(seed: int, cut_rectangle) -> None:
    problem = cut_rectangle(seed, 60)
    solution = solve(problem, seconds=20.0)
    validate(problem, solution)
    assert solution.arena_bytes == 512 * 64 and solution.gap == 0.0


@needs_compiler
def test_training_graph_meets_its_bound() -> None:
    problem = training(300, 3)
    assert solve_best_fit(problem).gap > 0.0
    solution = solve(problem, seconds=20.0)
    validate(problem, solution)
    assert solution.gap <= 0.0005


@needs_compiler
def test_bound_is_raised_where_the_max_load_is_impossible() -> None:
    rows = [(0, 1, 3), (0, 2, 3), (1, 3, 1), (2, 3, 2), (1, 4, 1), (2, 4, 1), (1, 5, 1), (3, 5, 3), (4, 5, 2)]
    problem = MemoryProblem(tuple(Buffer(f"b{i}", a, b, s) for i, (a, b, s) in enumerate(rows)), alignment=1)
    solution = solve(problem, seconds=5.0)
    validate(problem, solution)
    assert problem.max_load() == 6 and solution.arena_bytes == solution.bound == 7


@needs_compiler
def test_stops_at_the_capacity(cut_rectangle) -> None:
    problem = cut_rectangle(11, 150)
    greedy = solve_best_fit(problem).arena_bytes
    capacity = (greedy + problem.max_load()) // 2
    start = time.process_time()
    solution = solve(problem, seconds=30.0, capacity=capacity)
    assert solution.arena_bytes <= capacity and time.process_time() - start < 25.0
    assert solve(problem, seconds=30.0, capacity=greedy).nodes == 0


@pytest.mark.parametrize("count", [150, 3000])
def test_deadline(count: int) -> None:
    rng = random.Random(count)
    rows = [(rng.randrange(count // 3), rng.randrange(1, 40), rng.randrange(1, 1 << 16)) for _ in range(count)]
    problem = MemoryProblem(tuple(Buffer(f"b{i}", a, a + n, s) for i, (a, n, s) in enumerate(rows)), alignment=1)
    start = time.process_time()
    solution = solve(problem, seconds=0.5)
    assert time.process_time() - start < 0.5 + 0.5
    validate(problem, solution)


def test_same_effort_same_result(cut_rectangle) -> None:
    problem = cut_rectangle(3, 120)
    shuffled = MemoryProblem(problem.buffers[::-1], problem.alignment)
    a, b = (solve(p, seconds=60.0, max_rounds=2) for p in (problem, shuffled))
    assert dict(a.offsets) == dict(b.offsets) and a.nodes == b.nodes


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, cut_rectangle) -> None:
    monkeypatch.setattr(best_fit_module, "compiled", lambda: None)
    problem = cut_rectangle(3, 120)
    plain = solve_best_fit(problem)
    validate(problem, plain)
    monkeypatch.undo()
    assert dict(plain.offsets) == dict(solve_best_fit(problem).offsets)


def test_peaks() -> None:
    problem = training(40, 2)
    arrays = Arrays.of(problem)
    by_name = {b.name: b for b in problem.buffers}
    load = [sum(b.size for b in problem.buffers if b.lower <= t < b.upper) for t in range(300)]
    expected = [max(load[by_name[n].lower : by_name[n].upper]) for n in arrays.names]
    assert (arrays.peaks() * arrays.unit).tolist() == expected


@needs_compiler
def test_sixty_thousand_buffers() -> None:
    rng = random.Random(7)
    rows = [(t, min(t + int(rng.paretovariate(0.8)), 60_000), rng.choice([57, 4096, 65536])) for t in range(59_999)]
    problem = MemoryProblem(tuple(Buffer(str(i), a, b, s) for i, (a, b, s) in enumerate(rows)), alignment=1)
    start = time.process_time()
    solution = solve_best_fit(problem)
    middle = time.process_time()
    validate(problem, solution)
    assert middle - start < 8.0 and time.process_time() - middle < 4.0
    assert solution.gap < 0.2
