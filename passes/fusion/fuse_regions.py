"""FuseRegions: element-wise and row-wise neighbours become one generated kernel each."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.graph import Names, TrainingGraph, replace_value
from ortgraph.graph.edit import is_used, take_type
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.ops import generated
from ortgraph.ops.builder import Builder
from ortgraph.ops.generated.bodies import BodyMaker, drawn_by, is_view
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.fusion.regions import Regions
from ortgraph.runtime.inference_export import keep_evaluation_form


@dataclasses.dataclass(frozen=True)
class FuseRegions(GraphPass):
    """A region of element-wise, broadcasting and last-axis operators becomes one node ``ortgraph.generated.Fused_<hash>``.

    The node's meaning is a local function of the model that holds the region's own operators; it is compiled to a kernel
    when a session is made. Regions grow along the values that then need not go through memory, the largest first. Rows
    stay whole: sums over the last dimension are kept in registers, sums over all other dimensions are made on the way.
    A mask of Dropout that the backward half needs is drawn again. Layers that are alike share one kernel.

    Refuses when:
        a node has no expression, other element types than float32, bfloat16, float16 and bool, or unknown dimensions;
        a path leaves the region and comes back; an operand repeats along rows and is made in the region;
        the nodes are needed by different programs (loss, gradients, update);
        there is no C++ compiler.

    Attributes:
        kernels: Whether kernels may be generated.
        least_bytes: Memory traffic per step that the regions of one kernel must save together: compiling it takes
            about a second, and 64 KiB less to move some ten microseconds less per step.
    """

    name: ClassVar[str] = "fuse-regions"
    stages: ClassVar[tuple[str, ...]] = ("captured", "optimized", "cast", "stepped")

    kernels: bool = True
    least_bytes: int = 1 << 16

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        if not self.kernels:
            changes.refusals.append(Refusal("", "generated kernels are switched off (kernels=false)"))
            return changes
        if not generated.available():
            changes.refusals.append(Refusal("", f"kernels cannot be generated: {generated.reason()}"))
            return changes
        regions = Regions(graph)
        groups = regions.grow()
        made = self._worthwhile(regions, groups, changes)
        groups = [list(group) for group, _ in made]
        if groups and graph.has_signature:
            keep_evaluation_form(graph)  # why here: afterwards dropout is inside of kernels
        names, new_of = Names(graph.graph), dict[ir.Value, ir.Value]()
        for group, region in made:
            self._replace(graph, group, region, names, new_of, changes)
        for node in _drawn_apart(regions, groups):
            _redraw(graph.graph, node, regions, names, self.name)
            changes.counts["redrawn"] += 1
        _remove(graph.graph, [node for group, _ in made for node in group])
        if changes.counts:
            _sort(graph.graph)
        changes.refusals += _left(regions, groups)
        return changes

    def _worthwhile(
        self, regions: Regions, groups: Sequence[Sequence[ir.Node]], changes: Changes
    ) -> list[tuple[Sequence[ir.Node], _Made]]:
        """The groups whose kernel saves enough, over all groups that share it, with their bodies."""
        redrawn = {node for group in groups for node in group if regions.redraws(node)}
        first = [(group, _Made.of(group, regions, redrawn)) for group in groups]
        saved: Counter[str] = Counter()
        for group, region in first:
            saved[region.function.name] += regions.saved_bytes(group, redrawn)
        kept = []
        for group, region in first:
            reason = "nobody reads it" if not region.outputs else generated.reason_of(region.function)
            if reason is None and saved[region.function.name] < self.least_bytes:
                reason = f"its kernel saves {saved[region.function.name]} bytes, less than {self.least_bytes}"
            if reason is not None:
                changes.refusals.append(Refusal(group[-1].name or "", f"region of {len(group)} nodes left: {reason}"))
                continue
            kept.append(group)
        left = {node for group in kept for node in group if regions.redraws(node)} | set(_drawn_apart(regions, kept))
        return [(group, _Made.of(group, regions, left)) for group in kept]

    def _replace(
        self,
        graph: TrainingGraph,
        group: Sequence[ir.Node],
        region: _Made,
        names: Names,
        new_of: dict[ir.Value, ir.Value],
        changes: Changes,
    ) -> None:
        graph.model.functions.setdefault(region.function.identifier(), region.function)
        generated.adopt(graph.model)
        build = Builder(graph.graph, self.name, before=group[-1], origins=group[::-1], names=names)
        inputs = [new_of.get(v, v) for v in region.inputs]
        results = build.multi(
            region.function.name, *inputs, outputs=len(region.outputs), domain=generated.DOMAIN, **region.attributes
        )
        for old, new in zip(region.outputs, results, strict=True):
            take_type(new, old)
            replace_value(old, new)
            new_of[old] = new
        changes.counts["regions"] += 1
        changes.counts["nodes"] += len(group)
        held = Counter(n.op_type for n in group)
        text = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in sorted(held.items()))
        made = results[0].producer()
        assert made is not None
        changes.refusals.append(Refusal(made.name or "", f"fused {text}: saves {region.saved} bytes"))


@dataclasses.dataclass(frozen=True)
class _Made:
    """The body of a group, and what it reads and gives in the graph."""

    function: ir.Function
    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    attributes: Mapping[str, Any]
    saved: int

    @staticmethod
    def of(group: Sequence[ir.Node], regions: Regions, redrawn: set[ir.Node]) -> _Made:
        outputs = regions.outputs(group, redrawn)
        maker = BodyMaker(group, regions.origin)
        function = maker.build(outputs)
        return _Made(function, maker.inputs, outputs, maker.attributes, regions.saved_bytes(group, redrawn))


def _drawn_apart(regions: Regions, groups: Sequence[Sequence[ir.Node]]) -> list[ir.Node]:
    """Gradients outside of regions whose mask is drawn inside of one."""
    inside = {node for group in groups for node in group}
    return [
        node
        for node in regions.nodes
        if node not in inside and regions.redraws(node) and drawn_by(node, regions.origin) in inside
    ]


def _redraw(graph: ir.Graph, node: ir.Node, regions: Regions, names: Names, by: str) -> None:
    """DropoutGrad(dY, mask) = Dropout(dY, Key, Step): the kernel that draws the mask need not write it."""
    forward = drawn_by(node, regions.origin)
    assert forward is not None
    build = Builder(graph, by, before=node, origins=[node], names=names)
    given = {k: a.value for k, a in forward.attributes.items() if k in ("node", "ratio")}
    made = build.op("Dropout", node.inputs[0], *forward.inputs[1:3], domain=COMPOSITE, **given)
    take_type(made, node.outputs[0])
    replace_value(node.outputs[0], made)
    graph.remove(node, safe=True)


def _remove(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """Take nodes that read each other out of their graph, and the views that only they read."""
    for node in nodes:
        for position in range(len(node.inputs)):
            node.replace_input_with(position, None)
    for node in reversed(list(graph)):
        if is_view(node) and not is_used(node.outputs[0]):
            graph.remove(node, safe=True)
    graph.remove(nodes, safe=True)


def _sort(graph: ir.Graph) -> None:
    """Every node behind what it reads, otherwise in the order in which they stand."""
    nodes = list(graph)
    index = {node: i for i, node in enumerate(nodes)}
    readers: dict[ir.Node, list[ir.Node]] = {node: [] for node in nodes}
    waits = dict.fromkeys(nodes, 0)
    for node in nodes:
        for producer in {p for v in values_read(node) if (p := v.producer()) is not None and p in index}:
            readers[producer].append(node)
            waits[node] += 1
    ready = [index[node] for node in nodes if not waits[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for reader in readers[node]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, index[reader])
    assert len(order) == len(nodes), "a region made a circle"
    if order != nodes:
        graph.remove(order)
        graph.extend(order)


def _left(regions: Regions, groups: Sequence[Sequence[ir.Node]]) -> list[Refusal]:
    """Why nodes stayed alone, for those that could be in a region."""
    inside = {node for group in groups for node in group}
    return [
        Refusal(node.name or "", f"{node.op_type}: no neighbour to fuse with")
        for node in regions.nodes
        if node in regions.forms and node not in inside and node.graph is not None
    ]
