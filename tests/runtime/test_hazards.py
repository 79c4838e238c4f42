"""Graphs that break a careless arena: each class runs poisoned and must equal unbound ONNX Runtime bit for bit."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ortgraph.ops import spec as table
from ortgraph.ops.spec import OpSpec

UNARY = ("Tanh", "Neg", "Exp", "Relu", "Sigmoid", "Abs", "Identity")
BINARY = ("Add", "Mul", "Sub", "MatMul", "Max")
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In-place and alias facts at their boldest, so that the arena shares whatever may be shared."""
    table.lookup("", "Add")
    for name in (*UNARY[:-1], "Softmax"):
        monkeypatch.setitem(table._TABLE, ("", name), OpSpec("", name, inplace=((0, 0),)))
    for name in ("Add", "Mul", "Sub", "Max"):
        monkeypatch.setitem(table._TABLE, ("", name), OpSpec("", name, inplace=((0, 0), (1, 0))))
    for name in ("Reshape", "Identity"):
        monkeypatch.setitem(table._TABLE, ("", name), OpSpec("", name, alias=((0, 0),)))


def floats(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 0.5).astype(np.float32)


def test_update_before_the_last_reader_in_the_file(bench, run_like_plain) -> None:
    """The file updates w first; dX and the loss read the old w."""
    t = bench()
    x, w = t.input("x", floats(4, 4)), t.input("w", floats(4, 4))
    dw = t.op("MatMul", t.op("Transpose", x, perm=[1, 0]), x)
    new = t.op("Sub", w, t.op("Mul", dw, t.build.scalar(0.1, dw)), name="new_w")
    dx = t.op("MatMul", x, t.op("Transpose", w, perm=[1, 0]), name="dx")
    t.output(t.op("ReduceSum", t.op("MatMul", x, w), keepdims=0, name="loss"), dx)
    t.update(w, new)
    run_like_plain(t)


def test_tied_weight_is_read_twice(bench, run_like_plain) -> None:
    t = bench()
    ids, table = t.input("ids", RNG.integers(0, 5, (3,))), t.input("table", floats(5, 4))
    h = t.op("Gather", table, ids)
    dh = t.op("MatMul", t.op("MatMul", h, t.op("Transpose", table, perm=[1, 0])), table)
    new = t.op("Sub", table, t.op("Tanh", table), name="new")
    t.output(t.op("ReduceSum", t.op("MatMul", dh, t.op("Transpose", table, perm=[1, 0])), keepdims=0, name="loss"))
    t.update(table, new)
    run_like_plain(t)


def test_new_value_is_read_by_a_reader_of_the_old_one(bench, run_like_plain) -> None:
    t = bench()
    x, w = t.input("x", floats(4, 4)), t.input("w", floats(4, 4))
    new = t.op("Add", w, x, name="new")
    t.output(t.op("Sub", t.op("Mul", new, new), w, name="loss"))
    t.update(w, new)
    assert run_like_plain(t).placement.copies == (("w", "new"),)


def test_kernel_that_must_not_overwrite_its_input(bench, run_like_plain) -> None:
    t = bench()
    x, w = t.input("x", floats(64, 64) * 0.2), t.input("w", floats(64, 64))
    new = t.op("MatMul", w, x, name="new")
    t.output(t.op("ReduceSum", x, keepdims=0, name="loss"))
    t.update(w, new)
    assert run_like_plain(t).placement.copies


def test_two_values_are_swapped(bench, run_like_plain) -> None:
    t = bench()
    a, b = t.input("a", floats(3)), t.input("b", floats(3))
    t.output(t.op("Add", a, b, name="loss"))
    t.update(a, b)
    t.update(b, a)
    run_like_plain(t)


def test_updates_in_a_ring_through_nodes(bench, run_like_plain) -> None:
    """a' = b + 1, b' = c + 1, c' = a + 1: writing any of them first destroys what another one reads."""
    t = bench()
    a, b, c = (t.input(n, floats(3)) for n in "abc")
    one = t.build.scalar(1.0, a)
    t.output(t.op("ReduceSum", a, keepdims=0, name="loss"))
    for old, source in ((a, b), (b, c), (c, a)):
        t.update(old, t.op("Add", source, one, name=f"new_{old.name}"))
    run_like_plain(t)


def test_reshape_of_parameter_and_batch_input(bench, run_like_plain) -> None:
    """Views of inputs share their memory: an in-place chain behind them must not write there."""
    t = bench()
    x, w = t.input("x", floats(4, 6)), t.input("w", floats(6, 4))
    xr = t.op("Tanh", t.op("Reshape", x, t.build.ints([24])))
    wr = t.op("Neg", t.op("Exp", t.op("Reshape", w, t.build.ints([24]))))
    late = t.op("Reshape", x, t.build.ints([6, 4]), name="late")
    new = t.op("Sub", w, t.op("Reshape", t.op("Mul", xr, wr), t.build.ints([6, 4])), name="new")
    t.output(t.op("ReduceSum", late, keepdims=0, name="loss"), late)
    t.update(w, new)
    run_like_plain(t)


def test_view_of_a_parameter_is_read_after_the_update_in_the_file(bench, run_like_plain) -> None:
    t = bench()
    x, w = t.input("x", floats(4)), t.input("w", floats(4))
    view = t.op("Reshape", w, t.build.ints([2, 2]))
    new = t.op("Sub", w, x, name="new")
    t.output(t.op("ReduceSum", t.op("Mul", view, view), keepdims=0, name="loss"))
    t.update(w, new)
    run_like_plain(t)


def test_output_that_is_a_view_of_an_updated_parameter(bench, run_like_plain) -> None:
    t = bench()
    w = t.input("w", floats(4))
    t.output(t.op("ReduceSum", w, keepdims=0, name="loss"), t.op("Identity", w, name="copy"))
    t.update(w, t.op("Add", w, w, name="new"))
    program = run_like_plain(t)
    assert not program.placement.copies


def test_value_is_output_and_read_later(bench, run_like_plain) -> None:
    t = bench()
    x = t.input("x", floats(4, 4))
    a = t.op("Tanh", x, name="a")
    b = t.op("Exp", a, name="b")
    c = t.op("Neg", b, name="c")
    t.output(t.op("Add", c, a, name="loss"), a, c)
    run_like_plain(t)


def test_outputs_that_are_inputs_or_constants(bench, run_like_plain) -> None:
    t = bench()
    x = t.input("x", floats(4))
    constant = t.build.const([1.0, 2.0], ir.DataType.FLOAT)
    t.output(t.op("Tanh", x, name="loss"), x, constant)
    run_like_plain(t)


def test_program_of_inputs_only(bench, run_like_plain) -> None:
    t = bench()
    t.output(t.input("x", floats(4)), t.build.const([1, 2], ir.DataType.INT64))
    assert run_like_plain(t).arena_bytes == 0


def test_scalars_empty_and_bool_values(bench, run_like_plain) -> None:
    t = bench()
    x, flags = t.input("x", floats(3, 5)), t.input("flags", RNG.integers(0, 2, (3, 5)).astype(bool))
    zero = t.build.ints([0])
    empty = t.op("Add", t.op("Slice", x, zero, zero, zero), t.build.scalar(1.0, x), name="empty")
    chosen = t.op("Where", t.op("And", flags, t.op("Greater", x, t.build.scalar(0.0, x))), x, t.op("Neg", x))
    mean = t.op("ReduceMean", chosen, keepdims=0, name="loss")
    t.output(mean, t.op("Concat", empty, x, axis=0, name="joined"), empty, t.op("Not", flags, name="flipped"))
    run_like_plain(t)


def test_integer_outputs_and_steps(bench, run_like_plain) -> None:
    t = bench()
    x, step = t.input("x", floats(3, 5)), t.input("step", np.array(0, np.int64))
    t.output(t.op("ReduceSum", x, keepdims=0, name="loss"), t.op("ArgMax", x, axis=1, keepdims=0, name="best"))
    t.update(step, t.op("Add", step, t.build.const(1, np.int64), name="step_next"))
    run_like_plain(t)


def test_data_dependent_shapes_are_left_to_the_runtime(bench, run_like_plain) -> None:
    t = bench()
    x = t.input("x", floats(3, 5))
    positions = t.op("NonZero", t.op("Relu", x), name="positions")
    picked = t.op("GatherND", x, t.op("Transpose", positions, perm=[1, 0]), name="picked")
    t.output(t.op("ReduceSum", picked, keepdims=0, name="loss"), positions)
    program = run_like_plain(t)
    assert {"positions", "picked"} <= set(program.placement.unbound)


def test_unbound_output_follows_its_size_from_run_to_run(bench) -> None:
    from ortgraph.runtime.arena import Memory
    from ortgraph.runtime.program import Program

    t = bench()
    x = t.input("x", floats(6))
    t.output(t.op("NonZero", x, name="positions"))
    program = Program("gradients", t.training_graph(), ["positions"], [], Memory(), threads=1)
    for filled in (0, 6, 2, 5):
        program.inputs["x"][...] = [1.0] * filled + [0.0] * (6 - filled)
        program.run()
        assert program.value("positions").shape == (1, filled)


def test_value_read_by_a_subgraph_only(bench, run_like_plain) -> None:
    t = bench()
    x, w = t.input("x", floats(4, 4)), t.input("w", floats(4, 4))
    hidden = t.op("Tanh", x, name="hidden")
    other = t.op("Exp", x, name="other")
    condition = t.op("Greater", t.op("ReduceSum", x, keepdims=0), t.build.scalar(0.0, x))
    for _ in range(3):
        other = t.op("Tanh", other)
    branches = []
    for k, source in (("then", hidden), ("else", w)):
        node = ir.node("Neg", [source], name=f"neg_{k}")
        node.outputs[0].name = f"{k}_out"
        node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.FLOAT, ir.Shape([4, 4])
        branches.append(ir.Graph([], [node.outputs[0]], nodes=[node], name=k))
    chosen = t.op("If", condition, then_branch=branches[0], else_branch=branches[1], name="chosen")
    chosen.dtype, chosen.shape = ir.DataType.FLOAT, ir.Shape([4, 4])
    t.output(t.op("ReduceSum", t.op("Add", chosen, other), keepdims=0, name="loss"))
    t.update(w, t.op("Sub", w, x, name="new"))
    run_like_plain(t)


def test_unused_outputs_of_a_node(bench, run_like_plain) -> None:
    t = bench()
    x = t.input("x", floats(4, 6))
    a, _unused = t.build.multi("Split", x, outputs=2, axis=1, num_outputs=2)
    values, _indices = t.build.multi("TopK", a, t.build.ints([2]), outputs=2, axis=1)
    t.output(t.op("ReduceSum", values, keepdims=0, name="loss"))
    run_like_plain(t)


steps = st.lists(
    st.tuples(
        st.sampled_from((*UNARY, *BINARY, "Reshape", "Transpose", "Softmax")), st.integers(0, 99), st.integers(0, 99)
    ),
    min_size=3, max_size=22,
)  # fmt: skip


@given(steps, st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), max_size=3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_graphs_equal_unbound_runs(bench, run_like_plain, items, wanted, updates) -> None:
    """Any mixture of in-place operators, views, outputs and updates gives what ONNX Runtime gives by itself."""
    t = bench()
    values = [
        t.input(n, np.tanh(np.random.default_rng(i).standard_normal((4, 4))).astype(np.float32))
        for i, n in enumerate("xpqr")
    ]
    parameters = values[1:]
    for op, i, j in items:
        a, b = values[i % len(values)], values[j % len(values)]
        if op in BINARY:
            made = t.op(op, a, b)
        elif op == "Reshape":
            made = t.op("Reshape", t.op("Reshape", a, t.build.ints([16])), t.build.ints([4, 4]))
        elif op == "Transpose":
            made = t.op(op, a, perm=[1, 0])
        elif op == "Softmax":
            made = t.op(op, a, axis=-1)
        else:
            made = t.op(op, a)
        values.append(made if op in ("Tanh", "Relu", "Sigmoid", "Softmax") else t.op("Tanh", made))
    outputs = list(dict.fromkeys(values[4 + k % (len(values) - 4)] for k in wanted))
    t.output(*outputs)
    for p, k in zip(parameters, updates, strict=False):
        t.update(p, values[4 + k % (len(values) - 4)])
    run_like_plain(t, runs=2, threads=(2,))


@pytest.mark.parametrize("count", [1, 2])
def test_run_to_run_bit_equal(bench, count) -> None:
    from ortgraph.runtime.arena import Memory
    from ortgraph.runtime.program import Program

    t = bench()
    x, w = t.input("x", floats(64, 96)), t.input("w", floats(96, 64))
    y = t.op("Softmax", t.op("MatMul", x, w), axis=-1)
    t.output(
        t.op(
            "ReduceSum",
            t.op("MatMul", y, t.op("Transpose", w, perm=[1, 0])),
            t.build.ints([0]),
            keepdims=0,
            name="loss",
        )
    )
    program = Program("gradients", t.training_graph(), ["loss"], [], Memory(), threads=count, poison=True)
    for name in ("x", "w"):
        program.inputs[name][...] = t.values[name]
    runs = []
    for _ in range(10):
        program.run()
        runs.append(program.value("loss").copy())
    assert all(np.array_equal(runs[0], r) for r in runs)


def test_shape_nodes_run_before_their_place_in_the_file(bench, run_like_plain) -> None:
    """ONNX Runtime moves Shape and Size forward: their results must not use memory that is free only later."""
    t = bench()
    x = t.input("x", floats(2, 2))
    a = t.op("MatMul", x, x)
    b = t.op("MatMul", a, x)
    c = t.op("MatMul", b, a)  # a and b die here; a result of 16 bytes below may take their place
    size = t.op("Cast", t.op("Size", x), to=ir.DataType.FLOAT)
    shape = t.op("Add", t.op("Shape", x), t.build.ints([1]), name="after_shape")
    t.output(t.op("MatMul", t.op("Mul", c, size), x, name="loss"), shape)
    program = run_like_plain(t)
    assert program.placement.unbound


def test_update_by_a_shape_node(bench, run_like_plain) -> None:
    t = bench()
    x, seen = t.input("x", floats(2, 3)), t.input("seen", np.array([7, 7], np.int64))
    t.output(t.op("ReduceSum", t.op("Mul", seen, seen), keepdims=0, name="loss"))
    t.update(seen, t.op("Shape", x, name="new"))
    assert run_like_plain(t).placement.copies


def test_operators_that_the_runtime_inlines_or_casts(bench, run_like_plain, caplog) -> None:
    """Float16 runs between casts of the runtime's own, which come late: memory must not be shared then."""
    t = bench()
    x = t.input("x", floats(4, 4).astype(np.float16))
    w = t.input("w", floats(4, 4).astype(np.float16))
    value = x
    for _ in range(4):
        value = t.op("Tanh", t.op("Add", t.op("MatMul", value, w), x))
    new = t.op("Sub", w, value, name="new")
    t.output(t.op("ReduceSum", t.op("MatMul", value, w), keepdims=0, name="loss"))
    t.update(w, new)
    program = run_like_plain(t)
    if program.placement.in_place:
        assert "nodes of its own" not in caplog.text, "this runtime has float16 kernels"
    else:
        assert "nodes of its own" in caplog.text and program.placement.copies
