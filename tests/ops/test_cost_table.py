"""The shipped cost table and the measurement behind it."""

from __future__ import annotations

import json

import onnx_ir as ir
import pytest

from ortgraph.errors import InputError
from ortgraph.ops import calibrate
from ortgraph.ops.alternatives import SHIPPED_TABLE, elements, load_table, variant
from ortgraph.ops.runtime_forms import RUNTIME_FORMS
from ortgraph.ops.spec import all_specs


def test_every_choice_is_measured():
    """Where lowering has a choice, both sides have figures."""
    entries = load_table().entries
    for op_type, forms in RUNTIME_FORMS.items():
        if any(form.targets for form in forms):
            assert {f"{op_type}.runtime", f"{op_type}.expansion"} <= set(entries), op_type
    measured = {name.split(".")[0].split(":")[0] for name in entries}
    assert measured <= {s.op_type for s in all_specs()}


def test_table_is_sorted_and_says_where_it_comes_from():
    table = json.loads(SHIPPED_TABLE.read_text(encoding="utf-8"))
    assert list(table["entries"]) == sorted(table["entries"])
    assert {"runtime", "threads"} <= set(table["machine"])


@pytest.mark.parametrize("text", ["", "{}", '{"entries": {"Gelu.runtime": {}}}', '{"entries": 3}'])
def test_bad_tables(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(InputError, match="not a cost table"):
        load_table(str(path))


def test_cost_grows_with_elements_and_symbolic_dimensions_count():
    values = [ir.val("x", dtype=ir.DataType.FLOAT, shape=s) for s in ([4, 8], [400, 800], ["n", 8])]
    costs = []
    for x in values:
        node = ir.node("Gelu", [x], {"approximate": "tanh"}, domain="ortgraph")
        assert variant(node) == "Gelu:tanh"
        costs.append(load_table().cost(node, "expansion"))
    assert costs[0].microseconds < costs[2].microseconds < costs[1].microseconds
    assert elements(ir.node("Gelu", [values[2]], domain="ortgraph")) == 64 * 8
    assert costs[1].moved > 0 and costs[1].scratch > 0


def test_measurement_runs(monkeypatch):
    monkeypatch.setattr(calibrate, "CASES", tuple(c for c in calibrate.CASES if c.op_type == "TanhGrad"))
    monkeypatch.setattr(calibrate, "_SECONDS", 0.0)
    entries = dict(calibrate.measure(threads=1))
    assert {"TanhGrad.runtime", "TanhGrad.expansion"} <= set(entries)
    assert all(e["ns_per_element"] >= 0 and e["fixed_us"] > 0 for e in entries.values())
