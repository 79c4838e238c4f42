"""Memory that the attention kernels keep for each thread: packed operands, scores and sums of one piece of work.

The sizes are those of words of one element: in bf16, where a word holds two, less is used.
"""

from __future__ import annotations

import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops.shapes import attribute, given

_KEYS = 128  # attention.h
_FORWARD_QUERIES, _FORWARD_LANES = 256, 64  # attention.cpp
_QUERIES = 128  # attention_grad.cpp


def _up(n: int) -> int:
    return -(-n // 16) * 16


def _sizes(node: ir.Node, q: int) -> tuple[int, int, int] | None:
    """Widths of keys and values, number of keys."""
    k, v = (static_shape(value) if (value := given(node, q + i)) is not None else None for i in (1, 2))
    if k is None or v is None or len(k) != 4 or len(v) != 4:
        return None
    words = str(attribute(node, "layout", "bhsd")).split(",")
    return k[3], v[3], k[1 if words[1 % len(words)] == "bshd" else 2]


def _extras(node: ir.Node, mask: int, lanes: int) -> int:
    """The mask and the dropout factors of a block."""
    return _KEYS * lanes * ((given(node, mask) is not None) + (given(node, mask + 1) is not None))


def forward(node: ir.Node) -> int:
    """Bytes for each thread of Attention."""
    found = _sizes(node, 0)
    if found is None:
        return 0
    width, out, _ = found
    floats = (_FORWARD_QUERIES + _KEYS) * (_up(width) + _up(out)) + _KEYS * _FORWARD_LANES
    return 4 * (floats + _extras(node, 3, _FORWARD_LANES))


def backward(node: ir.Node) -> int:
    """Bytes for each thread of AttentionGrad."""
    found = _sizes(node, 1)
    if found is None:
        return 0
    width, out, keys = found
    floats = keys * (3 * _up(width) + 2 * _up(out)) + _QUERIES * (3 * _up(width) + 2 * _up(out)) + 3 * _KEYS * _QUERIES
    return 4 * (floats + _extras(node, 6, _QUERIES))
