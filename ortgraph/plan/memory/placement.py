"""From a graph in a fixed order to a place for every value: the arena, an input's own memory, or the runtime's."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.analysis.liveness import Liveness, nbytes, values_read
from ortgraph.errors import PlanError
from ortgraph.graph.edit import static_shape
from ortgraph.ops.spec import spec_of
from ortgraph.plan.memory.problem import Buffer, MemoryProblem
from ortgraph.plan.memory.solution import MemorySolution
from ortgraph.plan.memory.solve import solve
from ortgraph.plan.memory.validate import validate

logger = logging.getLogger(__name__)
METADATA_KEY = "ortgraph.plan"
VERSION = 1
# Greedy meets the bound of most graphs at once. The rest is mostly solved within a few rounds, which end long before the
# deadline, so that the same graph gets the same plan.
_SECONDS = 2.0
_ROUNDS = 3
_LONGER = 10.0  # where the arena would exceed a budget
# ONNX Runtime runs these as soon as their input is there, wherever they stand in the file: what they write has no
# place in an arena whose lifetimes follow the file.
_RUN_EARLY = frozenset({("", "Shape"), ("", "Size"), ("ai.onnx", "Shape"), ("ai.onnx", "Size")})
_VARIADIC = frozenset({"Sum", "Max", "Min", "Mean"})


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where every value of a program lives.

    Attributes:
        offsets: Arena offset by value name; aliases and in-place results share the offset of their storage.
        at_input: Graph input whose memory a value uses, by value name: aliases of inputs, and updates written
            straight over the old value.
        copies: (input, output) updates that are copied after the run, since writing them in place is not safe.
        unbound: Values without a static size; the runtime allocates them.
        in_place: Value written over another one, by name of the new value.
        problem: The placement problem that was solved.
        solution: Its solution.
    """

    offsets: Mapping[str, int]
    at_input: Mapping[str, str]
    copies: tuple[tuple[str, str], ...]
    unbound: tuple[str, ...]
    in_place: Mapping[str, str]
    problem: MemoryProblem
    solution: MemorySolution

    def to_json(self, program: str) -> str:
        """The plan as stored in a model's metadata, under METADATA_KEY."""
        return json.dumps(
            {
                "version": VERSION,
                "program": program,
                "arena_bytes": self.solution.arena_bytes,
                "max_load_bytes": self.solution.bound,
                "solver": self.solution.solver,
                "offsets": {b.name: self.offsets[b.name] for b in self.problem.buffers},
                "in_place": dict(self.in_place),
                "at_input": dict(self.at_input),
            },
            separators=(",", ":"),
        )


def stored_plan(model: ir.Model) -> dict[str, Any] | None:
    """The plan in a model's metadata (``Placement.to_json``): None without one, empty when it does not parse."""
    text = model.metadata_props.get(METADATA_KEY)
    if text is None:
        return None
    try:
        plan = json.loads(text)
        numbers = [plan["arena_bytes"], plan["max_load_bytes"], *plan["offsets"].values()]
        if isinstance(plan["program"], str) and all(isinstance(n, int) for n in numbers):
            return plan
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    return {}


def place_values(
    graph: ir.Graph,
    order: Sequence[ir.Node],
    wanted: Collection[ir.Value],
    pairs: Iterable[tuple[ir.Value, ir.Value]],
    known: Mapping[str, int] | None = None,
    loss: ir.Value | None = None,
    shared: bool = True,
    capacity: int | None = None,
    elementwise: bool = False,
    outside: Collection[ir.Value] = (),
) -> Placement:
    """Decide in-place updates, in-place operators and arena offsets.

    Args:
        graph: The graph; shapes static where values are to be placed.
        order: The order of execution.
        wanted: Values read after the run.
        pairs: (input, new value) of everything that the run replaces; the new values are among ``wanted``.
        loss: No input is overwritten before this value is computed (see ``order_updates``).
        shared: Let values share memory. Without, every value has its own for the whole run, in place of nothing, and
            updates are copied at the end: right in any order of execution.
        known: Offsets by storage name of an earlier plan of the same program; used if they fit and are valid.
        capacity: Bytes that the arena should not exceed; the search takes more time before it does.
        elementwise: Nothing but element-wise operators writes over its inputs: on a device, where the operator table's
            facts about kernels of the processor do not hold.
        outside: Values that are written to memory of the caller's. They and their aliases get no place: ``at_input``
            names the first of each storage.

    Raises:
        PlanError: The solver's result is invalid (a defect).
    """
    live = Liveness(graph, order, wanted)
    at_input = {v: root for root in live.persistent for v in live.members(root) if v is not root}
    at_input.update((v, live.storage(o)) for o in outside for v in live.members(live.storage(o)))
    computed_at = live.position.get(loss.producer(), -1) if loss is not None else -1  # type: ignore[arg-type]
    copies = _place_updates(live, pairs, at_input, computed_at, elementwise) if shared else list(pairs)
    merged, last, in_place = _reuse_inputs(live, at_input, elementwise) if shared else ({}, {}, {})
    buffers, unbound = [], []
    members: dict[ir.Value, list[ir.Value]] = {}
    for storage in live.storages():
        if storage in at_input:
            continue
        head = merged.get(storage, storage)
        members.setdefault(head, []).extend(live.members(storage))
    for head, values in members.items():
        size = nbytes(head)
        if size is None or runs_early(head):
            unbound += [v.name or "" for v in values]
            continue
        lower, upper = (live.born(head), last[head] + 1) if shared else (0, live.end + 1)
        buffers.append(Buffer(head.name or "", lower, upper, size))
    problem = MemoryProblem(tuple(buffers))
    solution = _solution(problem, known, capacity)
    validate(problem, solution)
    offsets = {
        v.name or "": solution.offsets[head.name or ""]
        for head, values in members.items()
        if head.name in solution.offsets
        for v in values
    }
    return Placement(
        offsets,
        {v.name or "": i.name or "" for v, i in at_input.items()},
        tuple((i.name or "", v.name or "") for i, v in copies),
        tuple(unbound),
        {o.name or "": i.name or "" for o, i in in_place.items()},
        problem,
        solution,
    )


def _solution(problem: MemoryProblem, known: Mapping[str, int] | None, capacity: int | None) -> MemorySolution:
    stored = _stored_solution(problem, known)
    if stored is not None and (capacity is None or stored.arena_bytes <= capacity):
        return stored
    solution = solve(problem, _SECONDS, max_rounds=_ROUNDS)
    if capacity is not None and solution.bound <= capacity < solution.arena_bytes:
        longer = solve(problem, _LONGER, capacity=capacity)
        solution = min(solution, longer, key=lambda s: s.arena_bytes)
    return solution


def _stored_solution(problem: MemoryProblem, known: Mapping[str, int] | None) -> MemorySolution | None:
    if known is None or {b.name for b in problem.buffers} != set(known):
        return None
    total = max((known[b.name] + problem.aligned(b) for b in problem.buffers), default=0)
    solution = MemorySolution(dict(known), total, problem.max_load(), "stored plan", 0.0)
    try:
        if total > sum(problem.aligned(b) for b in problem.buffers):
            raise PlanError(f"an arena of {total} bytes is more than every value by itself takes")
        validate(problem, solution)
    except PlanError as error:
        logger.warning("the stored memory plan does not fit the graph (%s); planning anew", error)
        return None
    return solution


def _place_updates(
    live: Liveness,
    pairs: Iterable[tuple[ir.Value, ir.Value]],
    at_input: dict[ir.Value, ir.Value],
    loss_at: int,
    elementwise: bool,
) -> list[tuple[ir.Value, ir.Value]]:
    """Put each update over the value that it replaces where the order makes that safe; return the others."""
    copies = []
    for old, new in pairs:
        storage = live.storage(new)
        if storage in at_input or not may_overwrite_at(live, old, new, loss_at, elementwise):
            copies.append((old, new))
            continue
        at_input.update((v, old) for v in live.members(storage))
    return copies


def may_overwrite_at(live: Liveness, old: ir.Value, new: ir.Value, loss_at: int, elementwise: bool = False) -> bool:
    """Whether the run may write ``new`` straight over graph input ``old``, in this order and after step ``loss_at``."""
    storage = live.storage(new)
    if storage in live.constants or storage in live.persistent or runs_early(storage):
        return False
    return live.born(storage) > loss_at and _may_overwrite(live, old, storage, elementwise)


def runs_early(value: ir.Value) -> bool:
    """Whether ONNX Runtime computes the value as soon as its input is there, wherever its node stands."""
    node = value.producer()
    return node is not None and (node.domain, node.op_type) in _RUN_EARLY


def _may_overwrite(live: Liveness, old: ir.Value, new: ir.Value, elementwise: bool) -> bool:
    """Whether storage ``new`` may be written over graph input ``old``: nothing reads the old bytes at or after that."""
    size = nbytes(old)
    if size is None or size != nbytes(new) or old.dtype != new.dtype:
        return False
    if any(v in live.wanted for v in live.members(old)):
        return False
    writer = live.born(new)
    readers = live.reading_steps(old)
    if any(t > writer for t in readers):
        return False
    if writer not in readers:
        return True
    return _kernel_may_overwrite(live, live.order[writer], old, new, elementwise)


def _kernel_may_overwrite(live: Liveness, node: ir.Node, old: ir.Value, new: ir.Value, elementwise: bool) -> bool:
    """Whether the node's kernel may write ``new`` while it reads storage ``old``, by the operator table."""
    pairs = {i for i, o in _inplace(node, elementwise) if o == new.index()}
    direct = [i for i, v in enumerate(node.inputs) if v is not None and live.storage(v) is old]
    captured = sum(1 for v in values_read(node) if live.storage(v) is old) > len(direct)
    if captured or not direct:
        return False
    return all(i in pairs and _same_type(node.inputs[i], new) for i in direct)


def _inplace(node: ir.Node, elementwise: bool) -> tuple[tuple[int, int], ...]:
    """The operator table's pairs; none for variadic operators where kernels are not those of the table: they may go
    through their inputs one by one."""
    spec = spec_of(node)
    if elementwise and not (spec.elementwise and node.op_type not in _VARIADIC):
        return ()
    return spec.inplace


def _same_type(a: ir.Value | None, b: ir.Value) -> bool:
    return a is not None and a.dtype == b.dtype and static_shape(a) == static_shape(b)


def _reuse_inputs(
    live: Liveness, at_input: Mapping[ir.Value, ir.Value], elementwise: bool
) -> tuple[dict[ir.Value, ir.Value], dict[ir.Value, int], dict[ir.Value, ir.Value]]:
    """Let nodes write over inputs that die with them. Returns (storage to shared storage, last step, in-place map)."""
    merged: dict[ir.Value, ir.Value] = {}
    last = {s: live.last(s) for s in live.storages() if s not in at_input and not runs_early(s)}
    in_place: dict[ir.Value, ir.Value] = {}
    for t, node in enumerate(live.order):
        taken: set[ir.Value] = set()
        for i, o in _inplace(node, elementwise):
            source = node.inputs[i] if i < len(node.inputs) else None
            result = node.outputs[o] if o < len(node.outputs) else None
            if (
                source is None
                or result is None
                or not result.name
                or result in in_place
                or live.storage(result) is not result
                or result not in last
            ):
                continue
            head = merged.get(live.storage(source), live.storage(source))
            if (
                head not in last
                or head in taken
                or last[head] != t
                or nbytes(result) is None
                or nbytes(result) != nbytes(head)
            ):
                continue
            if not _reads_only(live, node, merged, head, result, elementwise):
                continue
            merged[result] = head
            last[head] = max(t, last[result])
            in_place[result] = source
            taken.add(head)
    return merged, last, in_place


def _reads_only(
    live: Liveness,
    node: ir.Node,
    merged: Mapping[ir.Value, ir.Value],
    head: ir.Value,
    result: ir.Value,
    elementwise: bool,
) -> bool:
    """Whether every read of the shared storage by this node may be overwritten by ``result``."""
    pairs = {i for i, o in _inplace(node, elementwise) if o == result.index()}

    def shares(value: ir.Value) -> bool:
        storage = live.storage(value)
        return merged.get(storage, storage) is head

    direct = [i for i, v in enumerate(node.inputs) if v is not None and shares(v)]
    if sum(1 for v in values_read(node) if shares(v)) > len(direct):
        return False
    return all(i in pairs and _same_type(node.inputs[i], result) for i in direct)
