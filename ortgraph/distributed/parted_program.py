"""A program in several parts over one placement: after each some arrays are finished, and can leave while it goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.runtime.binding import bind_input, bind_input_at, bind_output
from ortgraph.runtime.ort_session import inputs_read, make_session
from ortgraph.runtime.program import Program, computed_in_order

if TYPE_CHECKING:
    import onnxruntime


@dataclasses.dataclass
class Part:
    """Nodes that run together.

    Attributes:
        session: The runtime's.
        inputs: Graph inputs that it reads.
        earlier: Values of earlier parts that it reads.
        computed: What it computes.
        finished: Groups of arrays that nothing touches after it, but for those of the last part.
        binding: Of its session, once there is an arena.
    """

    session: Any
    inputs: Sequence[ir.Value]
    earlier: Sequence[ir.Value]
    computed: Sequence[ir.Value]
    finished: Sequence[int]
    binding: Any = None


class PartedProgram(Program):
    """A program that is cut where a group of the arrays that it replaces is finished.

    Nodes, order and memory are those of the program in one piece, and so are its results, bit for bit.

    Args:
        arguments: As for ``Program``.
        groups: Names of inputs that the program replaces; groups finish in this order, none before the one in front of it.
    """

    def __init__(self, *arguments: Any, groups: Sequence[Collection[str]]) -> None:
        self._groups = groups
        self.parts: list[Part] = []
        self._told: Callable[[int], None] | None = None
        super().__init__(*arguments)

    def run(self, finished: Callable[[int], None] | None = None) -> None:
        """Run once.

        Args:
            finished: Called with the number of each group as soon as it is finished, in order; it may write the arrays
                while the program goes on.
        """
        told: list[int] = []

        def tell(group: int) -> None:
            told.append(group)
            if finished is not None:
                finished(group)

        self._told = tell
        super().run()
        for group in range(len(told), len(self._groups)):
            tell(group)

    def _make_session(
        self, graph: TrainingGraph, threads: int | None, profile_prefix: str | None
    ) -> tuple[onnxruntime.InferenceSession | None, list[str]]:
        ends = [] if self._unbound else finished_after(self.order, self._groups, self.placement)
        cuts = sorted({end for end in ends if 0 < end < len(self.order)})
        self.parts, replaced = [], []
        for start, end in pairwise((0, *cuts, len(self.order))):
            nodes, bound = self.order[start:end], set(self._bound)
            computed = [v for v in computed_in_order(nodes) if v in bound]
            earlier = self._computed_before(start, nodes)
            extra = [self._values[n] for n in self._unbound]
            inputs = inputs_read(graph.graph, nodes)
            session, changed = make_session(
                self.name, graph.model, nodes, [*inputs, *earlier], [*computed, *extra], threads,
                self._memory.device, profile_prefix, alternate=True,
            )  # fmt: skip
            finished = [i for i, e in enumerate(ends) if start < e <= end < len(self.order)]
            self.parts.append(Part(session, inputs, earlier, computed, finished))
            replaced += changed
        return self.parts[-1].session, sorted(set(replaced))

    def _computed_before(self, start: int, nodes: Sequence[ir.Node]) -> list[ir.Value]:
        made = set(computed_in_order(self.order[:start]))
        return list(dict.fromkeys(v for node in nodes for v in values_read(node) if v in made))

    def _bound_session(self) -> onnxruntime.IOBinding:
        arena = self._memory.arena
        if self._binding is None or self._generation != arena.generation:
            arena.ensure(self.arena_bytes)
            for part in self.parts:
                self._bind(part)
            self._binding, self._generation = self.parts[-1].binding, arena.generation
        assert self._binding is not None
        return self._binding

    def _bind(self, part: Part) -> None:
        binding = part.binding = part.session.io_binding()
        for value in part.inputs:
            bind_input(binding, value.name or "", self.inputs[value.name or ""])
        for bind, values in ((bind_input_at, part.earlier), (bind_output, part.computed)):
            for value in values:
                name, shape = value.name or "", static_shape(value) or ()
                bind(binding, name, value.dtype.numpy(), shape, self._address(name))  # type: ignore[union-attr]

    def _run_bound(self, binding: onnxruntime.IOBinding) -> None:
        for part in self.parts:
            self._run_session(part.session, part.binding)
            for group in part.finished:
                assert self._told is not None
                self._told(group)


def finished_after(order: Sequence[ir.Node], groups: Sequence[Collection[str]], placement: Any) -> list[int]:
    """How many nodes have to run before nothing reads or writes the memory of a group's arrays, and of those before it."""
    group_of = {name: i for i, names in enumerate(groups) for name in names}
    ends = [0] * len(groups)
    for old, _ in placement.copies:  # they are made when all has run
        if old in group_of:
            ends[group_of[old]] = len(order)
    for position, node in enumerate(order):
        for value in (*values_read(node), *node.outputs):
            name = value.name or ""
            group = group_of.get(placement.at_input.get(name, name))
            if group is not None:
                ends[group] = max(ends[group], position + 1)
    for i in range(1, len(ends)):
        ends[i] = max(ends[i], ends[i - 1])
    return ends
