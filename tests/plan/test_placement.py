"""Where values go: aliases, in-place results, updates over their input, and every case in which that is unsafe."""

from __future__ import annotations

import json

import onnx_ir as ir
import pytest

from ortgraph.ops import spec as table
from ortgraph.ops.builder import Builder
from ortgraph.ops.spec import OpSpec
from ortgraph.plan.memory.placement import place_values

F = ir.DataType.FLOAT


@pytest.fixture(autouse=True)
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts that these tests are about, whatever the shipped table says."""
    table.lookup("", "Add")
    for spec in (
        OpSpec("", "Reshape", alias=((0, 0),)),
        OpSpec("", "Identity", alias=((0, 0),)),
        OpSpec("", "Add", elementwise=True, inplace=((0, 0), (1, 0))),
        OpSpec("", "Sub", elementwise=True, inplace=((0, 0),)),
        OpSpec("", "Tanh", elementwise=True, inplace=((0, 0),)),
        OpSpec("", "MatMul"),
    ):
        monkeypatch.setitem(table._TABLE, ("", spec.op_type), spec)


class G:
    """A graph in the making: inputs w and x [4,4], b [4]."""

    def __init__(self) -> None:
        self.w, self.x = (ir.val(n, dtype=F, shape=[4, 4]) for n in "wx")
        self.b = ir.val("b", dtype=F, shape=[4])
        self.graph = ir.Graph([self.w, self.x, self.b], [], nodes=[], opset_imports={"": 18}, name="g")
        self.build = Builder(self.graph, "test")

    def op(self, op_type: str, *inputs: ir.Value, name: str = "", **attributes) -> ir.Value:
        value = self.build.op(op_type, *inputs, **attributes)
        value.name = name or value.name
        return value

    def place(self, *wanted: ir.Value, pairs=(), known=None):
        self.graph.outputs.extend(wanted)
        return place_values(self.graph, list(self.graph), wanted, pairs, known)


def test_chain_of_in_place_operators_shares_one_buffer() -> None:
    g = G()
    v = g.op("MatMul", g.x, g.w)
    for _ in range(4):
        v = g.op("Tanh", v)
    placed = g.place(v)
    assert len(set(placed.offsets.values())) == 1 and placed.solution.arena_bytes == 64
    assert len(placed.in_place) == 4


def test_nothing_is_written_over_a_batch_input_or_parameter() -> None:
    g = G()
    t = g.op("Tanh", g.x, name="t")
    s = g.op("Tanh", g.op("Reshape", g.w, g.build.ints([16]), name="r"), name="s")
    placed = g.place(t, s)
    assert placed.at_input == {"r": "w"}
    assert not placed.in_place and placed.offsets["t"] != placed.offsets["s"]


def test_no_reuse_while_another_reader_waits() -> None:
    g = G()
    a = g.op("MatMul", g.x, g.w, name="a")
    t = g.op("Tanh", a, name="t")
    u = g.op("MatMul", a, t, name="u")
    placed = g.place(u)
    assert not placed.in_place and placed.offsets["a"] != placed.offsets["t"]


def test_no_reuse_of_a_wanted_value() -> None:
    g = G()
    a = g.op("MatMul", g.x, g.w, name="a")
    placed = g.place(a, g.op("Tanh", a, name="t"))
    assert not placed.in_place and placed.offsets["a"] != placed.offsets["t"]


def test_no_reuse_while_an_alias_is_still_read() -> None:
    g = G()
    a = g.op("MatMul", g.x, g.w, name="a")
    r = g.op("Reshape", a, g.build.ints([16]), name="r")
    t = g.op("Tanh", a, name="t")
    u = g.op("Tanh", r, name="u")
    placed = g.place(t, u)
    assert placed.offsets["a"] == placed.offsets["r"] != placed.offsets["t"]
    assert placed.in_place == {"u": "r"}


def test_no_reuse_when_the_node_reads_the_bytes_in_another_shape() -> None:
    g = G()
    a = g.op("MatMul", g.x, g.w, name="a")
    r = g.op("Reshape", a, g.build.ints([4, 4, 1]), name="r")
    s = g.op("Add", a, r, name="s")
    assert list(s.shape) == [4, 4, 4]
    assert not g.place(s).in_place
    g = G()
    a = g.op("MatMul", g.x, g.w, name="a")
    m = g.op("Add", a, a, name="m")
    assert g.place(m).in_place == {"m": "a"}


def test_no_reuse_of_a_broadcast_input() -> None:
    g = G()
    row = g.op("MatMul", g.b, g.w, name="row")
    big = g.op("MatMul", g.x, g.w, name="big")
    placed = g.place(g.op("Add", row, big, name="s"))
    assert placed.in_place == {"s": "big"} and placed.offsets["row"] != placed.offsets["s"]


def test_operator_without_the_fact_gets_its_own_memory() -> None:
    g = G()
    a = g.op("MatMul", g.x, g.w, name="a")
    assert not g.place(g.op("MatMul", a, g.w, name="m")).in_place


def test_update_over_its_input() -> None:
    g = G()
    gradient = g.op("MatMul", g.x, g.x, name="gradient")
    new = g.op("Sub", g.w, gradient, name="new")
    placed = g.place(new, pairs=[(g.w, new)])
    assert placed.at_input["new"] == "w" and not placed.copies and "new" not in placed.offsets


def test_update_is_copied_when_the_kernel_may_not_overwrite_what_it_reads() -> None:
    g = G()
    new = g.op("MatMul", g.w, g.x, name="new")
    placed = g.place(new, pairs=[(g.w, new)])
    assert placed.copies == (("w", "new"),) and "new" in placed.offsets


def test_update_is_copied_when_only_another_operand_may_be_overwritten() -> None:
    g = G()
    new = g.op("Sub", g.x, g.w, name="new")  # the fact is about input 0
    assert g.place(new, pairs=[(g.w, new)]).copies == (("w", "new"),)


def test_update_is_copied_when_the_old_value_is_read_later() -> None:
    g = G()
    new = g.op("Tanh", g.x, name="new")
    late = g.op("MatMul", g.w, new, name="late")
    assert g.place(late, new, pairs=[(g.w, new)]).copies == (("w", "new"),)


def test_update_is_copied_when_an_alias_of_the_old_value_is_read_later() -> None:
    g = G()
    alias = g.op("Reshape", g.w, g.build.ints([16]), name="alias")
    new = g.op("Sub", g.w, g.x, name="new")
    placed = g.place(g.op("Tanh", alias, name="t"), new, pairs=[(g.w, new)])
    assert placed.copies == (("w", "new"),) and placed.at_input["alias"] == "w"


def test_wanted_alias_of_an_input_is_a_copy() -> None:
    g = G()
    alias = g.op("Reshape", g.w, g.build.ints([16]), name="alias")
    new = g.op("Sub", g.w, g.x, name="new")
    placed = g.place(alias, new, pairs=[(g.w, new)])
    assert "alias" in placed.offsets and placed.at_input == {"new": "w"}


def test_update_is_copied_when_the_old_value_is_an_output() -> None:
    g = G()
    new = g.op("Sub", g.w, g.x, name="new")
    assert g.place(new, g.w, pairs=[(g.w, new)]).copies == (("w", "new"),)


def test_one_value_that_updates_two_inputs() -> None:
    g = G()
    new = g.op("Tanh", g.x, name="new")
    other = ir.val("w2", dtype=F, shape=[4, 4])
    g.graph.inputs.append(other)
    placed = g.place(new, pairs=[(g.w, new), (other, new)])
    assert placed.at_input["new"] == "w" and placed.copies == (("w2", "new"),)


def test_update_that_is_an_alias_of_a_computed_value() -> None:
    g = G()
    flat = g.op("Tanh", g.op("Reshape", g.x, g.build.ints([16])), name="flat")
    new = g.op("Reshape", flat, g.build.ints([4, 4]), name="new")
    placed = g.place(new, pairs=[(g.w, new)])
    assert placed.at_input["flat"] == placed.at_input["new"] == "w" and not placed.copies


def test_updates_that_are_inputs_or_constants_are_copied() -> None:
    g = G()
    constant = g.build.const([[0.0] * 4] * 4, F)
    t = g.op("Tanh", g.x)
    placed = g.place(t, g.x, constant, pairs=[(g.w, g.x), (g.x, g.w)])
    assert placed.copies == (("w", "x"), ("x", "w"))
    placed = g.place(t, constant, pairs=[(g.w, constant)])
    assert placed.copies == (("w", constant.name),)


def test_bytes_by_dtype_and_empty_values() -> None:
    g = G()
    mask = g.op("Greater", g.x, g.w, name="mask")
    index = g.op("ArgMax", g.x, axis=1, keepdims=0, name="index")
    empty = g.op("Slice", g.x, g.build.ints([0]), g.build.ints([0]), g.build.ints([0]), name="empty")
    placed = g.place(mask, index, empty)
    sizes = {b.name: b.size for b in placed.problem.buffers}
    assert sizes == {"mask": 16, "index": 32, "empty": 0}


def test_values_of_unknown_size_are_left_to_the_runtime() -> None:
    g = G()
    positions = g.op("NonZero", g.x, name="positions")
    placed = g.place(positions)
    assert placed.unbound == ("positions",) and not placed.offsets


def test_alias_of_a_constant_is_a_copy() -> None:
    g = G()
    constant = g.build.const([[0.0] * 4] * 4, F)
    r = g.op("Reshape", constant, g.build.ints([16]), name="r")
    placed = g.place(g.op("Tanh", r, name="t"))
    assert "r" in placed.offsets and placed.in_place == {"t": "r"}


def test_stored_plan_is_used_and_a_wrong_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    def make():
        g = G()
        a = g.op("MatMul", g.x, g.w, name="a")
        b = g.op("MatMul", a, g.w, name="b")
        return g, g.op("MatMul", a, b, name="c")

    g, c = make()
    plan = json.loads(g.place(c).to_json("step"))
    assert plan["max_load_bytes"] <= plan["arena_bytes"] and set(plan["offsets"]) == {"a", "b", "c"}
    g, c = make()
    other = {"a": 128, "b": 0, "c": 64}
    placed = g.place(c, known=other)
    assert dict(placed.offsets) == other and placed.solution.solver == "stored plan"
    g, c = make()
    placed = g.place(c, known={"a": 0, "b": 0, "c": 64})
    assert placed.solution.solver != "stored plan" and "does not fit" in caplog.text


def test_update_that_the_loss_needs_is_copied() -> None:
    """Written in place it would stay when a later forward operator refuses the batch."""
    g = G()
    new = g.op("Sub", g.w, g.x, name="new")
    loss = g.op("MatMul", new, g.x, name="loss")
    late = g.op("Sub", g.x, loss, name="late")
    g.graph.outputs.extend([loss, new, late])
    placed = place_values(g.graph, list(g.graph), (loss, new, late), [(g.w, new), (g.x, late)], loss=loss)
    assert placed.copies == (("w", "new"),) and placed.at_input == {"late": "x"}
