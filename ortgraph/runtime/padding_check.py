"""Whether padding changes a step: loss, gradients and buffers of a few rows, with and without it."""

from __future__ import annotations

from collections.abc import Mapping

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

ROWS = 4  # a share of the padding that is large beside rounding; few rows are cheap, too
_TOLERANCE, _LOW_PRECISION = 1e-4, 3e-2  # of a norm; one row in five is 2e-1
_SMALL = 1e-5  # of the median norm: gradients that are zero in exact arithmetic
_BY = "padding check"


def check_padding(
    graph: TrainingGraph,
    buckets: Buckets,
    arrays: Mapping[str, np.ndarray],
    dims: Mapping[str, int],
    padded: frozenset[str],
    memory: Memory,
    target: str,
) -> bool:
    """Run the batch's first rows as they are and padded, without dropout, and compare.

    Args:
        graph: The session's, at any stage; not changed.
        buckets: How batches are padded.
        arrays: The batch.
        dims: Its sizes.
        padded: The dimensions that are padded.
        memory: Whose parameters are used; nothing is committed.
        target: As of the session.

    Returns:
        Whether it could be told: not where the loss of the rows is no number.

    Raises:
        BatchError: Padding changes the loss, a gradient or a buffer.
    """
    few = {n: min(size, ROWS) if n in buckets.rows() else size for n, size in dims.items()}
    more = {n: _larger(size, buckets.limit(n)) if n in padded else size for n, size in few.items()}
    rows = buckets.head(arrays, few)
    plain = _run(graph, rows, few, memory, target)
    if not np.isfinite(plain[graph.signature.loss]):
        return False
    filled = _run(graph, buckets.pad(rows, more), more, memory, target)
    names = {graph.signature.loss: "the loss"}
    names |= {o: f"the gradient of {p}" for p, o in graph.signature.gradients.items()}
    low = graph.signature.metadata.get("precision", "fp32") != "fp32"
    wrong = _first_difference(plain, filled, graph.signature.loss, _LOW_PRECISION if low else _TOLERANCE)
    if wrong is None:
        return True
    sizes = " and ".join(f"{n} from {few[n]} to {more[n]}" for n in sorted(padded))
    one, two = (float(np.linalg.norm(r[wrong].astype(np.float64))) for r in (plain, filled))
    raise BatchError(
        f"padding {sizes} changes {names.get(wrong, f'the new value of buffer {wrong}')} (norm {one:.6g}, padded {two:.6g})",
        "pad labels with the loss's ignore_index (a mean over all rows counts them) and masks with what hides; leave the "
        "dimension out of buckets= where batch statistics or sums run over it; check_padding=False when the difference "
        "is one of random numbers that are no dropout",
    )


def _larger(size: int, limit: int | None) -> int:
    size += max(1, size // 4)
    return size if limit is None else min(size, limit)


def _run(
    graph: TrainingGraph, arrays: Mapping[str, np.ndarray], dims: Mapping[str, int], memory: Memory, target: str
) -> dict[str, np.ndarray]:
    """Loss, gradients and new buffers of one batch, without dropout."""
    signature = graph.signature
    wanted = [signature.loss, *signature.gradients.values(), *(b.update for b in signature.buffers if b.update)]
    own = Memory(memory.device)
    own.persistent = dict(memory.persistent)
    if signature.loss_gradient is not None:
        seed = memory.persistent[signature.loss_gradient]
        own.add(signature.loss_gradient, seed.dtype, seed.shape).fill(1)
    program = Program(_BY, _without_dropout(graph, dims, target), list(dict.fromkeys(wanted)), [], own)
    for name, array in arrays.items():
        if name in program.inputs:
            program.inputs[name][...] = array
    for name in signature.tangents.values():
        if name in program.inputs:
            program.inputs[name][...] = 0
    program.run()
    return {name: np.array(program.value(name)) for name in wanted}


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
