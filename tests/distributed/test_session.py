"""The optimizer in the graph over two processes, against one process on the joint batch; failures stop both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ortgraph
from ortgraph.distributed import Group
from ortgraph.distributed.buckets import MOST_BUCKETS, Buckets
from ortgraph.distributed.session import DistributedSession
from ortgraph.errors import InputError

MODULE = "session_ranks"


@pytest.fixture(scope="module")
def ranks(launch: Any) -> Any:
    printed = launch.ranks("session_ranks.py")
    assert launch.codes == [0, 7], "\n".join(printed)[-6000:]
    return launch.results()


@pytest.fixture(scope="module")
def scenario() -> Any:
    """The module that the ranks ran."""
    import importlib.util
    import pathlib

    path = pathlib.Path(__file__).with_name("session_ranks.py")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def one(scenario: Any, **options: Any) -> Any:
    adam = ortgraph.optim.AdamW(lr=1e-2, max_grad_norm=0.05, no_decay=("*.bias",))
    result = ortgraph.optimize(scenario.captured(2 * scenario.ROWS), "O2", optimizer=adam, **options)
    return ortgraph.TrainingSession(result.graph, threads=1)


def test_losses_updates_and_states_are_those_of_the_joint_batch(ranks: Any, scenario: Any) -> None:
    expected = scenario.trained(one(scenario), scenario.batch)
    assert ranks[0]["buckets"] > 1
    same(ranks[0]["equal parts"], expected)
    for name, value in ranks[0]["equal parts"].items():
        np.testing.assert_array_equal(ranks[1]["equal parts"][name], value, err_msg=name)


def test_sums_leave_while_gradients_are_computed_and_change_nothing(ranks: Any) -> None:
    for rank in ranks:
        for name, value in rank["without overlap"].items():
            np.testing.assert_array_equal(rank["equal parts"][name], value, err_msg=name)
        early = sum(rank["finished"], [])
        assert early == list(range(len(early))) and len(rank["finished"]) > 2 and not rank["finished"][-1]
        assert len(early) < rank["buckets"]  # the last one leaves at the end


def test_parts_with_different_numbers_of_labels(ranks: Any, scenario: Any) -> None:
    same(ranks[0]["items"], scenario.trained(one(scenario), lambda i: scenario.batch(i, ignored=True)))


def test_accumulation(ranks: Any, scenario: Any) -> None:
    expected = scenario.trained(one(scenario), scenario.batch)
    del expected["losses"]
    same(ranks[0]["accumulated"], expected)


def test_an_overflow_of_one_process_is_skipped_by_all(ranks: Any) -> None:
    for rank in ranks:
        assert rank["skipped"] == (1, 32768.0)
        assert rank["kept"]
    assert ranks[0]["key"] != ranks[1]["key"]  # other dropout masks for other rows


def test_checkpoints_resume(ranks: Any) -> None:
    for rank in ranks:
        assert rank["resumed"] == rank["straight"]
    rows = ranks[0]["report"].splitlines()
    assert len(rows) == 3 and rows == ranks[1]["report"].splitlines()


def test_a_process_that_fails_stops_all_with_its_error(ranks: Any) -> None:
    first, second = ranks
    assert second["failed step"].startswith("BatchError: ") and "ids" in second["failed step"]
    assert first["failed step"].startswith("DistributedError: rank 1 stopped in a step: BatchError")
    assert first["unchanged"] and second["unchanged"]
    assert second["failed between sums"].startswith("BatchError: program backward stopped: rank 1 cannot go on")
    assert first["failed between sums"].startswith("DistributedError: rank 1 stopped in a step: BatchError")
    assert first["unchanged between sums"] and second["unchanged between sums"]
    assert "rank 1 cannot be traced" in second["failed capture"]
    assert first["failed capture"].startswith("DistributedError: rank 1 stopped in capture: ")
    assert "rank 1 cannot be traced" in first["failed capture"]
    assert first["gone"].startswith("DistributedError: rank 0, a step: another process is gone")


def test_what_differs_is_said(ranks: Any) -> None:
    assert "processes disagree on the learning rate: [0.1" in ranks[0]["another rate"]


def test_values_that_differ_after_loading(ranks: Any) -> None:
    for rank in ranks:
        assert "rank 1 differs from rank 0 in its parameters and states" in rank["other values"]


def test_buckets_are_few_and_start_small() -> None:
    """Their number is bounded whatever the size of a module."""
    kind = np.dtype(np.float32)
    small = Buckets({f"p{i}": (kind, (1 << 18,)) for i in range(30)})  # 1 MiB each
    assert [len(n) for n in small.names] == [1, 8, 8, 8, 5]
    assert sum(small.names, []) == [f"p{i}" for i in range(30)]
    many = Buckets({f"p{i}": (kind, (1 << 18,)) for i in range(256)})
    assert len(many.flat) <= MOST_BUCKETS + 1 and many.nbytes == 256 << 20


def test_a_compiled_session_has_its_parameters_once(scenario: Any) -> None:
    adam = ortgraph.optim.AdamW(lr=1e-2)
    session = ortgraph.distributed.compile(scenario.Net(), scenario.batch(0), adam, Group(), threads=1)
    session.step(scenario.batch(0))
    trained = session.trained_graph()
    for name, value in session.state_dict().items():
        source = session.parameter_inputs()[name]
        assert session.graph.values[source] is session.buffer(source)
        np.testing.assert_array_equal(trained.values[source], value)
        assert not np.shares_memory(trained.values[source], session.buffer(source))


def test_one_process_alone(scenario: Any, tmp_path: Any) -> None:
    """A group of one: the two programs do what the one program of a step does; a plain session refuses the graph."""
    adam = ortgraph.optim.AdamW(lr=1e-2, max_grad_norm=0.05, no_decay=("*.bias",))
    graph = ortgraph.optimize(scenario.captured(2 * scenario.ROWS), "O2", optimizer=adam, distributed=True).graph
    session = DistributedSession(graph, Group(), threads=1)
    plain = one(scenario)
    same(scenario.trained(session, scenario.batch), scenario.trained(plain, scenario.batch))
    assert [p.name for p in session.programs] == ["backward", "update"]
    assert not any(p.placement.copies for p in session.programs)  # gradients are written into the buckets
    for source, target in ((session, plain), (plain, session)):  # each reads the other's checkpoints
        target.load_checkpoint(source.save_checkpoint(tmp_path / type(source).__name__))
        same(state := scenario.state(target), scenario.state(source))
        assert state["step"] == scenario.STEPS
    with pytest.raises(InputError, match="DistributedSession"):
        ortgraph.TrainingSession(graph).step(scenario.batch(0))
    with pytest.raises(InputError, match="distributed=True"):
        DistributedSession(one(scenario).graph, Group())
