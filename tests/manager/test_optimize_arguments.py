"""What is easily mistaken for the arguments of optimize is refused by name."""

from __future__ import annotations

import pytest

import ortgraph
from ortgraph.errors import InputError
from ortgraph.graph import Signature, TrainingGraph


class SGD:
    """Stands for an optimizer of another package."""


@pytest.mark.parametrize(
    ("pipeline", "optimizer", "message"),
    [
        (2, None, r"pipeline is 2\n.*O0 to O3"),
        ("-O2", None, r"pipeline is '-O2'\n.*O0 to O3"),
        ("O2", SGD(), r"optimizer is a .*SGD\n.*ortgraph\.optim\.AdamW"),
    ],
)
def test_refused(pipeline, optimizer, message):
    graph = TrainingGraph.__new__(TrainingGraph)
    with pytest.raises(InputError, match=message):
        ortgraph.optimize(graph, pipeline, optimizer=optimizer)


def test_a_path_is_no_graph():
    with pytest.raises(InputError, match=r"not str\n.*ortgraph\.load\(path\)"):
        ortgraph.optimize("train.onnx")


def test_names_are_listed():
    assert {"TrainingSession", "optimize", "from_onnx", "compile", "optim"} <= set(dir(ortgraph))
    assert Signature.__name__ in dir(ortgraph)
