"""One optimized joint graph, cut into a forward and a backward program over one placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from ortgraph.analysis.liveness import Liveness, values_read
from ortgraph.dynamo.joint_graph import JointGraph
from ortgraph.errors import UnsupportedError
from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.plan.memory.placement import Placement, place_values
from ortgraph.runtime.ort_session import inputs_read, make_session
from ortgraph.runtime.program import computed_in_order, needed_nodes


@dataclasses.dataclass(frozen=True)
class Half:
    """A program: nodes in order, what it reads from outside of them, and what it computes."""

    name: str
    order: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    computed: tuple[ir.Value, ...]


@dataclasses.dataclass(frozen=True)
class Halves:
    """A joint graph cut in two.

    Attributes:
        graph: Lowered, static.
        forward: Computes the results, and what the backward half reads.
        backward: Computes the gradients; without nodes for inference.
        placement: Of both, one after the other, in one arena. Results have memory of their own.
        storage: First value of the memory of each value, by name.
    """

    graph: TrainingGraph
    forward: Half
    backward: Half
    placement: Placement
    storage: dict[str, ir.Value]


def cut(joint: JointGraph, graph: TrainingGraph, threads: int | None) -> tuple[Halves, list]:
    """Cut the optimized graph of ``joint``; returns the halves and their two sessions.

    A node that depends on no tangent is in the forward half when a result needs it, or when it stands before the first
    node that does: the file's order is the plan's, so what is to be recomputed stands behind.

    Raises:
        UnsupportedError: A result or a saved value has a size that depends on data.
        RuntimeSetupError: ONNX Runtime refuses one of the halves.
    """
    g = graph.graph
    by_name = {v.name: v for v in (*g.inputs, *g.outputs)}
    results = [by_name[n] for n in dict.fromkeys(o for o in joint.outputs if isinstance(o, str))]
    gradients = [by_name[n] for n in dict.fromkeys(n for n in joint.gradients if n is not None)]
    order = needed_nodes(g, (*results, *gradients))
    first = _forward_nodes(order, results, {by_name[n] for n in joint.tangents if n in by_name})
    ordered = [*first, *(n for n in order if n not in first)]
    shared = True
    while True:
        halves = _placed(graph, ordered, len(first), results, gradients, shared, joint.in_arena)
        sessions = [
            make_session(h.name, graph.model, h.order, h.inputs, h.computed, threads, alternate=True)
            for h in (halves.forward, halves.backward)
        ]
        if not shared or not any(replaced for _, replaced in sessions):
            return halves, [session for session, _ in sessions]
        shared = False  # why: nodes of the runtime's own have an order of their own


def _forward_nodes(order: Sequence[ir.Node], results: Sequence[ir.Value], seeds: set[ir.Value]) -> dict[ir.Node, None]:
    """The nodes of the forward half, in order."""
    late: set[ir.Node] = set()
    reached = set(seeds)
    for node in order:
        if any(v in reached for v in values_read(node)):
            late.add(node)
            reached.update(node.outputs)
    start = next((i for i, node in enumerate(order) if node in late), len(order))
    needed = set(order[:start])
    stack = [v.producer() for v in results]
    while stack:
        maker = stack.pop()
        if maker is not None and maker not in needed:
            needed.add(maker)
            stack += [v.producer() for v in values_read(maker)]
    return {node: None for node in order if node in needed}


def _placed(
    graph: TrainingGraph,
    ordered: Sequence[ir.Node],
    count: int,
    results: Sequence[ir.Value],
    gradients: Sequence[ir.Value],
    shared: bool,
    inside: Collection[str],
) -> Halves:
    g = graph.graph
    live = Liveness(g, ordered, [*results, *gradients])
    early = set(ordered[:count])
    # a gradient whose memory is written by the forward half is saved like any other value, and copied
    outside = [v for v in results if _computed(v) and v.name not in inside]
    outside += [v for v in gradients if _computed(v) and live.storage(v).producer() not in early]
    placement = place_values(g, ordered, [*results, *gradients], (), shared=shared, outside=outside)
    first, second = ordered[:count], ordered[count:]
    unbound = set(placement.unbound)
    made = set(computed_in_order(first))
    crossing = list(dict.fromkeys(v for n in second for v in values_read(n) if v in made))
    for value in (*crossing, *results, *gradients):
        if value.name in unbound or (_computed(value) and static_shape(value) is None):
            raise UnsupportedError(
                f"the size of %{value.name} depends on data", "compute it outside of the compiled function"
            )
    halves = [
        Half(
            name,
            tuple(nodes),
            (*inputs_read(g, nodes), *extra),
            tuple(v for v in computed_in_order(nodes) if v.name not in unbound),
        )
        for name, nodes, extra in (("forward", first, ()), ("backward", second, crossing))
    ]
    names: Iterable[ir.Value] = (*g.inputs, *computed_in_order(ordered))
    storage = {v.name or "": live.storage(v) for v in names}
    return Halves(graph, halves[0], halves[1], placement, storage)


def _computed(value: ir.Value) -> bool:
    return value.producer() is not None
