from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.errors import VerificationError
from ortgraph.graph.verify import check, verify


def test_right_graph_stays_as_it_is(linear_graph):
    before = linear_graph.text()
    assert check(linear_graph, "types") == []
    assert linear_graph.text() == before


@pytest.mark.parametrize("damage", ["shape", "rank", "dtype"])
def test_wrong_record_is_found(linear_graph, damage):
    value = next(n for n in linear_graph.graph if n.op_type == "Transpose").outputs[0]
    if damage == "dtype":
        value.dtype = ir.DataType.DOUBLE
    else:
        value.shape = ir.Shape([3, 5] if damage == "shape" else [3])
    with pytest.raises(VerificationError, match="recorded-types-are-right"):
        verify(linear_graph, "types")


def test_stored_plan_is_checked(linear_graph):
    import json

    from ortgraph.manager import PassManager, parse_pipeline
    from ortgraph.plan.memory.placement import METADATA_KEY

    PassManager(parse_pipeline("lower,plan-memory"), verify="runtime").run(linear_graph)
    verify(linear_graph, "runtime")
    plan = json.loads(linear_graph.model.metadata_props[METADATA_KEY])
    assert len(plan["offsets"]) > 1
    plan["offsets"] = dict.fromkeys(plan["offsets"], 0)
    linear_graph.model.metadata_props[METADATA_KEY] = json.dumps(plan)
    with pytest.raises(VerificationError, match="plan-is-valid"):
        verify(linear_graph, "runtime")
