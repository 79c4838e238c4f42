"""Liveness: lifetimes, storages shared by aliases, readers in subgraphs, bytes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ortgraph.analysis.liveness import Liveness, nbytes
from ortgraph.ops.builder import Builder
from ortgraph.plan.memory.placement import place_values

F = ir.DataType.FLOAT


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        (ir.DataType.BOOL, [3, 5], 15), (F, [], 4), (ir.DataType.INT64, [2], 16), (ir.DataType.BFLOAT16, [3], 6),
        (ir.DataType.INT4, [3], 2), (F, [0, 7], 0), (F, ["n", 2], None), (ir.DataType.STRING, [2], None),
        (F, None, None), (None, [2], None),
    ],
)  # fmt: skip
def test_bytes(dtype, shape, size) -> None:
    assert (
        nbytes(
            ir.Value(name="v", type=dtype and ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))
        )
        == size
    )


def test_a_sequence_has_no_size() -> None:
    assert nbytes(ir.Value(name="v", type=ir.SequenceType(ir.TensorType(F)), shape=ir.Shape([2]))) is None


def make() -> tuple[ir.Graph, Builder, ir.Value]:
    x = ir.val("x", dtype=F, shape=[2, 3])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="g")
    return graph, Builder(graph, "test"), x


def test_lifetimes_go_through_aliases() -> None:
    graph, b, x = make()
    a = b.op("Tanh", x)
    flat = b.op("Reshape", a, b.ints([6]))
    other = b.op("Exp", x)
    back = b.op("Reshape", flat, b.ints([3, 2]))
    late = b.op("Neg", back)
    unused = b.op("Neg", x)
    graph.outputs.append(late)
    live = Liveness(graph)
    assert live.storage(back) is a and list(live.members(a)) == [a, flat, back]
    assert (live.born(a), live.last(a)) == (0, 4) and live.reading_steps(a) == [1, 3, 4]
    assert live.last(other) == live.born(other) == 2 and live.last(unused) == 5
    assert live.last(late) == live.end == 6
    assert list(live.storages()) == [a, other, late, unused]


def test_wanted_alias_keeps_its_storage() -> None:
    graph, b, x = make()
    a = b.op("Tanh", x)
    flat = b.op("Reshape", a, b.ints([6]))
    graph.outputs.append(flat)
    live = Liveness(graph)
    assert live.storage(flat) is a and live.last(a) == live.end


def test_alias_of_input_belongs_to_the_input_unless_wanted() -> None:
    graph, b, x = make()
    flat = b.op("Reshape", x, b.ints([6]))
    kept = b.op("Reshape", x, b.ints([3, 2]))
    graph.outputs.append(kept)
    live = Liveness(graph)
    assert live.storage(flat) is x and live.storage(kept) is kept


def test_reader_in_a_nested_subgraph() -> None:
    graph, b, x = make()
    hidden = b.op("Tanh", x)
    condition = b.op("Cast", b.op("ReduceMax", x, keepdims=0), to=ir.DataType.BOOL)
    inner = [ir.node("Neg", [hidden], name=f"n{i}") for i in range(2)]
    bodies = [ir.Graph([], [node.outputs[0]], nodes=[node], name=node.name) for node in inner]
    inner_if = ir.node("If", [condition], {"then_branch": bodies[0], "else_branch": bodies[1]}, name="inner")
    other = ir.node("Neg", [x], name="other")
    then = ir.Graph([], [inner_if.outputs[0]], nodes=[inner_if], name="then")
    orelse = ir.Graph([], [other.outputs[0]], nodes=[other], name="else")
    graph.outputs.append(b.op("If", condition, then_branch=then, else_branch=orelse))
    live = Liveness(graph)
    assert live.last(hidden) == live.position[graph.outputs[0].producer()] == 3


def test_absent_outputs_have_no_storage() -> None:
    graph, b, x = make()
    made = [b.multi("TopK", x, b.ints([1]), outputs=2, axis=1) for _ in range(2)]
    for values, _ in made:
        values.name = ""
    graph.outputs.extend(indices for _, indices in made)
    live = Liveness(graph)
    assert list(live.storages()) == [indices for _, indices in made]
    assert {p.name for p in place_values(graph, tuple(graph), graph.outputs, ()).problem.buffers} == {
        indices.name for _, indices in made
    }
