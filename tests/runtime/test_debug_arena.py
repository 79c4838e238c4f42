"""The node-by-node check: right plans pass with the same results, each kind of wrong plan is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.errors import PlanError
from ortgraph.runtime import debug_arena
from ortgraph.runtime.arena import POISON, Memory
from ortgraph.runtime.program import Program

SIZE = 160
rng = np.random.default_rng(0)


def random(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def chain(bench):
    """a = x w, b = tanh(a), c = b w, d = c + a, loss = sum(d): a lives to d, b dies at c."""
    made = bench()
    x, w = made.input("x", random(SIZE, SIZE)), made.input("w", random(SIZE, SIZE))
    a = made.op("MatMul", x, w, name="a")
    b = made.op("Tanh", a, name="b")
    c = made.op("MatMul", b, w, name="c")
    d = made.op("Add", c, a, name="d")
    flat = made.op("Reshape", d, made.build.ints([-1]), name="flat")
    made.output(made.op("ReduceSum", flat, keepdims=0, name="loss"), d)
    return made


def program_of(made, threads=1, poison=False, pairs=()):
    memory = Memory()
    for old, _ in pairs:
        memory.add(old, made.values[old].dtype, made.values[old].shape)[...] = made.values[old]
    wanted = list(dict.fromkeys(v.name for v in made.graph.outputs))
    program = Program("step", made.training_graph(), wanted, pairs, memory, threads=threads, poison=poison)
    for name, array in made.values.items():
        if name in program.inputs:
            program.inputs[name][...] = array
    return program


def move(program, **offsets):
    """The program with values at other places."""
    program.placement = dataclasses.replace(program.placement, offsets={**program.placement.offsets, **offsets})
    return program


@pytest.mark.parametrize("threads", [1, 2])
def test_a_right_plan_passes_with_the_same_results(bench, threads):
    made = chain(bench)
    program = program_of(made, threads)
    expected = made.plain(made.values)
    program.check()
    assert all(np.array_equal(program.value(n), expected[n]) for n in ("loss", "d"))
    program.run()
    assert all(np.array_equal(program.value(n), expected[n]) for n in ("loss", "d"))


def test_dead_values_are_overwritten(bench):
    program = program_of(chain(bench))
    program.check()
    kept = np.zeros(program.arena_bytes_now.nbytes, bool)
    for name in ("loss", "d"):
        kept[program.placement.offsets[name] :][: program.value(name).nbytes] = True
    assert kept.any() and not kept.all()
    assert (program.arena_bytes_now[~kept] == POISON).all()


@pytest.mark.parametrize("shift", [0, 64, SIZE * SIZE * 4 - 4])
def test_a_value_still_read_is_overwritten(bench, shift):
    program = program_of(chain(bench))
    total = program.arena_bytes
    program.placement = dataclasses.replace(
        program.placement, solution=dataclasses.replace(program.placement.solution, arena_bytes=4 * total)
    )
    move(program, a=0, b=shift, c=2 * total, d=3 * total, flat=3 * total)
    with pytest.raises(PlanError, match=r"\(Tanh\) writes %b over %a, which node .* \(Add\) still reads"):
        program.check()


def test_a_result_is_overwritten(bench):
    made = chain(bench)
    extra = made.op("Neg", made.graph.inputs[0], name="extra")
    made.output(extra)
    program = program_of(made)
    move(program, extra=program.placement.offsets["d"])
    with pytest.raises(PlanError, match=r"\(Neg\) writes %extra over %d, which is a result"):
        program.check()


def test_in_place_of_an_input_that_the_kernel_still_needs(bench):
    program = program_of(chain(bench))
    move(program, c=program.placement.offsets["b"])
    with pytest.raises(PlanError, match=r"\(MatMul\) does not compute %c when that lies over its input %b"):
        program.check()


def test_an_update_before_the_last_reader(bench):
    made = chain(bench)
    w = made.graph.inputs[1]
    new = made.op("Neg", w, name="new")
    made.graph.remove(new.producer())
    made.graph.insert_before(made.graph[0], new.producer())
    made.update(w, new)
    program = program_of(made, pairs=made.pairs)
    program.order.sort(key=lambda node: node.op_type != "Neg")
    program.placement = dataclasses.replace(program.placement, at_input={"new": "w"}, copies=())
    with pytest.raises(PlanError, match=r"\(Neg\) writes %new over %w, which node .* \(MatMul\) still reads"):
        program.check()


def test_a_kernel_that_writes_elsewhere(bench, monkeypatch):
    program = program_of(chain(bench))
    real = debug_arena._run_node

    def stray(session, node, inputs, bound):
        if node.op_type == "Tanh" and bound:
            program.arena_bytes_now[-1] = 0
        return real(session, node, inputs, bound)

    monkeypatch.setattr(debug_arena, "_run_node", stray)
    last = program.arena_range()[1] + 63
    with pytest.raises(PlanError, match=rf"\(Tanh\) writes at byte {last} of the arena, outside of its outputs"):
        program.check()


def test_a_kernel_that_relies_on_what_was_there(bench, monkeypatch):
    program = program_of(chain(bench))
    real = debug_arena._run_node

    def adds(session, node, inputs, bound):
        before = {n: a.copy() for n, a in bound.items()}
        made = real(session, node, inputs, bound)
        if node.op_type == "ReduceSum" and bound:
            bound["loss"][...] += before["loss"]
        return made

    monkeypatch.setattr(debug_arena, "_run_node", adds)
    with pytest.raises(PlanError, match=r"\(ReduceSum\) computes another %loss when its memory held NaN"):
        program.check()


def body_of(x, w):
    """A branch that reads two values from outside: x w."""
    node = ir.node("Mul", [x, w], num_outputs=1)
    node.outputs[0].name = "inner"
    return ir.Graph([], [node.outputs[0]], nodes=[node], name="body")


def test_updates_subgraphs_and_values_of_unknown_size(bench):
    made = bench()
    x, w = made.input("x", random(6, 8)), made.input("w", random(6, 8))
    condition = made.build.const(np.array(True), ir.DataType.BOOL)
    branch = ir.node("If", [condition], {"then_branch": body_of(x, w), "else_branch": body_of(x, w)})
    chosen = branch.outputs[0]
    chosen.name, chosen.dtype, chosen.shape = "chosen", ir.DataType.FLOAT, ir.Shape([6, 8])
    made.graph.append(branch)
    found = made.op("NonZero", chosen, name="found")
    found.dtype = ir.DataType.INT64
    picked = made.op("Gather", chosen, made.build.ints([1, 1]), axis=0, name="picked")
    made.output(made.op("ReduceSum", picked, keepdims=0, name="loss"), found)
    made.update(w, made.op("Sub", w, chosen, name="next"))
    program = program_of(made, pairs=made.pairs)
    expected = made.plain(made.values)
    assert "found" in program.placement.unbound
    program.check()
    assert np.array_equal(program.value("loss"), expected["loss"])
    assert np.array_equal(program.array_of(made.graph.inputs[1]), expected["next"])


def test_session_checks_every_program(classifier_graph, classifier_batch):
    from ortgraph.optim import AdamW
    from ortgraph.passes.lowering.attach_optimizer import AttachOptimizer
    from ortgraph.runtime.session import TrainingSession

    graph, batch = classifier_graph(), classifier_batch()
    AttachOptimizer.of(AdamW(lr=1e-2)).call(graph.model)
    graph.signature = graph.signature.replace(stage="stepped")
    checked, plain = TrainingSession(graph, threads=1, poison=True), TrainingSession(graph, threads=1)
    plain.step(batch)
    checked.check_memory(batch)
    checked.check_memory(batch, "step")
    for name, value in plain.state_dict().items():
        assert np.array_equal(value, checked.state_dict()[name]), name


def test_guards_are_checked_after_each_run(bench, monkeypatch):
    made = bench()
    x = made.input("x", random(5, 5))  # 100 bytes: 28 bytes of the second line belong to nobody
    y = made.op("Tanh", x, name="y")
    made.output(made.op("ReduceSum", made.op("Exp", y, name="z"), keepdims=0, name="loss"))
    program = program_of(made, poison=True)
    program.run()
    real = Program._run_bound
    for at, before in ((program.arena_bytes_now.nbytes - 1, "%"), (program.placement.offsets["y"] + 101, "%")):

        def stray(self, binding, at=at):
            real(self, binding)
            self.arena_bytes_now[at] = 1

        monkeypatch.setattr(Program, "_run_bound", stray)
        with pytest.raises(PlanError, match=rf"byte {at} of the arena changed, which belongs to no value .*{before}"):
            program.run()
