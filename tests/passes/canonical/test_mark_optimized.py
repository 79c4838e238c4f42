from __future__ import annotations

import pytest

from ortgraph.errors import PassError
from ortgraph.manager import PassManager, parse_pipeline


def test_moves_the_stage_only(linear_graph):
    before = linear_graph.text()
    PassManager(parse_pipeline("mark-optimized")).run(linear_graph)
    assert linear_graph.stage == "optimized"
    assert linear_graph.text().replace("stage optimized", "stage captured") == before


def test_never_goes_back(linear_graph):
    linear_graph.signature = linear_graph.signature.replace(stage="lowered")
    with pytest.raises(PassError, match="the graph is lowered"):
        PassManager(parse_pipeline("mark-optimized")).run(linear_graph)
