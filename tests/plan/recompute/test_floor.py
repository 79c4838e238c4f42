"""The memory floor is below every sequence, and tight where one operation sets it."""

from __future__ import annotations

import pytest

from ortgraph.plan.operations import Operation, OperationGraph, PlanValue
from ortgraph.plan.recompute import memory_floor
from ortgraph.plan.recompute.native import Effort, compiled
from ortgraph.plan.simulate import simulate


@pytest.mark.parametrize("seed", range(60))
def test_no_sequence_is_below(seed, random_graph) -> None:
    graph = random_graph(seed, size=10)
    floor = memory_floor(graph).bytes
    assert simulate(graph, graph.given_order()).peak >= floor
    native = compiled(graph)
    if native is not None:
        steps = native.anneal(list(graph.given_order()), floor, True, Effort(5000, 2.0, 0.1, seed, 60.0)).steps
        assert simulate(graph, steps).peak >= floor


def chain(*sizes: int, once: tuple[int, ...] = (), kept: tuple[int, ...] = (), inplace: bool = False) -> OperationGraph:
    pairs = [((i - 1, i),) if inplace and i and sizes[i] == sizes[i - 1] else () for i in range(len(sizes))]
    return OperationGraph(
        tuple(
            Operation(f"o{i}", 1.0, (i - 1,) if i else (), (i,), i not in once, 0, pairs[i]) for i in range(len(sizes))
        ),
        tuple(PlanValue(f"v{i}", size, i in kept) for i, size in enumerate(sizes)),
    )


def test_inputs_and_results() -> None:
    floor = memory_floor(chain(1, 5, 7, 2))
    assert floor.bytes == 12 and floor.operations == (2,)


def test_in_place_results_count_once() -> None:
    assert memory_floor(chain(5, 5, 2, inplace=True)).bytes == 7
    assert memory_floor(chain(5, 5, 2)).bytes == 10


def test_kept_values_live_together_at_the_end() -> None:
    floor = memory_floor(chain(5, 1, 5, 1, 5, kept=(0, 2, 4)))
    assert floor.bytes == 15 and floor.operations == ()


def test_what_cannot_be_repeated_lives_beside() -> None:
    """v0 is kept and made once: it lies beside o2, which reads v1 and makes v2."""
    assert memory_floor(chain(4, 5, 7, once=(0,), kept=(0,))).bytes == 16
    assert memory_floor(chain(4, 5, 7, kept=(0,))).bytes == 12


def test_in_place_over_a_value_that_must_stay() -> None:
    assert memory_floor(chain(5, 5, 1, once=(0,), kept=(0,), inplace=True)).bytes == 11
