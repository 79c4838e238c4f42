"""From a graph in an order to the planning problem: storages become values, nodes that compute become operations.

Reshape-like nodes are no operations: they are the same bytes as their input and cost nothing. They follow the value that
they view, once per evaluation of it (see ``ortgraph.plan.rebuild``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from ortgraph.analysis.cost import predict
from ortgraph.analysis.liveness import Liveness, nbytes, values_read
from ortgraph.ops.spec import spec_of
from ortgraph.plan.memory.placement import may_overwrite_at, runs_early
from ortgraph.plan.memory.problem import ALIGNMENT
from ortgraph.plan.operations import Operation, OperationGraph, PlanValue


@dataclasses.dataclass(frozen=True)
class GraphProblem:
    """A graph as operations.

    Attributes:
        operations: The planning problem; its given order is the order it was made from.
        nodes: The node of each operation.
        storages: The storage (first value) of each planned value.
        views: Reshape-like nodes, in order.
        scratch: Bytes of kernel temporaries of each operation. They are outside the arena, whose pages stay resident, so
            the largest adds to the arena whenever it occurs; the operations themselves have none.
    """

    operations: OperationGraph
    nodes: tuple[ir.Node, ...]
    storages: tuple[ir.Value, ...]
    views: tuple[ir.Node, ...]
    scratch: tuple[int, ...]


def graph_problem(
    graph: ir.Graph,
    order: Sequence[ir.Node],
    wanted: Collection[ir.Value],
    pairs: Iterable[tuple[ir.Value, ir.Value]] = (),
    loss: ir.Value | None = None,
) -> GraphProblem:
    """The planning problem of a program.

    Args:
        graph: With static shapes.
        order: A valid order of execution, updates after the readers of what they replace (``order_updates``).
        wanted: Values read after the run.
        pairs: (input, new value) of everything that the run replaces; the new values are among ``wanted``.
        loss: Nothing is replaced before it is computed.

    Raises:
        PlanError: A value that a plan must move has no static size.
    """
    live = Liveness(graph, order, wanted)
    loss_at = live.position.get(loss.producer(), -1) if loss is not None else -1  # type: ignore[arg-type]
    overwriting = {live.storage(new): old for old, new in pairs if may_overwrite_at(live, old, new, loss_at)}
    views = tuple(node for node in live.order if _is_view(live, node))
    skipped = set(views)
    nodes = tuple(node for node in live.order if node not in skipped)
    at = {node: i for i, node in enumerate(nodes)}
    storages: list[ir.Value] = []
    index: dict[ir.Value, int] = {}
    values: list[PlanValue] = []
    for node in nodes:
        for output in node.outputs:
            if output.name and live.storage(output) is output:
                index[output] = len(storages)
                storages.append(output)
                values.append(_value(live, output, output in overwriting))
    reads = [_storages_read(live, node) for node in nodes]
    captured = {v for node in nodes for v in set(values_read(node)) - set(node.inputs)}
    readers: dict[ir.Value, list[int]] = {}
    for i, read in enumerate(reads):
        for storage in read:
            readers.setdefault(storage, []).append(i)
    costs = [predict(node) for node in nodes]
    operations = []
    for i, node in enumerate(nodes):
        replaced = [overwriting[o] for o in node.outputs if o in overwriting]
        after = {j for old in replaced for j in readers.get(old, ()) if j != i}
        if replaced and loss_at >= 0 and loss is not None and live.storage(loss).producer() in at:
            after.add(at[live.storage(loss).producer()])  # type: ignore[index]
        operations.append(
            Operation(
                node.name or f"{node.op_type}.{i}",
                costs[i].microseconds,
                tuple(sorted(index[s] for s in reads[i] if s in index)),
                tuple(index[o] for o in node.outputs if o in index),
                _repeatable(live, node, captured),
                inplace=_in_place(live, node, index, values),
                after=tuple(sorted(j for j in after if j < i)),
            )
        )
    scratch = tuple(c.scratch for c in costs)
    return GraphProblem(OperationGraph(tuple(operations), tuple(values)), nodes, tuple(storages), views, scratch)


def _is_view(live: Liveness, node: ir.Node) -> bool:
    """Whether all that a node makes are the bytes of what it reads."""
    outputs = [o for o in node.outputs if o.name]
    return bool(outputs) and all(live.storage(o) is not o for o in outputs)


def _value(live: Liveness, value: ir.Value, at_input: bool) -> PlanValue:
    size = nbytes(value)
    if size is None or at_input or runs_early(value):
        size = 0  # the runtime's own memory, or the memory of the input that it replaces
    kept = any(v in live.wanted for v in live.members(value))
    return PlanValue(value.name or "", -(-size // ALIGNMENT) * ALIGNMENT, kept)


def _storages_read(live: Liveness, node: ir.Node) -> set[ir.Value]:
    """Storages that a node reads, with what the views on the way read besides (a computed shape)."""
    found: set[ir.Value] = set()
    stack = list(values_read(node))
    while stack:
        value = stack.pop()
        producer = value.producer()
        if live.storage(value) is not value and producer is not None:
            stack.extend(values_read(producer))
        else:
            found.add(live.storage(value))
    return found


def _repeatable(live: Liveness, node: ir.Node, captured: Collection[ir.Value]) -> bool:
    """Values read after the run or inside a subgraph, and nodes with subgraphs, have one evaluation."""
    spec = spec_of(node)
    members = [v for o in node.outputs if o.name for v in live.members(live.storage(o))]
    if any(v in live.wanted or v in captured for v in members):
        return False
    bodies = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    if any(a.type in bodies for a in node.attributes.values()):
        return False
    return spec.deterministic and spec.recompute and not spec.effects


def _in_place(
    live: Liveness, node: ir.Node, index: dict[ir.Value, int], values: Sequence[PlanValue]
) -> tuple[tuple[int, int], ...]:
    """(value read, value made) pairs where the kernel may write over what it reads, if that dies with the node."""
    found = []
    facts = spec_of(node).inplace
    for i, o in facts:
        source = node.inputs[i] if i < len(node.inputs) else None
        result = node.outputs[o] if o < len(node.outputs) else None
        if source is None or result not in index or live.storage(source) not in index:
            continue
        storage = live.storage(source)
        allowed = {k for k, to in facts if to == o}
        direct = [k for k, v in enumerate(node.inputs) if v is not None and live.storage(v) is storage]
        reads = sum(1 for v in values_read(node) if live.storage(v) is storage)
        same = all(k in allowed and _same_type(node.inputs[k], result) for k in direct)
        size = values[index[result]].size
        if same and reads == len(direct) and size and size == values[index[storage]].size:
            found.append((index[storage], index[result]))
    return tuple(dict.fromkeys(found))


def _same_type(a: ir.Value | None, b: ir.Value) -> bool:
    return a is not None and a.dtype == b.dtype and a.shape == b.shape
