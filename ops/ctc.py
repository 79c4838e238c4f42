"""Operator table: connectionist temporal classification and its gradient, in log space.

Places s = 0 ... 2 S of a row are blank, target 0, blank, target 1, ..., blank. A path may stay, go on by one place, or by
two when it passes a blank between different classes. ``Alpha[t, s]`` is the log-probability of all beginnings that end
in s at t. As in PyTorch the gradient is that with respect to scores before their log-softmax, written in the
log-probabilities: exp(LogProb) minus the probability of being in a class, given the targets.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import Types, attribute, bound_shape, element_count, given, operands, shape_of, typed, wanted
from ortgraph.ops.spec import COMPOSITE, OpSpec, register

_IMPOSSIBLE = -1e30  # instead of -inf, whose differences are NaN
_LEAST = -1e29  # everything below is impossible
INT64 = ir.DataType.INT64


@dataclasses.dataclass(frozen=True)
class _Places:
    """What both halves need.

    Attributes:
        labels: Class of every place, [N, P].
        emitted: Log-probability of every place's class, [N, T, P].
        skips: 0 where a place may be reached from two places before, else impossible, [N, P].
        ends: 0 at the last place and at the last target, else impossible, [N, P].
        rows, steps, classes, places: N, T, C, P.
    """

    labels: ir.Value
    emitted: ir.Value
    skips: ir.Value
    ends: ir.Value
    rows: int
    steps: int
    classes: int
    places: int


def _places(b: Builder, node: ir.Node, log_prob: ir.Value, target: ir.Value, counts: ir.Value) -> _Places:
    steps, rows, classes = bound_shape(node, log_prob, "LogProb")
    width = bound_shape(node, target, "Target")[1]
    places, blank = 2 * width + 1, attribute(node, "blank", 0)
    inside = b.op("Less", b.const(np.arange(width)[None], np.int64), b.op("Unsqueeze", counts, b.ints([1])))
    known = b.op("Where", inside, target, b.const(blank, np.int64))
    one = b.const(np.full((rows, width, 1), blank), np.int64)
    pairs = b.op("Concat", one, b.op("Unsqueeze", known, b.ints([2])), axis=2)
    flat = b.op("Reshape", pairs, b.ints([rows, 2 * width]))
    labels = b.op("Concat", flat, b.const(np.full((rows, 1), blank), np.int64), axis=1)
    at = b.op("Expand", b.op("Unsqueeze", labels, b.ints([1])), b.ints([rows, steps, places]))
    emitted = b.op("GatherElements", b.op("Transpose", log_prob, perm=[1, 0, 2]), at, axis=2)
    before = b.op("Slice", b.op("Pad", labels, b.ints([0, 2, 0, 0]), b.const(blank, np.int64)), b.ints([0]),
                  b.ints([places]), b.ints([1]))  # fmt: skip
    differs = b.op("And", b.op("Not", b.op("Equal", labels, before)), b.const(np.arange(places)[None] >= 2))
    last = b.op("Unsqueeze", b.op("Mul", counts, b.const(2, np.int64)), b.ints([1]))
    place = b.const(np.arange(places)[None], np.int64)
    is_end = b.op("Or", b.op("Equal", place, last), b.op("Equal", place, b.op("Sub", last, b.const(1, np.int64))))
    return _Places(
        labels, emitted, _penalty(b, differs, log_prob), _penalty(b, is_end, log_prob), rows, steps, classes, places
    )


def _penalty(b: Builder, allowed: ir.Value, like: ir.Value) -> ir.Value:
    return b.op("Where", allowed, b.scalar(0.0, like), b.scalar(_IMPOSSIBLE, like))


def _joined(b: Builder, state: ir.Value, skips: ir.Value, places: int, forward: bool) -> ir.Value:
    """log(sum(exp)) over the three places that lead to a place, or that it leads to; ``skips`` is [N, P, 3]."""
    pads = [0, 2, 0, 0] if forward else [0, 0, 0, 2]
    wide = b.op("Pad", state, b.ints(pads), b.scalar(_IMPOSSIBLE, state))
    offsets = np.array([2, 1, 0] if forward else [0, 1, 2])
    near = b.op("Gather", wide, b.const(np.arange(places)[:, None] + offsets, np.int64), axis=1)
    return b.op("ReduceLogSumExp", b.op("Add", near, skips), b.ints([2]), keepdims=0)


def _third(b: Builder, skips: ir.Value, rows: int, places: int) -> ir.Value:
    """Penalties for staying, one and two places: only the last has any."""
    assert skips.dtype is not None
    none = b.const(np.zeros((rows, places, 2)), skips.dtype)
    return b.op("Concat", none, b.op("Unsqueeze", skips, b.ints([2])), axis=2)


def _step(b: Builder, value: ir.Value, t: int) -> ir.Value:
    return b.op("Gather", value, b.const(t, np.int64), axis=1)


def _expand_ctc(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    log_prob, target, lengths, counts = operands(node, 4)
    p = _places(b, node, log_prob, target, counts)
    dtype = log_prob.dtype
    assert dtype is not None
    first = np.where(np.arange(p.places) < 2, 0.0, _IMPOSSIBLE)[None]
    state = b.op("Add", _step(b, p.emitted, 0), b.const(first, dtype))
    skips = _third(b, p.skips, p.rows, p.places)
    states = [state]
    for t in range(1, p.steps):
        state = b.op("Add", _joined(b, state, skips, p.places, True), _step(b, p.emitted, t))
        states.append(state)
    alpha = b.op("Concat", *(b.op("Unsqueeze", s, b.ints([1])) for s in states), axis=1)
    at = b.op("Max", b.op("Sub", lengths, b.const(1, np.int64)), b.const(0, np.int64))
    final = b.op("GatherND", alpha, b.op("Unsqueeze", at, b.ints([1])), batch_dims=1)
    total = b.op("ReduceLogSumExp", b.op("Add", final, p.ends), b.ints([1]), keepdims=0)
    loss = b.op("Where", b.op("Less", total, b.scalar(_LEAST, total)), b.scalar(math.inf, total), b.op("Neg", total))
    none = b.op("Where", b.op("Equal", counts, b.const(0, np.int64)), b.scalar(0.0, loss), b.scalar(math.inf, loss))
    loss = b.op("Where", b.op("Equal", lengths, b.const(0, np.int64)), none, loss)
    return [loss, alpha if wanted(node, 1) else None]


def _expand_ctc_grad(b: Builder, node: ir.Node) -> list[ir.Value]:
    d_loss, log_prob, target, lengths, counts, loss, alpha = operands(node, 7)
    p = _places(b, node, log_prob, target, counts)
    dtype = log_prob.dtype
    assert dtype is not None
    last = b.op("Sub", lengths, b.const(1, np.int64))
    steps = b.const(np.arange(p.steps)[None], np.int64)
    is_last = b.op("Equal", steps, b.op("Unsqueeze", last, b.ints([1])))
    ahead = b.op("Slice", b.op("Pad", p.skips, b.ints([0, 0, 0, 2]), b.scalar(_IMPOSSIBLE, p.skips)), b.ints([2]),
                 b.ints([p.places + 2]), b.ints([1]))  # fmt: skip
    skips = _third(b, ahead, p.rows, p.places)
    state = b.const(np.full((p.rows, p.places), _IMPOSSIBLE), dtype)
    states: list[ir.Value] = []
    for t in reversed(range(p.steps)):
        here = b.op("Unsqueeze", _step(b, is_last, t), b.ints([1]))
        state = b.op("Where", here, p.ends, _joined(b, state, skips, p.places, False))
        states.append(b.op("Unsqueeze", state, b.ints([1])))  # without what is emitted here, which alpha has
        state = b.op("Add", state, _step(b, p.emitted, t))
    beta = b.op("Concat", *reversed(states), axis=1)
    infinite = b.op("Reshape", b.op("IsInf", loss), b.ints([p.rows, 1, 1]))
    shift = b.op("Where", infinite, b.scalar(_IMPOSSIBLE, loss), b.op("Reshape", loss, b.ints([p.rows, 1, 1])))
    inside = b.op("Exp", b.op("Add", b.op("Add", alpha, beta), shift))
    classes = b.const(np.arange(p.classes)[None, None], np.int64)
    member = b.op("Cast", b.op("Equal", b.op("Unsqueeze", p.labels, b.ints([2])), classes), to=int(dtype))
    rest = b.op("Sub", b.op("Exp", b.op("Transpose", log_prob, perm=[1, 0, 2])), b.op("MatMul", inside, member))
    scaled = b.op("Mul", rest, b.op("Reshape", d_loss, b.ints([p.rows, 1, 1])))
    counted = b.op("LessOrEqual", steps, b.op("Unsqueeze", last, b.ints([1])))
    kept = b.op("And", b.op("Unsqueeze", counted, b.ints([2])), b.op("Not", infinite))
    return [b.op("Transpose", b.op("Where", kept, scaled, b.scalar(0.0, scaled)), perm=[1, 0, 2])]


def _ctc_types(node: ir.Node) -> Types:
    score, target = given(node, 0), given(node, 1)
    shape, wide = shape_of(score), shape_of(target)
    if score is None or score.dtype is None or shape is None or wide is None:
        return [None] * len(node.outputs)
    places = 2 * wide[1] + 1 if isinstance(wide[1], int) else ir.SymbolicDim(None)
    return [(score.dtype, (shape[1],)), (score.dtype, (shape[1], shape[0], places))][: len(node.outputs)]


def _grad_types(node: ir.Node) -> Types:
    return [typed(given(node, 1))]


register(
    OpSpec(
        COMPOSITE,
        "CtcLoss",
        infer=_ctc_types,
        expand=_expand_ctc,
        flops=lambda node: 12 * element_count(node.outputs[1] if len(node.outputs) > 1 else given(node, 0)),
        optional_outputs=(1,),
        doc="Loss = -log(sum of the probabilities of all alignments); infinite when there is none",
    ),
    OpSpec(
        COMPOSITE,
        "CtcLossGrad",
        infer=_grad_types,
        expand=_expand_ctc_grad,
        flops=lambda node: 16 * element_count(given(node, 6)),
        doc="dLogProb = dLoss (exp(LogProb) - probability of the class given the targets)",
    ),
)
