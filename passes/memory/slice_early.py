"""SliceEarly: of a value that is read in part later on, only the part is kept."""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

import onnx_ir as ir

from ortgraph.analysis.liveness import Liveness, nbytes, values_read
from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.runtime.program import needed_nodes
from ortgraph.runtime.selection import training_program, wanted_outputs

_PARTS = ("Slice", "Gather")


@dataclasses.dataclass(frozen=True)
class SliceEarly(GraphPass):
    """Slices and lookups that are the last to read a value move up to where the value is read otherwise for the last time.

    From there on the parts live instead of the whole. ``narrow-rows`` leaves such slices behind: the backward half of
    a classifier reads the saved values of its last layer for the first token only. Numbers do not change.

    Refuses when:
        the parts of a value take more than ``most`` of it together;
        the peak of live memory would rise, or a shape is symbolic.

    Attributes:
        most: Greatest share of a value that its parts may take.
    """

    name: ClassVar[str] = "slice-early"
    stages: ClassVar[tuple[str, ...]] = ("lowered",)

    most: float = 0.5

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        before = tuple(graph.graph)
        live = Liveness(graph.graph)
        settled: dict[ir.Node, int] = {}
        for storage in live.storages():
            self._parts(live, storage, settled, changes)
        follow = _places(live, settled)
        after = _order(before, follow)
        moved = sum(a is not b for a, b in zip(before, after, strict=True))
        if not moved:
            return changes
        wanted = _wanted(graph)
        if _peak(graph, after, wanted) > _peak(graph, before, wanted):
            changes.refusals.append(Refusal("", "the peak of live memory would rise"))
            return changes
        graph.graph.remove(after)
        graph.graph.extend(after)
        changes.counts["moved"] = len(settled)
        return changes

    def _parts(self, live: Liveness, storage: ir.Value, found: dict[ir.Node, int], changes: Changes) -> None:
        """Note behind which step the parts of one value are to come."""
        if any(v in live.wanted for v in live.members(storage)):
            return
        steps = live.reading_steps(storage)
        parts = [t for t in steps if _is_part(live, live.order[t], storage)]
        settled = max((t for t in steps if t not in parts), default=live.born(storage))
        late = [live.order[t] for t in parts if t > settled]
        whole, sizes = nbytes(storage), [nbytes(node.outputs[0]) for node in late]
        if not late:
            return
        if whole is None or None in sizes:
            changes.refusals.append(Refusal(late[0].name or "", "a shape is symbolic"))
            return
        if sum(s for s in sizes if s is not None) > self.most * whole:
            changes.refusals.append(Refusal(late[0].name or "", f"the parts take more than {self.most} of the whole"))
            return
        found.update(dict.fromkeys(late, settled))


def _places(live: Liveness, settled: dict[ir.Node, int]) -> dict[ir.Node, list[ir.Node]]:
    """Behind which node that stays each part comes: what it reads may be a part, too, and is made where that comes."""
    place: dict[ir.Node, int] = {}
    follow: dict[ir.Node, list[ir.Node]] = {}
    for node in sorted(settled, key=live.position.__getitem__):
        makers = [live.order[settled[node]], *(v.producer() for v in values_read(node))]
        place[node] = max(place.get(m, live.position.get(m, -1)) for m in makers)  # type: ignore[arg-type]
        follow.setdefault(live.order[place[node]], []).append(node)
    return follow


def _is_part(live: Liveness, node: ir.Node, storage: ir.Value) -> bool:
    if node.op_type not in _PARTS or node.domain not in ("", "ai.onnx"):
        return False
    data, *rest = node.inputs
    reads_it = [v for v in rest if v is not None and live.storage(v) is storage]
    return data is not None and live.storage(data) is storage and not reads_it


def _order(before: tuple[ir.Node, ...], follow: dict[ir.Node, list[ir.Node]]) -> tuple[ir.Node, ...]:
    """The order given, with some nodes right behind others."""
    moved = {node for nodes in follow.values() for node in nodes}
    after: list[ir.Node] = []
    for node in before:
        todo = [] if node in moved else [node]
        while todo:
            at = todo.pop()
            after.append(at)
            todo.extend(reversed(follow.get(at, ())))
    return tuple(after)


def _wanted(graph: TrainingGraph) -> list[ir.Value]:
    """What the program that trains computes."""
    signature = graph.signature
    names = set(wanted_outputs(signature, training_program(signature))[0])
    return [v for v in graph.graph.outputs if v.name in names]


def _peak(graph: TrainingGraph, order: tuple[ir.Node, ...], wanted: list[ir.Value]) -> int:
    """The largest sum of live bytes, nothing in place."""
    needed = set(needed_nodes(graph.graph, wanted))
    live = Liveness(graph.graph, [node for node in order if node in needed], wanted)
    change = [0] * (live.end + 2)
    for storage in live.storages():
        size = nbytes(storage) or 0
        change[live.born(storage)] += size
        change[live.last(storage) + 1] -= size
    return max(itertools.accumulate(change), default=0)
