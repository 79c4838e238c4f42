"""The largest batch: it fits, the next one does not, and the graph that comes with it runs in that memory."""

from __future__ import annotations

import sys

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.errors import InputError, PlanError
from ortgraph.optim import AdamW
from ortgraph.plan.footprint import footprint
from ortgraph.plan.largest_batch import BatchFit, largest_batch, memory_bytes
from ortgraph.plan.program_plan import plan_program
from ortgraph.plan.ready import free_dimensions, ready_graph

MEMORY = 400_000  # a few dozen rows


@pytest.fixture(scope="module")
def free(captured_blocks):
    """With recomputation, without a limit on its time."""
    return largest_batch(captured_blocks, MEMORY, optimizer=AdamW(lr=1e-2), seconds=0.2)


def needed(graph) -> int:
    plan = plan_program(graph)
    return footprint(graph).total + plan.arena.arena_bytes + plan.scratch_bytes


def test_it_fits_and_the_next_does_not(captured_blocks, free) -> None:
    fit = free.fit
    assert fit.needed <= free.memory == MEMORY
    assert fit.needed == footprint(fit.graph).total + fit.plan.arena.arena_bytes + fit.plan.scratch_bytes
    assert fit.plan.recomputed > 0
    assert free.next.size == fit.size + 1 and free.next.plan is None and free.next.reason
    assert set(free.tried) >= {1, 2, fit.size, fit.size + 1} and len(free.tried) == len(set(free.tried)) <= 40


def test_without_recomputation_it_is_exact(captured_blocks) -> None:
    found = largest_batch(
        captured_blocks, MEMORY, optimizer=AdamW(lr=1e-2), max_overhead=0.0, reorder=False, seconds=0.2
    )
    assert found.fit.plan.after.overhead == 0
    sizes = (found.fit.size, found.fit.size + 1)
    within = [needed(ready_graph(captured_blocks, {"batch": n}, optimizer=AdamW(lr=1e-2))) <= MEMORY for n in sizes]
    assert within == [True, False]


def test_a_size_that_fails_by_chance_does_not_end_the_search(captured_blocks, monkeypatch) -> None:
    """Sizes 41 to 43 find no plan though 44 to 60 do; from 61 on the floor is above the memory."""
    module = sys.modules["ortgraph.plan.largest_batch"]
    monkeypatch.setattr(module, "ready_graph", lambda graph, sizes, *rest: sizes["batch"])

    def fit(size, asked, limit, *rest):
        least = 10 * size
        plan = object() if least <= 600 and size not in (41, 42, 43) else None
        return BatchFit(size, None, least, least, plan, None, "" if plan else "no plan")

    monkeypatch.setattr(module, "_fit", fit)
    found = largest_batch(captured_blocks, 600)
    assert (found.fit.size, found.next.size) == (60, 61)
    assert largest_batch(captured_blocks, 600, largest=60).next is None
    assert largest_batch(captured_blocks, 600, largest=40).fit.size == 40


@pytest.mark.slow
def test_more_time_allows_a_larger_batch(captured_blocks, free) -> None:
    capped = largest_batch(captured_blocks, MEMORY, optimizer=AdamW(lr=1e-2), max_overhead=0.05, seconds=0.2)
    none = largest_batch(captured_blocks, MEMORY, optimizer=AdamW(lr=1e-2), max_overhead=0.0, seconds=0.2)
    assert none.fit.size <= capped.fit.size <= free.fit.size and none.fit.size < free.fit.size
    assert capped.fit.plan.after.overhead <= 0.05
    assert "more predicted time, over the 5.0% allowed" in capped.next.reason


def test_the_session_runs_it_in_that_arena(captured_blocks, free) -> None:
    size, plan = free.fit.size * 9 // 10, free.fit.plan  # another search at the very limit may fail by chance
    result = ortgraph.optimize(
        captured_blocks, "O2", optimizer=AdamW(lr=1e-2), shapes={"batch": size}, memory_budget=plan.budget
    )
    session = ortgraph.TrainingSession(result.graph, threads=1)
    assert np.isfinite(session.step({"x": np.ones((size, 16), np.float32)}))
    assert session.arena_bytes <= plan.budget
    assert session.arena_bytes + footprint(result.graph).total <= MEMORY


def test_gradients_alone_and_the_end_of_the_search(captured_blocks) -> None:
    found = largest_batch(captured_blocks, "1GB", largest=16, seconds=0.2)
    assert found.fit.size == 16 and found.next is None and found.fit.plan.program == "gradients"
    assert found.tried == (1, 2, 16)


def test_a_lowered_graph_with_a_symbolic_batch(captured_blocks) -> None:
    lowered = ortgraph.optimize(captured_blocks, "O2", optimizer=AdamW(lr=1e-2)).graph
    found = largest_batch(lowered, MEMORY, max_overhead=0.0, reorder=False, seconds=0.2)
    assert found.fit.plan.program == "step" and found.next.plan is None
    sizes = (found.fit.size, found.fit.size + 1)
    assert [needed(ready_graph(lowered, {"batch": n})) <= MEMORY for n in sizes] == [True, False]


def test_too_little_memory_says_what_takes_it(captured_blocks) -> None:
    with pytest.raises(PlanError, match=r"batch=1 does not fit into 20.00 kB.* parameters of"):
        largest_batch(captured_blocks, "20kB", optimizer=AdamW(lr=1e-2))


@pytest.mark.parametrize("options", [{"dim": "batches"}, {"sizes": {"batch": 4}}])
def test_the_dimension_must_be_free(captured_blocks, options) -> None:
    with pytest.raises(InputError, match="no symbolic dimension"):
        largest_batch(captured_blocks, MEMORY, **options)


def test_other_dimensions_need_sizes(classifier_graph) -> None:
    graph = classifier_graph("batch", 3)
    for value in graph.graph.inputs[:1]:
        value.shape = ortgraph.graph.training_graph.ir.Shape(["batch", "length"])
    with pytest.raises(InputError, match="length is symbolic"):
        largest_batch(graph, MEMORY)


@pytest.mark.parametrize("memory", ["50%", "0", "lots", "-4GB", ""])
def test_memory_is_bytes(memory) -> None:
    with pytest.raises(InputError, match="memory"):
        memory_bytes(memory)


def test_memory_forms() -> None:
    assert memory_bytes("4GB") == 4 * 10**9 and memory_bytes("2MiB") == 2 << 20 and memory_bytes(123) == 123


def test_a_derived_dimension_asks_for_the_name_in_it(captured_blocks) -> None:
    graph = captured_blocks.clone()
    for value in graph.graph.inputs:
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape(
                [ir.SymbolicDim("4*batch") if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
            )
    assert free_dimensions(graph) == ["batch"]
