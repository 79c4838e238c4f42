"""order_updates: updates after the last reader, early otherwise, everything else in place."""

from __future__ import annotations

import onnx_ir as ir
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgraph.analysis.liveness import values_read
from ortgraph.ops.builder import Builder
from ortgraph.plan.schedule import order_updates

F = ir.DataType.FLOAT


def new_graph(*names: str) -> tuple[ir.Graph, Builder, list[ir.Value]]:
    inputs = [ir.val(n, dtype=F, shape=[2, 2]) for n in names]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 18}, name="g")
    return graph, Builder(graph, "test"), inputs


def assert_valid(order: list[ir.Node]) -> None:
    done: set[ir.Node] = set()
    for node in order:
        for value in values_read(node):
            producer = value.producer()
            assert producer is None or producer in done
        done.add(node)


def test_update_waits_for_the_reader_behind_it() -> None:
    graph, b, (x, w) = new_graph("x", "w")
    gradient = b.op("MatMul", x, x, name="gradient")
    update = b.op("Sub", w, gradient, name="update")
    reader = b.op("MatMul", x, w, name="reader")
    loss = b.op("ReduceSum", reader, keepdims=0, name="loss")
    graph.outputs.extend([loss, update])
    order = [n.name for n in order_updates(graph, [(w, update)], [loss])]
    assert order == ["gradient", "reader", "update", "loss"]


def test_update_comes_as_early_as_allowed() -> None:
    graph, b, (x, w, v) = new_graph("x", "w", "v")
    g1 = b.op("MatMul", x, w, name="g1")
    g2 = b.op("MatMul", g1, v, name="g2")
    loss = b.op("ReduceSum", g2, keepdims=0, name="loss")
    u1 = b.op("Sub", w, g1, name="u1")
    u2 = b.op("Sub", v, g2, name="u2")
    graph.outputs.extend([loss, u1, u2])
    order = [n.name for n in order_updates(graph, [(w, u1), (v, u2)], [loss, g1, g2])]
    assert order == ["g1", "u1", "g2", "u2", "loss"]


def test_reader_that_needs_the_new_value_keeps_its_place() -> None:
    graph, b, (x, w) = new_graph("x", "w")
    update = b.op("Add", w, x, name="update")
    both = b.op("Mul", update, w, name="both")
    graph.outputs.extend([update, both])
    assert [n.name for n in order_updates(graph, [(w, update)], [both])] == ["update", "both"]


def test_reader_inside_a_subgraph_counts() -> None:
    graph, b, (x, w) = new_graph("x", "w")
    update = b.op("Add", w, x, name="update")
    flag = b.op("ReduceMax", x, keepdims=0, name="flag")
    condition = b.op("Cast", flag, to=ir.DataType.BOOL, name="condition")
    bodies = []
    for k in ("then", "else"):
        copy = ir.node("Identity", [w], name=f"copy_{k}")
        copy.outputs[0].name = f"{k}_w"
        bodies.append(ir.Graph([], [copy.outputs[0]], nodes=[copy], name=k))
    chosen = b.op("If", condition, then_branch=bodies[0], else_branch=bodies[1], name="if")
    graph.outputs.extend([chosen, update])
    order = [n.name for n in order_updates(graph, [(w, update)], [chosen])]
    assert order.index("if") < order.index("update")


graphs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.booleans()), min_size=1, max_size=25)


@given(graphs)
@settings(max_examples=80, deadline=None)
def test_random_graphs(items) -> None:
    """Any order is valid, an update is after all other readers of the old value unless one needs it, and stays."""
    graph, b, inputs = new_graph("p0", "p1", "p2", "x")
    values, pairs = list(inputs), []
    for i, (one, two, _) in enumerate(items):
        values.append(b.op("Add", values[one % len(values)], values[two % len(values)], name=f"n{i}"))
    for p, (index, *_) in zip(inputs[:3], items, strict=False):
        new = b.op("Sub", p, values[4 + index % len(items)], name=f"u_{p.name}")
        pairs.append((p, new))
    results = [v for v, (*_, wanted) in zip(values[4:], items, strict=True) if wanted]
    graph.outputs.extend([*results, *(new for _, new in pairs)])
    order = order_updates(graph, pairs, results)
    assert_valid(order)
    assert set(order) == set(graph)
    position = {n: i for i, n in enumerate(order)}
    for old, new in pairs:
        for use in old.uses():
            assert position[use.node] <= position[new.producer()]
    graph.remove(order)
    graph.extend(order)
    assert order_updates(graph, pairs, results) == order


def test_nothing_is_replaced_before_the_loss() -> None:
    graph, b, (x, w, step) = new_graph("x", "w", "step")
    after = b.op("Add", step, step, name="count")
    new = b.op("Sub", w, x, name="update")
    loss = b.op("ReduceSum", b.op("MatMul", x, w, name="product"), keepdims=0, name="loss")
    graph.outputs.extend([loss, after, new])
    pairs = [(step, after), (w, new)]
    order = [n.name for n in order_updates(graph, pairs, [loss], loss=loss)]
    assert order == ["product", "loss", "count", "update"]


def test_update_that_the_loss_needs_keeps_its_place() -> None:
    graph, b, (x, w) = new_graph("x", "w")
    new = b.op("Add", w, x, name="update")
    loss = b.op("ReduceSum", new, keepdims=0, name="loss")
    graph.outputs.extend([loss, new])
    assert [n.name for n in order_updates(graph, [(w, new)], [loss], loss=loss)] == ["update", "loss"]
