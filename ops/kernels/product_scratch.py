"""Packing buffers that a thread keeps for matrix products (gemm.h): an upper bound from the shape alone."""

from __future__ import annotations

import math

import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops.shapes import attribute

_BLOCK, _ROWS, _SUMS = 512, 288, 72 * 1024  # gemm.h: words of a block over k, rows and sums of a piece
_MOST_ROWS = 4 * _ROWS  # of a piece with short blocks
_PANEL, _LANES, _COLUMNS = 48, 16, 64


def thread_bytes(node: ir.Node) -> int:
    """Bytes for each thread of a product: rows of A and a panel of B as words, sums where blocks over k add up."""
    a, b = (static_shape(value) if (value := node.inputs[i]) is not None else None for i in (0, 1))
    if not a or not b or len(a) < 2 or len(b) < 2:
        return 0
    rows, inner = a[-2:] if not attribute(node, "transA", 0) else a[:-3:-1]
    columns = b[-2 if attribute(node, "transB", 0) else -1]
    tall = math.prod(a[:-2]) * rows  # one tall product where B has no batch
    steps = min(inner, _BLOCK)  # a word of bfloat16 holds two: half as many then
    most = min(_MOST_ROWS, 2 * _ROWS * _BLOCK // max(min(inner, 2 * _BLOCK), 1))
    packed = _up(min(tall, most), _PANEL) * (_up(steps, _LANES) + _LANES)
    packed = min(packed, _ROWS * _BLOCK + _up(most, _PANEL) * 2 * _LANES + _PANEL * (_BLOCK + 2 * _LANES))
    sums = min(_up(tall, 6) * _up(columns, _COLUMNS), _SUMS) if inner > _BLOCK else 0
    return 4 * (packed + _COLUMNS * steps + sums)


def bias_bytes(node: ir.Node) -> int:
    """Bytes of a copy of the bias with room for whole vectors; none where it has that room."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    columns = math.prod(static_shape(bias) or ()) if bias is not None else 0
    return 4 * _up(columns, _LANES) if columns % _LANES else 0


def _up(n: int, to: int) -> int:
    return -(-n // to) * to
