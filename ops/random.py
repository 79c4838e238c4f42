"""Operator table: counter-based random numbers, dropout and its gradient.

The generator is a function of (key, step, node, element index); nothing is remembered between draws. It is written so
that the work per element is two int32 products, one sum and one comparison, all fast on ONNX Runtime's CPU kernels.
All arithmetic wraps around. With ``e`` the flat index of an element, ``i = e // 256`` and ``j = e % 256``:

    seed = mix(key * KEY + step * STEP)                          int64, one per run
    z    = mix(seed + (node + 1) * NODE + i * ROW)               int64, one per 256 elements
    hi   = z >> 32 (unsigned),  lo = (z xor hi) mod 2^32
    x    = int32(hi) * COLUMN[j] + (int32(lo) | 1)               int32, always odd since COLUMN is even
    y    = x * x                                                 int32
    U    = (y >> 8) * 2^-24 + 0.5                                24 bits, in [0, 1), float32

    mix(z): z ^= z >> 32; z *= MIX1; z ^= z >> 29; z *= MIX2; z ^= z >> 32   (shifts are unsigned)

Why it is good enough: ``mix`` spreads every bit of its argument over all others, so (hi, lo) of different rows, nodes,
steps and keys behave as independent. x is uniform over the odd numbers, so y, whose odd values are met equally often,
gives exactly uniform U. mix(0) is 0, whose words are all alike: node + 1 keeps the first draw of a run with key 0, whose seed
is 0, away from it. Within a row, two columns differ by hi (COLUMN[j] - COLUMN[k]): COLUMN / 2 has 256 different
residues modulo 256, so that difference takes at least 2^23 values; the square keeps sums of a few columns from being
constant. tests/ops/test_random.py measures rate, neighbours, nodes, steps and keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import (
    Types,
    attribute,
    bound_shape,
    decimal,
    element_count,
    elements_flops,
    given,
    indicator,
    like,
    operands,
    shape_of,
    typed,
    wanted,
)
from ortgraph.ops.spec import COMPOSITE, OpSpec, Shape, register

WIDTH = 256
KEY, STEP, NODE, ROW = (
    np.array(c, np.uint64).astype(np.int64)
    for c in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7, 0xAEF17502108EF2D9)
)
MIX1, MIX2 = (np.array(c, np.uint64).astype(np.int64) for c in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = _fold(z, 32) * MIX1
        return _fold(_fold(z, 29) * MIX2, 32)


def _fold(z: np.ndarray, bits: int) -> np.ndarray:
    u = z.astype(np.uint64)
    return (u ^ (u >> np.uint64(bits))).astype(np.int64)


@functools.cache
def columns() -> np.ndarray:
    """COLUMN: 256 even int32 numbers. ``COLUMN[j] / 2`` is mix(j) mod 2^31 with its low 8 bits replaced by j."""
    j = np.arange(WIDTH, dtype=np.int64)
    half = (_mix(j * ROW + NODE) & np.int64(0x7FFFFF00)) | j
    return (half * 2).astype(np.uint32).astype(np.int32)


def _reference_words(key: int, step: int, node: int, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        counter = np.array([key], np.int64) * KEY + np.array([step], np.int64) * STEP
        rows = np.arange(-(-count // WIDTH), dtype=np.int64)
        z = _mix(_mix(counter) + row_offsets(node, len(rows)).reshape(-1))
        high = z.astype(np.uint64) >> np.uint64(32)
        low = z.astype(np.uint64) ^ high
        x = high.astype(np.int32)[:, None] * columns() + (low.astype(np.int32) | np.int32(1))[:, None]
        return (x * x).reshape(-1)[:count]


def row_offsets(node: int, rows: int) -> np.ndarray:
    """``(node + 1) * NODE + i * ROW`` for every row, int64 [rows, 1]."""
    with np.errstate(over="ignore"):
        start = np.array([node + 1], np.int64) * NODE
        return (start + np.arange(rows, dtype=np.int64) * ROW).reshape(-1, 1)


def reference_uniform(key: int, step: int, node: int, shape: Sequence[int]) -> np.ndarray:
    """The numbers that RandomUniform draws, bit for bit.

    Args:
        key: The run's seed, int64.
        step: Counter of the draw, int64.
        node: Number of the drawing node.
        shape: Static shape.

    Returns:
        float32 in [0, 1), multiples of 2^-24.
    """
    words = _reference_words(key, step, node, math.prod(shape))
    return ((words >> 8).astype(np.float32) * np.float32(2**-24) + np.float32(0.5)).reshape(tuple(shape))


def reference_mask(key: int, step: int, node: int, shape: Sequence[int], ratio: float) -> np.ndarray:
    """The mask that Dropout draws: True (kept) where U >= ratio."""
    return reference_uniform(key, step, node, shape).astype(np.float64) >= ratio


def _build_mix(b: Builder, z: ir.Value) -> ir.Value:
    z = b.op("Mul", _build_fold(b, z, 32), b.const(MIX1))
    z = b.op("Mul", _build_fold(b, z, 29), b.const(MIX2))
    return _build_fold(b, z, 32)


def _build_fold(b: Builder, z: ir.Value, bits: int) -> ir.Value:
    u = b.op("Cast", z, to=ir.DataType.UINT64)
    shifted = b.op("BitShift", u, b.const(bits, np.uint64), direction="RIGHT")
    return b.op("Cast", b.op("BitwiseXor", u, shifted), to=ir.DataType.INT64)


def build_words(b: Builder, key: ir.Value, step: ir.Value, node: int, count: int) -> ir.Value:
    """y of the generator: int32 [rows, min(count, 256)] with at least ``count`` elements."""
    rows, width = max(1, -(-count // WIDTH)), min(max(count, 1), WIDTH)
    counter = b.op("Add", b.op("Mul", key, b.const(KEY)), b.op("Mul", step, b.const(STEP)))
    seed = _build_mix(b, counter)
    z = _build_mix(b, b.op("Add", seed, b.const(row_offsets(node, rows), name="random_rows")))
    u = b.op("Cast", z, to=ir.DataType.UINT64)
    high = b.op("BitShift", u, b.const(32, np.uint64), direction="RIGHT")
    low = b.op("Cast", b.op("BitwiseXor", u, high), to=ir.DataType.INT32)
    odd = b.op("BitwiseOr", low, b.const(1, np.int32))
    column = b.const(columns()[:width], name="random_columns")
    x = b.op("Add", b.op("Mul", b.op("Cast", high, to=ir.DataType.INT32), column), odd)
    return b.op("Mul", x, x)


def _shaped(b: Builder, drawn: ir.Value, shape: Shape) -> ir.Value:
    """The first elements of the drawn rows in the shape that was asked for."""
    count, have = math.prod(shape), math.prod(drawn.shape)  # type: ignore[arg-type]
    if count != have:
        flat = b.op("Reshape", drawn, b.ints([-1]))
        drawn = b.op("Slice", flat, b.ints([0]), b.ints([count]), b.ints([0]))
    return drawn if tuple(drawn.shape or ()) == tuple(shape) else b.op("Reshape", drawn, b.ints(shape))


def _expand_uniform(b: Builder, node: ir.Node) -> list[ir.Value]:
    shape = tuple(attribute(node, "shape")) if "shape" in node.attributes else bound_shape(node, node.outputs[0], "U")
    key, step = operands(node, 2)
    words = build_words(b, key, step, attribute(node, "node"), math.prod(shape))
    # Clear the bits that float32 cannot hold: rounding could give exactly 1.
    top = b.op("Cast", b.op("BitwiseAnd", words, b.const(-256, np.int32)), to=ir.DataType.FLOAT)
    uniform = b.op("Add", b.op("Mul", top, b.const(2.0**-32, np.float32)), b.const(0.5, np.float32))
    return [_shaped(b, uniform, shape)]


def keep_mask(b: Builder, key: ir.Value, step: ir.Value, node: int, shape: tuple[int, ...], ratio: float) -> ir.Value:
    """Kept where U >= ratio, decided on the integers: U = k 2^-24 with k = (y >> 8) + 2^23."""
    words = build_words(b, key, step, node, math.prod(shape))
    least = math.ceil(ratio * 2**24) - 2**23
    if least < 2**23:
        kept = b.op("GreaterOrEqual", words, b.const(least * 256, np.int32))
    else:
        kept = b.op("Greater", words, b.const(2**31 - 1, np.int32))
    return _shaped(b, kept, shape)


def scale_kept(b: Builder, value: ir.Value, mask: ir.Value, ratio: float) -> ir.Value:
    """value Mask / (1 - ratio)."""
    scale = 0.0 if ratio >= 1.0 else 1.0 / (1.0 - ratio)
    kept = b.op("Mul", value, indicator(b, mask, value.dtype))
    return kept if scale == 1.0 else b.op("Mul", kept, b.scalar(scale, value))


def _expand_dropout(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    x, key, step = operands(node, 3)
    ratio = decimal(node, "ratio", 0.5)
    mask = keep_mask(b, key, step, attribute(node, "node"), bound_shape(node, x, "X"), ratio)
    return [scale_kept(b, x, mask, ratio) if wanted(node, 0) else None, mask]


def _expand_dropout_grad(b: Builder, node: ir.Node) -> list[ir.Value]:
    """The numbers of ``scale_kept``, but without the mask as a float: the forward half's would be kept in its place."""
    dy, mask = operands(node, 2)
    ratio = decimal(node, "ratio", 0.5)
    if ratio >= 1.0:
        return [scale_kept(b, dy, mask, ratio)]
    scale = 1.0 / (1.0 - ratio)
    kept = dy if scale == 1.0 else b.op("Mul", dy, b.scalar(scale, dy))
    return [b.op("Where", mask, kept, b.op("Mul", dy, b.scalar(0.0, dy)))]


def _dropout_types(node: ir.Node) -> Types:
    x = typed(given(node, 0))
    return [x, None if x is None else (ir.DataType.BOOL, x[1])][: len(node.outputs)]


def _uniform_types(node: ir.Node) -> Types:
    if "shape" in node.attributes:
        return [(ir.DataType.FLOAT, tuple(attribute(node, "shape")))]
    return [(ir.DataType.FLOAT, shape_of(node.outputs[0]))]


register(
    OpSpec(
        COMPOSITE,
        "Dropout",
        infer=_dropout_types,
        expand=_expand_dropout,
        precision="any",
        flops=lambda node: 6 * element_count(given(node, 0)),
        doc="Mask = U(Key, Step, node) >= ratio; Y = X Mask / (1 - ratio)",
    ),
    OpSpec(
        COMPOSITE,
        "DropoutGrad",
        elementwise=True,
        precision="any",
        infer=like(0),
        expand=_expand_dropout_grad,
        flops=elements_flops(2),
        doc="dX = dY Mask / (1 - ratio)",
    ),
    OpSpec(
        COMPOSITE,
        "RandomUniform",
        infer=_uniform_types,
        expand=_expand_uniform,
        shape_attribute="shape",
        flops=elements_flops(6),
        doc="U in [0, 1): float32 from (Key, Step, node, element index)",
    ),
)
# They draw from the runtime's own generator.
_HIDDEN_STATE: dict[str, Any] = {"deterministic": False, "recompute": False, "precision": "any"}

register(
    OpSpec("", "Dropout", infer=_dropout_types, optional_outputs=(1,), doc="Y = X Mask / (1 - ratio) in training mode",
           **_HIDDEN_STATE),
    OpSpec("", "RandomNormal", doc="Y from N(mean, scale)", **_HIDDEN_STATE),
    OpSpec("", "RandomNormalLike", doc="Y from N(mean, scale) in the shape of X", **_HIDDEN_STATE),
    OpSpec("", "RandomUniform", doc="Y from U(low, high)", **_HIDDEN_STATE),
    OpSpec("", "RandomUniformLike", doc="Y from U(low, high) in the shape of X", **_HIDDEN_STATE),
    OpSpec("", "Bernoulli", doc="Y = 1 with probability X", **_HIDDEN_STATE),
    OpSpec("", "Multinomial", doc="Y = classes drawn by log-probability", **_HIDDEN_STATE),
)  # fmt: skip
