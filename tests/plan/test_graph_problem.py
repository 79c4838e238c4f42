"""A graph as a planning problem and back: peaks agree with placement, and any valid sequence keeps every bit."""

from __future__ import annotations

import random

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.errors import PlanError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.verify import verify
from ortgraph.ops.builder import Builder
from ortgraph.optim import AdamW
from ortgraph.plan.buffers import sequence_buffers
from ortgraph.plan.graph_problem import graph_problem
from ortgraph.plan.memory.placement import place_values
from ortgraph.plan.program_plan import program_problem
from ortgraph.plan.rebuild import RECOMPUTE_KEY, apply_sequence
from ortgraph.plan.simulate import simulate
from ortgraph.runtime.program import loss_value
from ortgraph.runtime.selection import wanted_outputs

F = ir.DataType.FLOAT
OPTIMIZERS = {"gradients": None, "step": AdamW(lr=1e-2), "clipped": AdamW(lr=1e-2, max_grad_norm=0.5)}


def random_sequence(problem, seed: int, chance: float = 1.0) -> list[int]:
    """The given order with evaluations in between of operations that may be repeated at that point."""
    rng = random.Random(seed)
    operations = problem.operations.operations
    sequence, forbidden = [], set()
    for i, operation in enumerate(operations):
        for j in sorted(rng.sample(range(i), min(i, 2))):
            if operations[j].recompute and j not in forbidden and rng.random() < chance:
                sequence.append(j)
        sequence.append(i)
        forbidden.update(operation.after)
    return sequence


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_given_order_needs_what_placement_needs(classifier_graph, kind: str) -> None:
    graph = ortgraph.optimize(classifier_graph(8, 16), "O2", optimizer=OPTIMIZERS[kind]).graph
    program, problem = program_problem(graph)
    names, name_pairs = wanted_outputs(graph.signature, program)
    values = {v.name: v for v in (*graph.graph.inputs, *graph.graph.outputs)}
    pairs = [(values[a], values[b]) for a, b in name_pairs]
    order = [*problem.nodes, *problem.views]
    order.sort(key={node: i for i, node in enumerate(graph.graph)}.__getitem__)
    placed = place_values(graph.graph, order, [values[n] for n in names], pairs, loss=loss_value(graph))
    profile = simulate(problem.operations, problem.operations.given_order())
    load = sequence_buffers(problem.operations, problem.operations.given_order()).max_load()
    assert load == placed.solution.bound == profile.peak


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_valid_sequence_keeps_every_bit(classifier_graph, classifier_batch, kind: str, threads: int) -> None:
    given = ortgraph.optimize(classifier_graph(), "O2", optimizer=OPTIMIZERS[kind]).graph
    batch = classifier_batch()
    for seed in range(3):
        graph = given.clone()
        _, problem = program_problem(graph)
        sequence = random_sequence(problem, seed)
        copies = apply_sequence(graph.graph, problem, sequence, "test")
        assert copies > 10
        verify(graph, "types")
        a, b = (ortgraph.TrainingSession(g, threads=threads) for g in (given, graph))
        for _ in range(3):
            if kind == "gradients":
                left, right = a.gradients(batch), b.gradients(batch)
            else:
                assert a.step(batch) == b.step(batch)
                left, right = a.state_dict(), b.state_dict()
            assert all(np.array_equal(left[k], right[k]) for k in left)


def test_copies_say_what_they_evaluate_again(classifier_graph) -> None:
    graph = ortgraph.optimize(classifier_graph(), "O1").graph
    _, problem = program_problem(graph)
    first = next(i for i, o in enumerate(problem.operations.operations) if o.recompute)
    before = len(list(graph.graph))
    apply_sequence(graph.graph, problem, [*range(first + 1), first, *range(first + 1, len(problem.nodes))], "test")
    copies = [n for n in graph.graph if RECOMPUTE_KEY in n.metadata_props]
    assert len(copies) == len(list(graph.graph)) - before == 1
    assert copies[0].metadata_props[RECOMPUTE_KEY] == problem.nodes[first].name
    assert copies[0].metadata_props["ortgraph.pass"] == "test"


class G:
    """A small graph by hand: input x and w [16, 16]."""

    def __init__(self) -> None:
        self.x, self.w = (ir.val(n, dtype=F, shape=[16, 16]) for n in "xw")
        self.graph = ir.Graph([self.x, self.w], [], nodes=[], opset_imports={"": 18}, name="g")
        self.b = Builder(self.graph, "test")

    def problem(self, *wanted: ir.Value, pairs=()):
        self.graph.outputs.extend(wanted)
        return graph_problem(self.graph, list(self.graph), wanted, pairs)


def test_views_are_no_operations_and_follow_each_evaluation() -> None:
    g = G()
    a = g.b.op("Exp", g.x)
    flat = g.b.op("Reshape", a, g.b.ints([256]))
    first = g.b.op("ReduceSum", flat, keepdims=0)
    second = g.b.op("ReduceMax", flat, keepdims=0)
    problem = g.problem(first, second)
    assert [n.op_type for n in problem.nodes] == ["Exp", "ReduceSum", "ReduceMax"] and len(problem.views) == 1
    apply_sequence(g.graph, problem, [0, 1, 0, 2], "test")
    assert [n.op_type for n in g.graph] == ["Exp", "Reshape", "ReduceSum", "Exp", "Reshape", "ReduceMax"]
    nodes = list(g.graph)
    assert nodes[4].inputs[0] is nodes[3].outputs[0] and nodes[5].inputs[0] is nodes[4].outputs[0]
    assert g.graph.outputs[0] is first and first.producer() is nodes[2]


def test_what_must_not_be_evaluated_again_is_not() -> None:
    g = G()
    drawn = g.b.op("RandomNormalLike", g.x)
    masked = g.b.op("Mul", drawn, g.x)
    unknown = g.b.op("Mystery", g.x, domain="my.domain")
    unknown.dtype, unknown.shape = F, ir.Shape([16, 16])
    total = g.b.op("Add", masked, unknown)
    problem = g.problem(total)
    by_type = {n.op_type: o.recompute for n, o in zip(problem.nodes, problem.operations.operations, strict=True)}
    assert by_type == {"RandomNormalLike": False, "Mul": True, "Mystery": False, "Add": False}
    with pytest.raises(PlanError, match="must not be"):
        apply_sequence(g.graph, problem, [0, 0, 1, 2, 3], "test")


def test_values_read_in_subgraphs_have_one_evaluation() -> None:
    g = G()
    a = g.b.op("Exp", g.x)
    flag = ir.val("flag", dtype=ir.DataType.BOOL, shape=[])
    g.graph.inputs.append(flag)
    bodies = []
    for op_type in ("Neg", "Abs"):
        node = ir.node(op_type, [a])
        node.outputs[0].name = f"{op_type}.out"
        bodies.append(ir.Graph([], [node.outputs[0]], nodes=[node], name=op_type))
    chosen = g.b.op("If", flag, then_branch=bodies[0], else_branch=bodies[1])
    chosen.dtype, chosen.shape = F, ir.Shape([16, 16])
    result = g.b.op("Add", chosen, a)
    problem = g.problem(result)
    assert [o.recompute for o in problem.operations.operations] == [False, False, False]
    assert problem.operations.operations[1].inputs == (0,)


def test_no_reader_of_a_parameter_is_repeated_after_its_update() -> None:
    g = G()
    h = g.b.op("MatMul", g.x, g.w)
    loss = g.b.op("ReduceSum", h, keepdims=0)
    new = g.b.op("Sub", g.w, h)
    g.graph.outputs.append(loss)
    problem = graph_problem(g.graph, list(g.graph), [loss, new], [(g.w, new)], loss)
    assert problem.operations.operations[2].after == (0, 1)
    assert problem.operations.values[2].size == 0, "written over the parameter"
    with pytest.raises(PlanError, match="after an update"):
        apply_sequence(g.graph, problem, [0, 1, 2, 0], "test")


def test_in_place_pairs_follow_the_operator_table() -> None:
    g = G()
    a = g.b.op("MatMul", g.x, g.w)
    b = g.b.op("Exp", a)
    c = g.b.op("MatMul", b, g.w)
    problem = g.problem(c)
    assert [o.inplace for o in problem.operations.operations] == [(), ((0, 1),), ()]
    assert simulate(problem.operations, range(3)).live.tolist() == [1024, 1024, 2048]


def test_nodes_outside_the_program_stay_valid(classifier_graph, classifier_batch) -> None:
    graph = ortgraph.optimize(classifier_graph(), "O2", optimizer=AdamW(lr=1e-2), accumulation_steps=2).graph
    given = graph.clone()
    _, problem = program_problem(graph, "step")
    apply_sequence(graph.graph, problem, random_sequence(problem, 1), "test")
    verify(graph, "types")
    a, b = ortgraph.TrainingSession(given), ortgraph.TrainingSession(graph)
    batch = classifier_batch()
    for _ in range(2):
        assert a.accumulate(batch) == b.accumulate(batch)
        assert a.step(batch) == b.step(batch)
    left, right = a.state_dict(), b.state_dict()
    assert all(np.array_equal(left[k], right[k]) for k in left)


def test_symbolic_shapes_are_refused(classifier_graph) -> None:
    graph: TrainingGraph = ortgraph.optimize(classifier_graph("batch"), "O1").graph
    with pytest.raises(PlanError, match="numbers for all dimensions"):
        program_problem(graph)
