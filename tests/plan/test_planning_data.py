"""The instance reader: formats are recognized, and published figures come out of the conventions."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from bench.planning_data import allocation_files, data_folder, graph_files, read_allocation, read_graph
from ortgraph.errors import InputError
from ortgraph.plan.simulate import simulate

# Name: nodes, edges, given order's peak, sum of costs (published with the instances, and for the format of each).
PUBLISHED = {
    "rlg1-n100": (100, 236, 46_319, 47_769),
    "rlg2-n250": (250, 944, 146_840, 125_569),
    "fcn_8_vgg-train": (73, 149, 13_484_795_520, 10_275_337_746_048),
    "resnet50-train": (353, 751, 38_059_356_160, 405_670),
    "vgg16-train": (45, 87, 15_825_108_992, 15_500),
    "mobilenet-train": (185, 367, 34_701_056_000, 162_080),
}
# Name: buffers, max-load.
MAX_LOADS = {
    "A.1048576": (154, 1_048_576),
    "B.1048576": (170, 1_048_576),
    "C.1048576": (203, 1_039_360),
    "D.1048576": (213, 986_112),
    "E.1048576": (215, 1_048_576),
    "F.1048576": (296, 1_048_576),
}


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def checkmate_graph(nodes: list[tuple[int, int, int]], edges: list[tuple[int, int]]) -> str:
    return json.dumps(
        {
            "directed": True,
            "graph": {},
            "nodes": [{"id": k, "cost_cpu": c, "cost_ram": s, "backward": False} for k, c, s in nodes],
            "links": [{"source": a, "target": b} for a, b in edges],
        }
    )


def test_folder_by_argument_or_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("ORTGRAPH_PLANNING_DATA", raising=False)
    with pytest.raises(InputError, match="ORTGRAPH_PLANNING_DATA"):
        data_folder(None)
    with pytest.raises(InputError, match="no folder"):
        data_folder(str(tmp_path / "absent"))
    monkeypatch.setenv("ORTGRAPH_PLANNING_DATA", str(tmp_path))
    assert data_folder(None) == tmp_path


def test_files_are_found_by_what_is_in_them(tmp_path) -> None:
    table = "id,lower,upper,size\na,0,2,4\n"
    write(tmp_path / "one" / "x.12.csv", table)
    write(tmp_path / "two" / "deep" / "y.csv", table)
    write(tmp_path / "pangu_2.6B.csv", table)  # the dot is part of the name
    write(tmp_path / "other.csv", "id,start,end\na,0,2\n")
    write(tmp_path / "graph.json", checkmate_graph([(0, 1, 1)], []))
    write(tmp_path / "settings.json", '{"nodes": 3}')
    write(tmp_path / "list.json", "[1, 2]")
    found = {p.name: capacity for p, capacity in allocation_files(tmp_path)}
    assert found == {"x.12.csv": 12, "y.csv": None, "pangu_2.6B.csv": None}
    assert [p.name for p in graph_files(tmp_path)] == ["graph.json"]


def test_buffers_are_half_open_and_in_bytes(tmp_path) -> None:
    problem = read_allocation(write(tmp_path / "x.12.csv", "id,lower,upper,size\na,0,3,4\nb,3,9,4\nc,0,9,4\n"))
    assert problem.max_load() == 8  # a and b never live together, and sizes are not rounded up


def test_graph_without_an_order_goes_level_by_level_in_file_order(tmp_path) -> None:
    nodes = [(7, 1, 10), (3, 2, 20), (5, 3, 30), (1, 4, 40)]
    graph = read_graph(write(tmp_path / "g.json", checkmate_graph(nodes, [(3, 5), (7, 1), (5, 1)])))
    assert [o.name for o in graph.operations] == ["7", "3", "5", "1"]
    # 3 is live with 7 until 5 is made; the last step holds 7 (10), 5 (30) and 1 (40).
    assert list(simulate(graph, graph.given_order()).live) == [10, 30, 60, 80]
    assert graph.cost == 10


def test_random_layered_graph_in_its_given_order(tmp_path) -> None:
    data = {
        "graph": {"order": "[2, 0, 1]"},
        "nodes": [{"name": str(k), "duration": 10 * k + 1, "out_cost": 2**k} for k in range(3)],
        "edges": [{"0": "0", "1": "1"}],
    }
    graph = read_graph(write(tmp_path / "rlg.json", json.dumps(data)))
    assert [o.name for o in graph.operations] == ["2", "0", "1"]
    assert graph.operations[2].inputs == (1,)
    assert list(simulate(graph, graph.given_order()).live) == [4, 1, 3]  # what nobody uses dies at once


def test_cycles_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="cycle"):
        read_graph(write(tmp_path / "g.json", checkmate_graph([(0, 1, 1), (1, 1, 1)], [(0, 1), (1, 0)])))


def instances() -> pathlib.Path:
    folder = os.environ.get("ORTGRAPH_PLANNING_DATA", "")
    if not folder or not pathlib.Path(folder).is_dir():
        pytest.skip("ORTGRAPH_PLANNING_DATA names no folder with public planning instances, which are not shipped")
    return pathlib.Path(folder)


def test_published_figures_of_operator_graphs() -> None:
    found = {p.stem: p for p in graph_files(instances())}
    for name in PUBLISHED.keys() & found.keys():
        graph = read_graph(found[name])
        edges = sum(len(o.inputs) for o in graph.operations)
        figures = (len(graph.operations), edges, simulate(graph, graph.given_order()).peak, graph.cost)
        assert figures == PUBLISHED[name], name
    assert PUBLISHED.keys() & found.keys()


def test_published_figures_of_buffers() -> None:
    found = {p.stem: read_allocation(p) for p, _ in allocation_files(instances())}
    for name in MAX_LOADS.keys() & found.keys():
        assert (len(found[name].buffers), found[name].max_load()) == MAX_LOADS[name], name
    assert MAX_LOADS.keys() & found.keys()
