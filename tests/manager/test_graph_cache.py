"""Graphs on disk: hits, keys, damage, bounds, and processes that compile at once."""

from __future__ import annotations

import multiprocessing
import pathlib
import time

import onnx_ir as ir
import pytest

from ortgraph.graph import Signature, TrainingGraph
from ortgraph.graph.edit import MODULE_KEY, SOURCE_KEY
from ortgraph.manager import graph_cache


@pytest.fixture
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setattr(graph_cache, "folder", lambda: tmp_path / "graphs")  # kernels stay where they are
    return tmp_path / "graphs"


def doubling(factor: float = 2.0, source: str = "a.py:1", module: str = "m") -> TrainingGraph:
    """y = factor x."""
    x = ir.Value(name="x", shape=ir.Shape([3]), type=ir.TensorType(ir.DataType.FLOAT))
    constant = ir.node("Constant", [], {"value": ir.tensor([factor], ir.DataType.FLOAT)}, name="c")
    node = ir.node("Mul", [x, constant.outputs[0]], name="n")
    node.metadata_props.update({SOURCE_KEY: source, MODULE_KEY: module})
    constant.outputs[0].name, node.outputs[0].name = "factor", "y"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([3])
    graph = ir.Graph([x], node.outputs, nodes=[constant, node], opset_imports={"": 18}, name="g")
    return TrainingGraph(ir.Model(graph, ir_version=10), Signature(loss="y", inputs=("x",)))


class Counting:
    def __init__(self, graph: TrainingGraph) -> None:
        self.graph, self.calls = graph, 0

    def __call__(self) -> TrainingGraph:
        self.calls += 1
        return self.graph.clone()


def test_made_once(cache):
    graph = doubling()
    make = Counting(graph)
    first, second = (graph_cache.cached(graph, ("O2",), make) for _ in range(2))
    assert make.calls == 1 and first.text() == second.text() and second.signature == graph.signature
    assert len(graph_cache.entries()) == 1
    assert graph_cache.clear() == 1 and graph_cache.entries() == []
    graph_cache.cached(graph, ("O2",), make)
    assert make.calls == 2


def test_what_changes_the_key(cache):
    key = graph_cache.key_of(doubling(), ("O2",))
    assert key == graph_cache.key_of(doubling(), ("O2",))
    assert key == graph_cache.key_of(doubling(source="b.py:9"), ("O2",))
    others = [
        graph_cache.key_of(doubling(3.0), ("O2",)),
        graph_cache.key_of(doubling(), ("O1",)),
        graph_cache.key_of(doubling(), ("O", "2")),
        graph_cache.key_of(doubling(module="other"), ("O2",)),
    ]
    assert len({key, *others}) == 5


def test_options_that_are_code_are_not_kept():
    assert graph_cache.text_of("O2", None, {"a": ["b", 1]}) is not None
    assert graph_cache.text_of("O2", lambda: None) is None
    assert graph_cache.text_of({"optimized": [object()]}) is None


@pytest.mark.parametrize("damage", [b"", b"nonsense", "half", "bit"])
def test_damaged_files_are_made_again(cache, damage):
    graph = doubling()
    make = Counting(graph)
    graph_cache.cached(graph, (), make)
    ((path, _),) = graph_cache.entries()
    content = path.read_bytes()
    if damage == "half":
        damage = content[: len(content) // 2]
    elif damage == "bit":
        damage = content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes(damage)
    assert graph_cache.cached(graph, (), make).text() == graph.text() and make.calls == 2
    assert path.read_bytes() == content


def test_old_graphs_go_first(cache, monkeypatch):
    graph = doubling()
    graph_cache.cached(graph, ("0",), Counting(graph))
    ((first, size),) = graph_cache.entries()
    monkeypatch.setattr(graph_cache, "_MAX_BYTES", 3 * size)
    for i in range(1, 4):
        time.sleep(0.02)
        graph_cache.cached(graph, (str(i),), Counting(graph))
        if i == 2:
            time.sleep(0.02)
            make = Counting(graph)
            graph_cache.cached(graph, ("0",), make)  # read: now the latest but one
            assert not make.calls
    kept = [path for path, _ in graph_cache.entries()]
    assert len(kept) == 3 and first in kept


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(graph_cache, "folder", lambda: tmp_path / "file" / "graphs")
    make = Counting(doubling())
    assert graph_cache.cached(make.graph, (), make).text() == make.graph.text() and make.calls == 1


def _compile(seen) -> None:
    graph = doubling()

    def make() -> TrainingGraph:
        with seen.get_lock():
            seen.value += 1
        time.sleep(0.3)
        return graph.clone()

    assert graph_cache.cached(graph, (), make).text() == graph.text()


def test_processes_that_start_together_compile_once(cache):
    graph_cache.key_of(doubling(), ())  # what the key needs is there before the race
    context = multiprocessing.get_context("fork")
    seen = context.Value("i", 0)
    ranks = [context.Process(target=_compile, args=(seen,)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0] and seen.value == 1
