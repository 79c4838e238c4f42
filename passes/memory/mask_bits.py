"""What a graph computes from a 0/1 mask alone, element by element: its value where the mask is 0 and where it is 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.ops.spec import spec_of
from ortgraph.passes.canonical.evaluate import Refused, evaluate
from ortgraph.passes.fusion.operands import constant

Array = np.ndarray
_NOWHERE = -1
_MOVED = frozenset({"Reshape", "Expand", "Unsqueeze", "Squeeze", "Transpose", "Slice", "Gather", "Flatten"})
_LOGIC = {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor}  # the reference is slow on large ones
_MOST_ELEMENTS = 1 << 24
_HIDDEN = float(np.finfo(np.float32).min) / 2  # what is added to a score from here on leaves probability 0
_SEEN = 1e4


@dataclasses.dataclass(frozen=True)
class MaskBits:
    """A value each element of which depends on one element of the mask at most.

    Attributes:
        at: Flat index of that element, -1 where there is none.
        off: The value where it is 0.
        on: The value where it is 1.
    """

    at: Array
    off: Array
    on: Array


def read_mask(graph: TrainingGraph, mask: ir.Value) -> dict[ir.Value, MaskBits]:
    """All values that depend on the mask and on constants alone, as far as they can be told element by element.

    Nothing is assumed about how a model writes its mask: operators are evaluated for both values of every element.

    Args:
        graph: Not changed.
        mask: A graph input of static shape and integer or boolean type.
    """
    shape = static_shape(mask)
    assert shape is not None and mask.dtype is not None
    zeros = np.zeros(shape, mask.dtype.numpy())
    found = {mask: MaskBits(np.arange(zeros.size, dtype=np.int64).reshape(shape), zeros, np.ones_like(zeros))}
    version = graph.graph.opset_imports.get("", 18)
    for node in graph.graph:
        if any(v in found for v in node.inputs):
            bits = _evaluated(node, found, version)
            if bits is not None:
                found[node.outputs[0]] = bits
    return found


def _evaluated(node: ir.Node, known: Mapping[ir.Value, MaskBits], version: int) -> MaskBits | None:
    shape = static_shape(node.outputs[0]) if len(node.outputs) == 1 else None
    if node.domain not in ("", "ai.onnx") or shape is None or np.prod(shape, dtype=np.int64) > _MOST_ELEMENTS:
        return None
    inputs = [_bits(v, known) for v in node.inputs]
    if any(bits is None and v is not None for bits, v in zip(inputs, node.inputs, strict=True)):
        return None
    try:
        if node.op_type in _MOVED and not any(v in known for v in node.inputs[1:]):
            return _moved(node, inputs, version)
        return _combined(node, inputs, shape, version) if spec_of(node).elementwise else None
    except Refused:
        return None


def _bits(value: ir.Value | None, known: Mapping[ir.Value, MaskBits]) -> MaskBits | None:
    if value is None or value in known:
        return None if value is None else known[value]
    array = constant(value)
    return None if array is None else MaskBits(np.full(array.shape, _NOWHERE), array, array)


def _moved(node: ir.Node, inputs: Sequence[MaskBits | None], version: int) -> MaskBits:
    first = inputs[0]
    assert first is not None
    rest = [None if bits is None else bits.on for bits in inputs[1:]]
    at, off, on = (evaluate(node, [x, *rest], version)[0] for x in (first.at, first.off, first.on))
    return MaskBits(at, off, on)


def _combined(
    node: ir.Node, inputs: Sequence[MaskBits | None], shape: tuple[int, ...], version: int
) -> MaskBits | None:
    """An operator on elements, where none depends on two elements of the mask."""
    at = np.full(shape, _NOWHERE, np.int64)
    for bits in inputs:
        if bits is None:
            continue
        other = np.broadcast_to(bits.at, shape)
        if bool(np.any((at != _NOWHERE) & (other != _NOWHERE) & (at != other))):
            return None
        at = np.maximum(at, other)
    sides = []
    for side in ("off", "on"):
        given: list[Any] = [None if bits is None else getattr(bits, side) for bits in inputs]
        made = _LOGIC[node.op_type](*given) if node.op_type in _LOGIC else evaluate(node, given, version)[0]
        sides.append(np.broadcast_to(made, shape))
    return MaskBits(at, *sides)


def hides_padding(bits: MaskBits, batch: int, length: int, queries: int | None) -> bool:
    """Whether a bias of attention scores leaves keys whose mask is 0 the probability 0, exactly.

    It does where it hides them, and a key that it does not hide is there: for self-attention the token itself, where its
    mask is 1; for other queries any key whose mask is 1.

    Args:
        bits: Of the bias, broadcast to [batch, heads, queries, length].
        batch, length: Shape of the mask.
        queries: Number of queries, None for self-attention.
    """
    rank = bits.at.ndim
    if not 2 <= rank <= 4 or bits.off.dtype.kind != "f":
        return False
    shape = (batch, bits.at.shape[1] if rank == 4 else 1, length if queries is None else queries, length)
    try:
        at, off, on = (np.broadcast_to(x, shape) for x in (bits.at, bits.off, bits.on))
    except ValueError:
        return False
    own = at == np.arange(batch * length).reshape(batch, 1, 1, length)
    hidden = (off <= _HIDDEN) & (own | (on <= _HIDDEN))
    seen = own & (np.abs(on) < _SEEN)
    if queries is None:
        seen = np.diagonal(seen, axis1=2, axis2=3)
    return bool(hidden.all() and seen.all())


def zero_where_off(bits: MaskBits, count: int) -> bool:
    """Whether a value of ``count`` rows in its leading dimensions is zero in those where the mask is 0."""
    flat = bits.at.reshape(count, -1)
    return bool((flat == np.arange(count)[:, None]).all() and not bits.off.any())
