"""The largest batch whose training step fits into a given memory, recomputation allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ortgraph.errors import InputError, PlanError
from ortgraph.graph import TrainingGraph
from ortgraph.plan.budget import budget_bytes, size_text
from ortgraph.plan.footprint import Footprint, footprint
from ortgraph.plan.program_plan import ProgramPlan, plan_program, replan
from ortgraph.plan.ready import free_dimensions, ready_graph

_PROBES = (16, 8, 4)
_LARGEST = 1 << 20  # a model whose step does not grow with the batch fits any


@dataclasses.dataclass(frozen=True)
class BatchFit:
    """One batch size.

    Attributes:
        size: Of the dimension.
        fixed: Memory outside the arena.
        least: Bytes that no plan goes below: fixed, memory floor, largest kernel scratch.
        needed: Bytes of the whole step: fixed, arena, largest kernel scratch; ``least`` without a plan.
        plan: The plan that fits; None when none does.
        graph: The graph that the plan is of; None without a plan.
        reason: Why it does not fit.
    """

    size: int
    fixed: Footprint
    least: int
    needed: int
    plan: ProgramPlan | None
    graph: TrainingGraph | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The answer.

    Attributes:
        dim: Name of the dimension.
        memory: Bytes that the step may take.
        fit: The largest size that fits, and its plan.
        next: The next larger size and why it does not fit; None when the search ended at its limit.
        tried: Sizes tried, in order.
    """

    dim: str
    memory: int
    fit: BatchFit
    next: BatchFit | None
    tried: tuple[int, ...]


def largest_batch(
    graph: TrainingGraph,
    memory: str | int,
    dim: str = "batch",
    *,
    sizes: Mapping[str, int] | None = None,
    max_overhead: float | None = None,
    pipeline: str | None = None,
    optimizer: Any = None,
    target: str = "onnxruntime-training",
    seconds: float = 2.0,
    reorder: bool = True,
    program: str | None = None,
    largest: int = _LARGEST,
    tell: Callable[[str], None] = lambda text: None,
) -> LargestBatch:
    """Grow the batch until it no longer fits, then bisect; each size is optimized and planned as it would be run.

    What must fit: parameters, states, batch, constants, the arena (gradients are in it) and the largest kernel scratch.
    The runtime's own memory is not counted.

    Args:
        graph: At any stage, with ``dim`` symbolic.
        memory: Bytes, or ``4GB``, ``900MiB``.
        dim: Dimension that grows.
        sizes: Sizes of all other symbolic dimensions.
        max_overhead: Largest predicted overhead of recomputation (0.1 is 10 %); None sets no limit, 0.0 recomputes only
            what costs nothing.
        pipeline: Preset for a graph that is not lowered yet; ``O2`` when None.
        optimizer: Attached to a graph that has none.
        target: See ``ortgraph.optimize``.
        seconds: Time of the recompute search at each size.
        reorder: First evaluations may change their order.
        program: See ``plan_program``.
        largest: The search ends here.
        tell: Called with a text before each size.

    Raises:
        InputError: The dimension is not symbolic, another one has no size, or the memory is not understood.
        PlanError: Not even size 1 fits; the message says what takes how much.
    """
    limit = memory_bytes(memory)
    sizes = dict(sizes or {})
    free = free_dimensions(graph)
    if dim not in free or dim in sizes:
        known = ", ".join(d for d in free if d not in sizes) or "none"
        raise InputError(
            f"the graph has no symbolic dimension {dim!r} to grow (symbolic: {known})",
            "export with --dynamic INPUT:0=batch, or name another dimension (--dim, dim=)",
        )
    fits: dict[int, BatchFit] = {}

    def try_size(size: int) -> bool:
        tell(f"{dim}={size}")
        ready = ready_graph(graph, {**sizes, dim: size}, pipeline, optimizer, target)
        fits[size] = _fit(ready, size, limit, max_overhead, seconds, reorder, program)
        return fits[size].plan is not None

    def search(low: int) -> int:
        """Grow from a size that fits, then bisect: the size returned fits, the next one does not."""
        high = min((n for n, fit in fits.items() if n > low and fit.plan is None), default=None)
        while high is None and low < largest:
            size = min(largest, _larger([fit for fit in fits.values() if fit.plan is not None], limit))
            low, high = (size, None) if try_size(size) else (low, size)
        while high is not None and high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if try_size(middle) else (low, middle)
        return low

    if not try_size(1):
        raise PlanError(f"{dim}=1 does not fit into {size_text(limit)}: {fits[1].reason}", "give more memory")
    low = search(1)
    for part in _PROBES:  # a search within a budget may fail at one size and not at a larger one
        size = low + -(-low // part)
        if size <= largest and size not in fits and fits[low + 1].least <= limit and try_size(size):
            low = search(size)
    return LargestBatch(dim, limit, fits[low], fits.get(low + 1), tuple(fits))


def _larger(fits: list[BatchFit], limit: int) -> int:
    """A size to try next: where the least need reaches the limit if it grows in proportion, at least twice the largest."""
    fits = sorted(fits, key=lambda fit: fit.size)
    last = fits[-1]
    if len(fits) < 2:
        return 2 * last.size
    growth = (last.least - fits[-2].least) / (last.size - fits[-2].size)
    return max(2 * last.size, last.size + int((limit - last.least) / growth) + 1 if growth > 0 else 0)


def memory_bytes(memory: str | int) -> int:
    """Bytes of a memory size.

    Raises:
        InputError: It is a percentage, or no size.
    """
    if "%" in str(memory):
        raise InputError(f"memory {memory!r} is a share of nothing", "give bytes, such as 4GB or 900MiB")
    try:
        return budget_bytes(memory, 0)
    except InputError as error:
        raise InputError(f"memory {memory!r} is not understood", "give bytes, such as 4GB or 900MiB") from error


def _fit(
    graph: TrainingGraph,
    size: int,
    limit: int,
    max_overhead: float | None,
    seconds: float,
    reorder: bool,
    program: str | None,
) -> BatchFit:
    fixed = footprint(graph)
    plan = plan_program(graph, program=program)
    room, least = limit - fixed.total, fixed.total + plan.floor.bytes + plan.scratch_bytes

    def misfit(reason: str) -> BatchFit:
        return BatchFit(size, fixed, least, least, None, None, f"{reason}; {_outside(fixed)}")

    if limit < least:
        return misfit(_too_small(plan, room))
    try:
        plan = replan(plan, room, seconds, reorder)
    except PlanError as error:
        return misfit(error.what)
    needed = fixed.total + plan.arena.arena_bytes + plan.scratch_bytes
    if max_overhead is not None and plan.after.overhead > max_overhead:
        return misfit(f"it takes {plan.after.overhead:.1%} more predicted time, over the {max_overhead:.1%} allowed")
    return BatchFit(size, fixed, least, needed, plan, graph)


def _too_small(plan: ProgramPlan, room: int) -> str:
    names = [plan.problem.operations.operations[i].name for i in plan.floor.operations]
    cause = f" ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} set that floor)" if names else ""
    left = f"{size_text(room)} are left" if room > 0 else "nothing is left"
    least = size_text(plan.floor.bytes + plan.scratch_bytes)
    return f"no plan goes below {least}{cause} and {left} for it"


def _outside(fixed: Footprint) -> str:
    parts = ((getattr(fixed, f.name), f.name) for f in dataclasses.fields(fixed))
    return "outside the arena are " + ", ".join(f"{name} of {size_text(size)}" for size, name in parts if size)
