"""A program run node by node over its planned memory, with every byte accounted for: finds wrong plans and kernels.

The plan is not trusted. Lifetimes are found anew from the graph, and after each node four things hold, or a PlanError
names the node and the value:

1. no output lies over a value that is still to be read (lifetimes, wrong updates);
2. each output equals, bit for bit, what the node computes into memory of its own (wrong in-place pairs, kernels that
   rely on what their output held before);
3. no other byte of the arena changed (writes beyond a buffer);
4. what died is overwritten with NaN, so that a read of it later on shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ortgraph.analysis.liveness import Liveness, values_read
from ortgraph.errors import PlanError, RuntimeSetupError
from ortgraph.graph.edit import static_shape
from ortgraph.ops import generated, kernels
from ortgraph.ops.spec import GENERATED, KERNELS, spec_of
from ortgraph.runtime.arena import POISON
from ortgraph.runtime.binding import bind_input, bind_output, copy_of

if TYPE_CHECKING:
    from ortgraph.plan.memory.placement import Placement
    from ortgraph.runtime.program import Program

_HINT = "plan the graph anew; if that does not help, report the graph and this message"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value lives: bytes ``start <= address < end``."""

    start: int
    end: int

    def overlaps(self, other: Place) -> bool:
        return self.start < other.end and other.start < self.end


class CheckedRun:
    """Runs a program once, node by node, and checks its memory. See ``check_program``."""

    def __init__(self, program: Program, model: ir.Model, threads: int | None) -> None:
        self.program, self.model, self.threads = program, model, threads
        self.constants = {
            v.name or "": v.const_value.numpy() for v in model.graph.initializers.values() if v.const_value is not None
        }
        self.live = Liveness(model.graph, program.order, program.wanted_values)
        self.base, self.arena = program.arena_range()[0], program.arena_bytes_now
        self.arena.fill(POISON)
        self.shadow = self.arena.copy()
        self.unbound: dict[str, np.ndarray] = {}
        self.last = {v: self._last(v) for v in self._values()}
        self.places = {v: place for v in self._values() if (place := self._place(v)) is not None}

    def run(self) -> None:
        """Run all nodes, then the copies that the program makes at its end."""
        active = {v: p for v, p in self.places.items() if v.is_graph_input()}
        for step, node in enumerate(self.program.order):
            outputs = [o for o in node.outputs if o.name]
            self._no_overlap(step, node, outputs, active)
            self._run(node, outputs)
            active.update({o: self.places[o] for o in outputs if o in self.places})
            self._only_outputs_changed(node, outputs)
            for value in [v for v in active if self.last[v] <= step]:
                place = active.pop(value)
                self._poison(place, active.values())

    def _values(self) -> Iterator[ir.Value]:
        yield from dict.fromkeys(
            v for node in self.program.order for v in (*values_read(node), *node.outputs) if v.name
        )

    def _last(self, value: ir.Value) -> int:
        """The last step that reads the value itself; its aliases have places and lifetimes of their own."""
        if value in self.live.wanted:
            return self.live.end
        return max(self.live.readers.get(value, ()), default=self.live.position.get(value.producer(), -1))  # type: ignore[arg-type]

    def _place(self, value: ir.Value) -> Place | None:
        """Its bytes; None for constants and for what the runtime allocates."""
        name = value.name or ""
        if name in self.program.placement.unbound or name in self.constants:
            return None
        array = self.program.array_of(value)
        start = array.ctypes.data
        return Place(start, start + array.nbytes)

    def _no_overlap(self, step: int, node: ir.Node, outputs: Sequence[ir.Value], active: dict[ir.Value, Place]) -> None:
        for output in outputs:
            place = self.places.get(output)
            if place is None:
                continue
            for value, other in active.items():
                if self.last[value] > step and place.overlaps(other) and not self._same_bytes(output, value):
                    raise PlanError(
                        f"{_named(node)} writes %{output.name} over %{value.name}, which {self._reader(value, step)}",
                        _HINT,
                    )

    def _same_bytes(self, a: ir.Value, b: ir.Value) -> bool:
        """Whether two values are one storage by the alias facts, at one place."""
        return self.live.storage(a) is self.live.storage(b) and self.places[a] == self.places[b]

    def _reader(self, value: ir.Value, step: int) -> str:
        later = [t for t in self.live.readers.get(value, ()) if t > step]
        return f"{_named(self.program.order[later[0]])} still reads" if later else "is a result of the program"

    def _run(self, node: ir.Node, outputs: Sequence[ir.Value]) -> None:
        inputs = {v.name or "": self._array(v) for v in dict.fromkeys(values_read(node)) if v.name}
        session = _session(self.model, node, inputs, outputs, self.threads)
        apart = _run_node(session, node, inputs, {})
        for output, array in zip(outputs, apart, strict=True):
            if output not in self.places:
                self.unbound[output.name or ""] = array
        bound = {o.name or "": self.program.array_of(o) for o in outputs if o in self.places}
        for name, array in bound.items():
            self._clear(name, array, inputs.values())
        _run_node(session, node, inputs, bound)
        if not spec_of(node).deterministic:
            return
        for output, expected in zip(outputs, apart, strict=True):
            actual = bound.get(output.name or "")
            if actual is not None and actual.tobytes() != np.asarray(expected).tobytes():
                raise PlanError(self._wrong(node, output), _HINT)

    def _clear(self, name: str, array: np.ndarray, inputs: Iterable[np.ndarray]) -> None:
        """NaN where an output goes, unless an input lies there."""
        if not any(np.may_share_memory(array, other) for other in inputs):
            array.reshape(-1).view(np.uint8).fill(POISON)

    def _wrong(self, node: ir.Node, output: ir.Value) -> str:
        place = self.places[output]
        under = [v for v in dict.fromkeys(values_read(node)) if v in self.places and place.overlaps(self.places[v])]
        if under:
            return f"{_named(node)} does not compute %{output.name} when that lies over its input %{under[0].name}"
        return f"{_named(node)} computes another %{output.name} when its memory held NaN before"

    def _array(self, value: ir.Value) -> np.ndarray:
        name = value.name or ""
        if name in self.constants:
            return self.constants[name]
        return self.unbound[name] if name in self.unbound else self.program.array_of(value)

    def _only_outputs_changed(self, node: ir.Node, outputs: Sequence[ir.Value]) -> None:
        for output in outputs:
            for part in self._in_arena(output):
                self.shadow[part] = self.arena[part]
        if np.array_equal(self.shadow, self.arena):
            return
        at = int(np.flatnonzero(self.shadow != self.arena)[0])
        near = [f"%{v.name}" for v, p in self.places.items() if p.start <= self.base + at < p.end and v not in outputs]
        raise PlanError(
            f"{_named(node)} writes at byte {at} of the arena, outside of its outputs"
            + (f" (the place of {', '.join(near[:3])})" if near else " (between buffers)"),
            "do not use this kernel; report it",
        )

    def _in_arena(self, value: ir.Value) -> list[slice]:
        place = self.places.get(value)
        if place is None or not self.base <= place.start < self.base + self.arena.nbytes:
            return []
        return [slice(place.start - self.base, place.end - self.base)]

    def _poison(self, place: Place, active: Iterable[Place]) -> None:
        """Overwrite what no living value covers; only in the arena."""
        start, end = place.start - self.base, place.end - self.base
        if start < 0 or end > self.arena.nbytes:
            return
        free = np.ones(end - start, bool)
        for other in active:
            if place.overlaps(other):
                free[max(0, other.start - place.start) : max(0, other.end - place.start)] = False
        for part in (self.arena[start:end], self.shadow[start:end]):
            part[free] = POISON


def check_program(program: Program, model: ir.Model, threads: int | None = None) -> None:
    """Run a program once, node by node, with the checks of this module. Results are where ``Program.run`` leaves them.

    Args:
        program: With its batch in the input buffers.
        model: The model that the program was made from.
        threads: Threads of one operator.

    Raises:
        PlanError: Something is wrong with the plan or a kernel; the message names node and value.
        RuntimeSetupError: ONNX Runtime refuses a node by itself.
    """
    CheckedRun(program, model, threads).run()
    program.copy_updates()


def unused_bytes(placement: Placement, nbytes: int) -> np.ndarray:
    """Which bytes of an arena of ``nbytes`` belong to no value at any time: bool [nbytes]."""
    unused = np.ones(nbytes, bool)
    for buffer in placement.problem.buffers:
        start = placement.solution.offsets[buffer.name]
        unused[start : start + buffer.size] = False
    return unused


def check_guards(placement: Placement, arena: np.ndarray, program: str) -> None:
    """Raise PlanError when a byte that belongs to no value is not POISON any more.

    Args:
        placement: The plan of the program that ran.
        arena: All bytes of the arena, uint8, poisoned before the run.
        program: Its name.
    """
    changed = np.flatnonzero(unused_bytes(placement, arena.nbytes) & (arena != POISON))
    if not len(changed):
        return
    at = int(changed[0])
    offsets = {b.name: placement.solution.offsets[b.name] + b.size for b in placement.problem.buffers}
    before = max((name for name, end in offsets.items() if end <= at), key=lambda n: offsets[n], default="?")
    raise PlanError(
        f"program {program}: byte {at} of the arena changed, which belongs to no value (the one before it: %{before})",
        "session.check_memory(batch) finds the node",
    )


def _named(node: ir.Node) -> str:
    return f"node {node.name!r} ({node.op_type})"


def _session(
    model: ir.Model, node: ir.Node, inputs: dict[str, np.ndarray], outputs: Sequence[ir.Value], threads: int | None
):  # noqa: ANN202
    import onnx
    import onnxruntime as ort

    from ortgraph.runtime.options import session_options

    proto = onnx.ModelProto(ir_version=min(model.ir_version, 10))
    proto.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in sorted(model.graph.opset_imports.items()))
    proto.graph.name = "node"
    proto.graph.node.append(generated.serialize_node(node))
    for name, array in inputs.items():
        element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        proto.graph.input.append(onnx.helper.make_tensor_value_info(name, element, array.shape))
    for value in outputs:
        shape = static_shape(value)
        proto.graph.output.append(onnx.helper.make_tensor_value_info(value.name or "", int(value.dtype or 0), shape))
    proto.functions.extend(generated.other_functions(model))
    options = session_options(threads)
    if node.domain == KERNELS:
        options.register_custom_ops_library(str(kernels.library_path()))
    if node.domain == GENERATED:
        options.register_custom_ops_library(str(generated.library_path(model)))
    try:
        return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - the runtime's exception types are private; the cause is chained
        raise RuntimeSetupError(f"ONNX Runtime refuses {_named(node)} by itself: {error}", "report the node") from error


def _run_node(session, node: ir.Node, inputs: dict[str, np.ndarray], bound: dict[str, np.ndarray]) -> list[np.ndarray]:  # noqa: ANN001
    """Outputs in order: the bound arrays, and copies of what the runtime allocated."""
    binding = session.io_binding()
    given = {v.name for v in session.get_inputs()}
    for name, array in inputs.items():
        if name in given:
            bind_input(binding, name, array)
    names = [o.name for o in session.get_outputs()]
    for name in names:
        target = bound.get(name)
        if target is None:
            binding.bind_output(name, "cpu", 0)
        else:
            bind_output(binding, name, target.dtype, target.shape, target.ctypes.data)
    session.run_with_iobinding(binding)
    made = binding.get_outputs()
    return [bound[n] if n in bound else copy_of(made[i]) for i, n in enumerate(names)]
