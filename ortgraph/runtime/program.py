"""A program: the part of a training graph that some outputs need, ordered, placed, bound, in its own ORT session."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ortgraph.analysis.liveness import values_read
from ortgraph.errors import BatchError, PlanError
from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.plan.memory.placement import Placement, place_values, stored_plan
from ortgraph.plan.schedule import order_updates
from ortgraph.plan.stored_budget import stored_budget, warn_if_over
from ortgraph.runtime.arena import Memory
from ortgraph.runtime.binding import bind_input, bind_output
from ortgraph.runtime.debug_arena import check_guards, check_program
from ortgraph.runtime.device import address_of
from ortgraph.runtime.limits import refuse_limits
from ortgraph.runtime.ort_session import inputs_read, make_session

if TYPE_CHECKING:
    import onnxruntime

logger = logging.getLogger(__name__)


def needed_nodes(graph: ir.Graph, wanted: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes that the wanted values depend on, in graph order."""
    seen: set[ir.Node] = set()
    stack = [v.producer() for v in wanted]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(v.producer() for v in values_read(node))
    return [node for node in graph if node in seen]


def order_program(
    graph: TrainingGraph, wanted: Sequence[ir.Value], pairs: Sequence[tuple[ir.Value, ir.Value]]
) -> list[ir.Node]:
    """The order of execution: the file's when the graph is planned, else with updates moved (order_updates)."""
    nodes = needed_nodes(graph.graph, wanted)
    if graph.stage == "planned" or not pairs:
        return nodes
    return order_updates(graph.graph, pairs, results_of(graph, pairs), nodes, loss_value(graph))


def results_of(graph: TrainingGraph, pairs: Sequence[tuple[ir.Value, ir.Value]]) -> list[ir.Value]:
    """Graph outputs that replace nothing: what they need keeps its place, all else runs as early as it can.

    Sums of gradients (accumulators) are none: ``step`` and ``accumulate`` add each gradient as soon as it is there.
    """
    updates = {new for _, new in pairs}
    signature = graph.signature
    names = {signature.loss, *signature.outputs, *signature.gradients.values(), *signature.input_gradients.values()}
    return [v for v in graph.graph.outputs if v.name in names and v not in updates]


def loss_value(graph: TrainingGraph) -> ir.Value | None:
    """The graph output with the loss, None when the graph has lost it."""
    name = graph.signature.loss
    return next((v for v in graph.graph.outputs if v.name == name), None)


def stored_offsets(graph: TrainingGraph, program: str) -> Mapping[str, int] | None:
    """The offsets that PlanMemory stored for this program, None when there are none."""
    plan = stored_plan(graph.model)
    if plan == {}:
        logger.warning("the stored memory plan does not parse; planning anew")
        return {}
    return None if plan is None or plan["program"] != program else plan["offsets"]


class Program:
    """One way to run a graph: all memory bound once, nothing allocated at a run.

    Args:
        name: ``step``, ``accumulate``, ``gradients``, ``loss`` or ``evaluate``.
        graph: Lowered, with static shapes. Not changed.
        wanted: Names of the graph outputs to compute.
        pairs: (input, output) names of what a run replaces; the outputs are among ``wanted``.
        memory: The session's memory; persistent inputs are there already.
        threads: Threads of one operator.
        poison: Overwrite the arena before each run (debugging).

    Raises:
        PlanError: The graph and the request do not fit together.
        BatchError, UnsupportedError: See ``refuse_limits``.
        RuntimeSetupError: ONNX Runtime refuses the graph.
    """

    def __init__(
        self,
        name: str,
        graph: TrainingGraph,
        wanted: Sequence[str],
        pairs: Sequence[tuple[str, str]],
        memory: Memory,
        threads: int | None = None,
        poison: bool = False,
        profile_prefix: str | None = None,
    ) -> None:
        start = time.perf_counter()
        self._made_with = (name, graph, wanted, pairs, memory, threads)
        self.name, self._memory, self._poison = name, memory, poison
        outputs = {v.name: v for v in graph.graph.outputs}
        missing = [n for n in wanted if n not in outputs]
        if missing:
            raise PlanError(
                f"program {name}: the graph has no output {missing[0]!r}", "check the signature (`ortgraph verify`)"
            )
        self._values: dict[str, ir.Value] = {n: outputs[n] for n in wanted}
        inputs = {v.name: v for v in graph.graph.inputs}
        value_pairs = [(inputs[i], outputs[o]) for i, o in pairs]
        results = list(self._values.values())
        self.order = order_program(graph, results, value_pairs)
        refuse_limits(name, self.order)
        offsets, loss = stored_offsets(graph, name), loss_value(graph)
        limit = stored_budget(graph, name)
        self.placement: Placement = place_values(
            graph.graph,
            self.order,
            results,
            value_pairs,
            offsets,
            loss,
            capacity=limit,
            elementwise=not memory.device.on_host,
        )
        warn_if_over(name, self.arena_bytes, limit)
        self._constants = {
            n: v.const_value.numpy()
            for n, v in self._values.items()
            if v.const_value is not None and v.is_initializer()
        }
        self._input_values = inputs_read(graph.graph, self.order)
        self.inputs: dict[str, Any] = {}
        for value in (*self._input_values, *(v for v in results if v.is_graph_input())):
            self.inputs[value.name or ""] = self._input_buffer(value)
        self._apart: dict[str, Any] = {}
        self._list_bound()
        self._session, rewritten = self._make_session(graph, threads, profile_prefix)
        if rewritten:
            logger.warning(
                "program %s: ONNX Runtime replaces %s by nodes of its own, whose order is not ours; "
                "every value gets memory of its own",
                name, ", ".join(rewritten),
            )  # fmt: skip
            self.placement = place_values(graph.graph, self.order, results, value_pairs, loss=loss, shared=False)
            self._list_bound()
            self._session, _ = self._make_session(graph, threads, profile_prefix)
        self._binding: onnxruntime.IOBinding | None = None
        self._generation = -1
        logger.info(
            "program %s: %d nodes, arena %.2f MB (max-load %.2f MB), %d in place, %d updates copied, planned in %.2f s",
            name, len(self.order), self.arena_bytes / 1e6, self.placement.solution.bound / 1e6,
            len(self.placement.in_place), len(self.placement.copies), time.perf_counter() - start,
        )  # fmt: skip

    @property
    def arena_bytes(self) -> int:
        return self.placement.solution.arena_bytes

    @property
    def max_load_bytes(self) -> int:
        return self.placement.solution.bound

    def _input_buffer(self, value: ir.Value) -> Any:
        name = value.name or ""
        if name in self._memory.persistent:
            return self._memory.persistent[name]
        shape = static_shape(value)
        if shape is None or value.dtype is None:
            raise PlanError(
                f"program {self.name}: input %{name} has no static shape", "bind the symbolic dimensions first"
            )
        return self._memory.batch(name, value.dtype.numpy(), shape)

    def _list_bound(self) -> None:
        """What is bound to an address, and which wanted outputs the runtime allocates."""
        placement = self.placement
        computed = computed_in_order(self.order)
        self._bound = [v for v in computed if v.name in placement.offsets or v.name in placement.at_input]
        unbound = {v.name for v in computed} & set(placement.unbound)
        self._unbound = [n for n in self._values if n in unbound]
        if self._memory.device.on_host:
            return
        for value in self._bound:  # why: a part of device memory is not read by itself
            name, shape = value.name or "", static_shape(value)
            if name in self._values and name in placement.offsets and name not in self._apart:
                assert shape is not None and value.dtype is not None
                self._apart[name] = self._memory.zeros(value.dtype.numpy(), shape)

    def _make_session(
        self, graph: TrainingGraph, threads: int | None, profile_prefix: str | None
    ) -> tuple[onnxruntime.InferenceSession | None, list[str]]:
        """The runtime's session, and the operators that it replaces by others (functions without kernel, casts)."""
        extra = [self._values[n] for n in self._unbound]
        bound = [*self._bound, *extra]
        device = self._memory.device
        return make_session(
            self.name, graph.model, self.order, self._input_values, bound, threads, device, profile_prefix
        )

    def _bound_session(self) -> onnxruntime.IOBinding:
        """Every input and every placed value bound at its address; bound anew when the arena has moved."""
        arena = self._memory.arena
        if self._binding is not None and self._generation == arena.generation:
            return self._binding
        arena.ensure(self.arena_bytes)
        assert self._session is not None
        binding = self._session.io_binding()
        for value in self._input_values:
            bind_input(binding, value.name or "", self.inputs[value.name or ""])
        for value in self._bound:
            name = value.name or ""
            shape, dtype = static_shape(value) or (), value.dtype.numpy()  # type: ignore[union-attr]
            bind_output(binding, name, dtype, shape, self._address(name), self._memory.device)
        self._binding, self._generation = binding, arena.generation
        return binding

    def _address(self, name: str) -> int:
        """Where a bound value is written."""
        if name in self._apart:
            return address_of(self._apart[name])
        at = self.placement.at_input.get(name)
        if at is not None:
            return address_of(self._memory_of(at))
        return self._memory.arena.address + self.placement.offsets[name]

    def _memory_of(self, name: str) -> Any:
        found = self.inputs.get(name)
        return self._memory.persistent[name] if found is None else found

    def arena_range(self) -> tuple[int, int]:
        """Address and bytes of the arena, with everything bound to it."""
        if self._session is not None:
            self._bound_session()
        return self._memory.arena.address, self._memory.arena.nbytes

    def run(self) -> None:
        """Run once on what the input buffers hold, then copy the updates that could not be written in place.

        Raises:
            BatchError: An operator refuses the batch's values, such as an index out of range.
        """
        if self._session is not None:
            binding = self._bound_session()
            for name in self._unbound:
                binding.bind_output(name, "cpu", 0)
            if self._poison:
                self._memory.arena.poison()
            self._run_bound(binding)
            if self._poison:
                check_guards(self.placement, self._memory.arena.everything, self.name)
        self.copy_updates()

    def copy_updates(self) -> None:
        """Copy the updates that could not be written in place; ``run`` ends with it."""
        staged = [(self._memory.persistent[old], self._source(new)) for old, new in self.placement.copies]
        for target, source in staged:
            target[...] = source

    def check(self) -> None:
        """Run once, node by node, with every byte of the plan checked. See ``ortgraph.runtime.debug_arena``.

        Raises:
            PlanError: The plan or a kernel is wrong; names node and value.
        """
        _, graph, _, _, _, threads = self._made_with
        self.arena_range()
        for name in self._unbound:
            self._binding.bind_output(name, "cpu", 0)  # type: ignore[union-attr]
        check_program(self, graph.model, threads)

    def _run_bound(self, binding: onnxruntime.IOBinding) -> None:
        assert self._session is not None
        self._run_session(self._session, binding)

    def _run_session(self, session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding) -> None:
        try:
            if not self._memory.device.on_host:
                binding.synchronize_inputs()
            session.run_with_iobinding(binding)
        except Exception as error:  # noqa: BLE001 - the runtime's exception types are private; the cause is chained
            text = str(error).strip()
            values = any(word in text.lower() for word in ("out of", "outside", "must be within", "indices"))
            raise BatchError(
                f"program {self.name} stopped: {text}",
                "look for indices or labels outside their range in the batch"
                if values
                else "when the batch holds valid indices and labels, report this; another preset may run",
            ) from error

    def _source(self, name: str) -> np.ndarray:
        """What to copy; snapshotted when it lies in a buffer that another copy may overwrite."""
        value = self.value(name)
        return value.copy() if self._values[name].is_graph_input() or name in self.placement.at_input else value

    def value(self, name: str) -> np.ndarray:
        """A wanted output after a run: a view that the next run changes, or on a device a copy."""
        value = self._values[name]
        if name in self._constants:
            return self._constants[name]
        if value.is_graph_input():
            return self._memory_of(name)
        if name in self._apart:
            return self._apart[name].copy()
        if name in self._unbound:
            position = len(self._bound) + self._unbound.index(name)
            assert self._binding is not None, "the program has not run"
            return self._binding.get_outputs()[position].numpy()
        return self.array_of(value)

    def array_of(self, value: ir.Value) -> np.ndarray:
        """A view of the place of a graph input, or of a value that the plan places."""
        name = value.name or ""
        if value.is_graph_input():
            return self._memory_of(name)
        shape, dtype = static_shape(value) or (), value.dtype.numpy()  # type: ignore[union-attr]
        at = self.placement.at_input.get(name)
        if at is not None:
            return np.asarray(self._memory_of(at)).reshape(-1).view(dtype).reshape(shape)
        return self._memory.arena.view(self.placement.offsets[name], dtype, shape)

    @property
    def wanted_values(self) -> tuple[ir.Value, ...]:
        """The graph outputs that the program computes."""
        return tuple(self._values.values())

    @property
    def arena_bytes_now(self) -> np.ndarray:
        """All bytes of the session's arena, uint8."""
        return self._memory.arena.everything

    def again(self, profile_prefix: str | None = None) -> Program:
        """The same program on the same memory with a session of its own; with a prefix that writes a profile."""
        return Program(*self._made_with, profile_prefix=profile_prefix)

    def end_profiling(self) -> str:
        """Path of ONNX Runtime's profile; only for a program made with a profile prefix."""
        assert self._session is not None, "the program has no nodes"
        return self._session.end_profiling()


def computed_in_order(order: Sequence[ir.Node]) -> list[ir.Value]:
    """All named outputs of the nodes, in order."""
    return [o for node in order for o in node.outputs if o.name]
