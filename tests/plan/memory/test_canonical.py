"""solve_canonical: what it finds is valid, what it refuses is impossible, by brute force and by CP-SAT."""

from __future__ import annotations

import random
import threading
import time

import pytest

from ortgraph.plan.memory import Buffer, MemoryProblem, Outcome, solve_canonical, validate
from ortgraph.plan.memory.arrays import compiled

pytestmark = pytest.mark.skipif(compiled() is None, reason="no C++ compiler")


def full_load(seed: int, count: int) -> MemoryProblem:
    """Buffers that fill every step exactly; those that end are replaced by others of the same sum, wherever they lay."""
    rng = random.Random(seed)
    alignment = rng.choice([1, 1, 64])
    free = rng.choice([4, 6, 9, 14])
    done: list[tuple[int, int, int]] = []
    live: list[tuple[int, int]] = []
    t = 0
    while len(done) + len(live) < count:
        while free:
            size = rng.randint(1, free)
            live.append((t, size))
            free -= size
        t += 1
        rng.shuffle(live)
        for _ in range(rng.randint(1, max(1, len(live) // 2))):
            lower, size = live.pop()
            done.append((lower, t, size))
            free += size
    done += [(lower, t, size) for lower, size in live]
    less = 3 if alignment > 1 else 0  # sizes that alignment rounds up
    buffers = [Buffer(f"b{i}", a, b, s * alignment - rng.randint(0, less)) for i, (a, b, s) in enumerate(done)]
    return MemoryProblem((*buffers, Buffer("empty", 0, t, 0)), alignment)


def brute_force(problem: MemoryProblem) -> int:
    """The optimum: some order of placing, each on top of what lies below it, gives it."""
    sizes = {b: problem.aligned(b) for b in problem.buffers if b.size}
    best = sum(sizes.values())

    def place(placed: list[tuple[Buffer, int]], top: int) -> None:
        nonlocal best
        if top >= best:
            return
        left = [b for b in sizes if all(b is not c for c, _ in placed)]
        if not left:
            best = top
        for b in left:
            under = [end for c, end in placed if c.lower < b.upper and b.lower < c.upper]
            end = max(under, default=0) + sizes[b]
            place([*placed, (b, end)], max(top, end))

    place([], 0)
    return best


# Load 6 at every step, but no placement below 7.
IMPERFECT = MemoryProblem(
    tuple(
        Buffer(f"b{i}", *row)
        for i, row in enumerate(
            [(0, 1, 3), (0, 2, 3), (1, 3, 1), (2, 3, 2), (1, 4, 1), (2, 4, 1), (1, 5, 1), (3, 5, 3), (4, 5, 2)]
        )
    ),
    alignment=1,
)


def check_optimum(problem: MemoryProblem, optimum: int) -> None:
    found = solve_canonical(problem, optimum)
    assert found.outcome is Outcome.FOUND and found.solution is not None
    validate(problem, found.solution)
    assert found.solution.arena_bytes == optimum
    assert solve_canonical(problem, optimum - 1).outcome is Outcome.INFEASIBLE


@pytest.mark.parametrize("seed", range(60))
def test_optimum_of_small_problems(seed: int) -> None:
    problem = full_load(seed, 4 + seed % 3)
    check_optimum(problem, brute_force(problem))


def test_optimum_above_the_max_load() -> None:
    assert IMPERFECT.max_load() == 6 and brute_force(IMPERFECT) == 7
    check_optimum(IMPERFECT, 7)
    scaled = tuple(Buffer(b.name, 10 * b.lower, 10 * b.upper, 64 * b.size - 3) for b in IMPERFECT.buffers)
    check_optimum(MemoryProblem(scaled), 7 * 64)
    # A buffer that lives all along, and one alone in time, change nothing.
    more = (*IMPERFECT.buffers, Buffer("all", 0, 5, 10), Buffer("alone", 5, 6, 16), Buffer("empty", 2, 4, 0))
    check_optimum(MemoryProblem(more, alignment=1), 17)


def test_agrees_with_constraint_solver() -> None:
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    outcomes = set()
    for seed in range(25):
        problem = IMPERFECT if seed == 0 else full_load(1000 + seed, 8 + seed % 5)
        capacity = problem.max_load()
        ours = solve_canonical(problem, capacity).outcome
        model = cp_model.CpModel()
        times, places = [], []
        for b in problem.buffers:
            size = problem.aligned(b)
            if size:
                offset = model.new_int_var(0, (capacity - size) // problem.alignment, "")
                times.append(model.new_fixed_size_interval_var(b.lower, b.upper - b.lower, ""))
                places.append(model.new_fixed_size_interval_var(offset, size // problem.alignment, ""))
        model.add_no_overlap_2d(times, places)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        theirs = solver.status_name(solver.solve(model))
        assert theirs == ("INFEASIBLE" if ours is Outcome.INFEASIBLE else "OPTIMAL"), seed
        outcomes.add(ours)
    assert outcomes == {Outcome.FOUND, Outcome.INFEASIBLE}


def test_a_limit_is_not_a_proof(cut_rectangle) -> None:
    problem = cut_rectangle(1, 500, steps=200)
    start = time.process_time()
    answer = solve_canonical(problem, problem.max_load(), seconds=0.2)
    assert time.process_time() - start < 1.0
    assert answer.outcome is not Outcome.INFEASIBLE
    few = solve_canonical(problem, problem.max_load(), max_nodes=50)
    assert few.nodes <= 50 and few.outcome is not Outcome.INFEASIBLE


def test_capacity_below_the_load() -> None:
    problem = MemoryProblem((Buffer("a", 0, 2, 64), Buffer("b", 1, 3, 64)))
    assert solve_canonical(problem, 127).outcome is Outcome.INFEASIBLE
    assert solve_canonical(problem, 128).outcome is Outcome.FOUND


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (64,), (1 << 40, 3 << 40)])
def test_degenerate(sizes: tuple[int, ...]) -> None:
    problem = MemoryProblem(tuple(Buffer(f"b{i}", 0, 1, s) for i, s in enumerate(sizes)))
    answer = solve_canonical(problem, sum(sizes))
    assert answer.outcome is Outcome.FOUND and answer.solution is not None
    validate(problem, answer.solution)
    assert answer.solution.arena_bytes == sum(sizes)


def test_same_answer_twice() -> None:
    problem = full_load(77, 40)
    a, b = (solve_canonical(problem, problem.max_load() + 2 * problem.alignment, max_nodes=20000) for _ in range(2))
    assert (a.outcome, a.nodes) == (b.outcome, b.nodes)
    assert (a.solution and a.solution.offsets) == (b.solution and b.solution.offsets)


def test_deep_search_in_a_thread_with_a_small_stack() -> None:
    rows = [(i, i + 40, 1 + i % 7) for i in range(1500)]  # no step cuts this, so that the search goes 1,500 levels deep
    problem = MemoryProblem(tuple(Buffer(f"b{i}", *row) for i, row in enumerate(rows)), alignment=1)
    answers = []
    size = threading.stack_size(256 * 1024)
    thread = threading.Thread(target=lambda: answers.append(solve_canonical(problem, 3 * problem.max_load())))
    try:
        thread.start()
    finally:
        threading.stack_size(size)
    thread.join()
    assert answers[0].outcome is Outcome.FOUND and answers[0].nodes > 1000
