"""Whether padding changes a step: loss, gradients and buffers of a few rows, with and without it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from ortgraph.analysis.bind_shapes import bind_shapes, infer_unknown, is_dynamic
from ortgraph.errors import BatchError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.edit import Names
from ortgraph.ops.expand import expand_node
from ortgraph.ops.spec import COMPOSITE, GENERATED, KERNELS
from ortgraph.runtime.arena import Memory
from ortgraph.runtime.buckets import Buckets
from ortgraph.runtime.prepare import CLEAN, FOLD, lift_constants, run_passes
from ortgraph.runtime.program import Program

logger = logging.getLogger(__name__)
ROWS = 4  # a share of the padding that is large beside rounding; few rows are cheap, too
_TOLERANCE, _LOW_PRECISION = 1e-4, 3e-2  # of a norm; one row in five is 2e-1
_SMALL = 1e-5  # of the median norm: gradients that are zero in exact arithmetic
_BY = "padding check"


class PaddingCheck:
    """Compares once for each dimension that is padded, and once more when outputs are read.

    Args:
        graph: The session's, at any stage; not changed.
        memory: Whose parameters are used; nothing is committed.
        target: As of the session.
    """

    def __init__(self, graph: TrainingGraph, memory: Memory, target: str) -> None:
        self._graph, self._memory, self._target = graph, memory, target
        self._harmless: dict[bool, frozenset[str]] = {False: frozenset(), True: frozenset()}  # by: outputs are read

    def check(self, buckets: Buckets, arrays: Mapping[str, np.ndarray], dims: Mapping[str, int], outputs: bool) -> None:
        """Raise BatchError where padding this batch changes the loss, a gradient, a buffer or an output that is read."""
        sizes = buckets.sizes(dims)
        padded = frozenset(n for n in sizes if sizes[n] != dims[n])
        if not padded - self._harmless[outputs]:
            return
        start = time.perf_counter()
        if not check_padding(self._graph, buckets, arrays, dims, padded, self._memory, self._target, outputs):
            return
        self._harmless[outputs] |= padded
        self._harmless[False] |= padded
        logger.info(
            "padding of %s changes neither loss nor gradients%s (compared in %.2f s)",
            ", ".join(sorted(padded)), " nor outputs" if outputs else "", time.perf_counter() - start,
        )  # fmt: skip


def check_padding(
    graph: TrainingGraph,
    buckets: Buckets,
    arrays: Mapping[str, np.ndarray],
    dims: Mapping[str, int],
    padded: frozenset[str],
    memory: Memory,
    target: str,
    outputs: bool = False,
) -> bool:
    """Run the batch's first rows as they are and padded, without dropout, and compare; again with other parameters.

    Args:
        graph: The session's, at any stage; not changed.
        buckets: How batches are padded.
        arrays: The batch.
        dims: Its sizes.
        padded: The dimensions that are padded.
        memory: Whose parameters are used; nothing is committed.
        target: As of the session.
        outputs: The model's outputs will be read: those of the rows must not change, either.

    Returns:
        Whether it could be told: not where loss or gradients of the rows are no numbers.

    Raises:
        BatchError: Padding changes the loss, a gradient, a buffer or an output that is read.
    """
    few = {n: min(size, ROWS) if n in buckets.rows() else size for n, size in dims.items()}
    more = {n: _larger(size, buckets.limit(n)) if n in padded else size for n, size in few.items()}
    rows, own = buckets.head(arrays, few), _own_memory(graph, memory)
    cut = {
        str(v.name): v for v in graph.graph.outputs if outputs and v.name in graph.signature.outputs and _is_float(v)
    }
    plain = _program(graph, rows, few, own, target, cut)
    filled = _program(graph, buckets.pad(rows, more), more, own, target, cut)
    names = {graph.signature.loss: "the loss"} | {name: f"output {name}" for name in cut}
    names |= {o: f"the gradient of {p}" for p, o in graph.signature.gradients.items()}
    low = graph.signature.metadata.get("precision", "fp32") != "fp32"
    for moved in (False, True):
        if moved:
            _move_parameters(graph, own)
        want, got = _results(plain), _results(filled)
        got |= {name: buckets.cut(name, value, got[name], few) for name, value in cut.items()}
        if not all(np.isfinite(a).all() for a in want.values()):
            return moved
        wrong = _first_difference(want, got, graph.signature.loss, _LOW_PRECISION if low else _TOLERANCE)
        if wrong is None:
            continue
        sizes = " and ".join(f"{n} from {few[n]} to {more[n]}" for n in sorted(padded))
        one, two = (float(np.linalg.norm(r[wrong].astype(np.float64))) for r in (want, got))
        raise BatchError(
            f"padding {sizes} changes {names.get(wrong, f'the new value of buffer {wrong}')} (norm {one:.6g}, "
            f"padded {two:.6g}{'; with other parameters, where these happen to hide it' if moved else ''})",
            "pad labels with the loss's ignore_index (a mean over all rows counts them) and masks with what hides; leave "
            "the dimension out of buckets= where batch statistics or sums run over it; check_padding=False when the "
            "difference is one of random numbers that are no dropout",
        )
    return True


def _larger(size: int, limit: int | None) -> int:
    size += max(1, size // 4)
    return size if limit is None else min(size, limit)


def _own_memory(graph: TrainingGraph, memory: Memory) -> Memory:
    """Another arena, and parameters that may be changed; all else as it is."""
    own = Memory(memory.device)
    own.persistent = dict(memory.persistent)
    for p in graph.signature.parameters:
        array = memory.persistent[p.name]
        own.add(p.name, array.dtype, array.shape)[...] = array.copy()
    seed = graph.signature.loss_gradient
    if seed is not None:
        own.add(seed, memory.persistent[seed].dtype, memory.persistent[seed].shape).fill(1)
    return own


def _move_parameters(graph: TrainingGraph, memory: Memory) -> None:
    """Signs drawn anew, and numbers for zeros: what hides padding for these parameters alone hides it no more."""
    rng = np.random.default_rng(0)
    for p in graph.signature.parameters:
        old = memory.persistent[p.name].copy()
        if old.dtype.kind in "iub":
            continue
        size = old.astype(np.float32)
        size = np.where(size == 0, rng.uniform(0.05, 0.1, size.shape), size) if not size.any() else size
        memory.persistent[p.name][...] = (size * rng.choice([-1.0, 1.0], size.shape)).astype(old.dtype)


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _program(
    graph: TrainingGraph,
    arrays: Mapping[str, np.ndarray],
    dims: Mapping[str, int],
    memory: Memory,
    target: str,
    more: Iterable[str],
) -> Program:
    """What makes loss, gradients, new buffers and some outputs of one batch, without dropout."""
    signature = graph.signature
    wanted = [signature.loss, *signature.gradients.values(), *(b.update for b in signature.buffers if b.update), *more]
    program = Program(_BY, _without_dropout(graph, dims, target), list(dict.fromkeys(wanted)), [], memory)
    for name, array in arrays.items():
        if name in program.inputs:
            program.inputs[name][...] = array
    for name in signature.tangents.values():
        if name in program.inputs:
            program.inputs[name][...] = 0
    return program


def _results(program: Program) -> dict[str, np.ndarray]:
    program.run()
    return {v.name or "": np.array(program.value(v.name or "")) for v in program.wanted_values}


def _without_dropout(graph: TrainingGraph, dims: Mapping[str, int], target: str) -> TrainingGraph:
    """The graph at one shape, lowered, with dropout that drops nothing: masks depend on sizes."""
    form = graph.clone()
    if is_dynamic(form):
        bind_shapes(form, dims)
        run_passes(form, FOLD)
        if infer_unknown(form):
            run_passes(form, FOLD)
    names = Names(form.graph)
    for node in tuple(form.graph):
        if node.domain == GENERATED:
            expand_node(node, names, _BY)
    for node in form.graph:
        if node.domain in (COMPOSITE, KERNELS) and "ratio" in node.attributes:
            node.attributes["ratio"] = ir.AttrFloat32("ratio", 0.0)
    run_passes(form, f"lower{{target={target}}},{CLEAN}")
    return lift_constants(form)


def _first_difference(
    plain: Mapping[str, np.ndarray], filled: Mapping[str, np.ndarray], loss: str, tolerance: float
) -> str | None:
    """The first result that differs by more than rounding."""
    norms = {n: float(np.linalg.norm(a.astype(np.float64))) for n, a in plain.items()}
    others = [norm for n, norm in norms.items() if n != loss]
    typical = float(np.median(others)) if others else 0.0
    for name, norm in norms.items():
        difference = float(np.linalg.norm(filled[name].astype(np.float64) - plain[name]))
        if not difference <= tolerance * norm + (0.0 if name == loss else _SMALL * typical):
            return name
    return None
