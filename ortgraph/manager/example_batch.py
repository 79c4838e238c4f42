"""A made-up batch of a graph's input types, for comparisons without data."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ortgraph.graph import TrainingGraph

_VIEWS = frozenset({"Reshape", "Slice", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose", "Cast", "Pad"})


def example_batch(graph: TrainingGraph, sizes: Mapping[str, int] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of the graph's input types: what was recorded at capture is not known.

    Integers stay below what they index (rows of a table, classes of a loss), and below 2 where that is unknown.
    Targets of a loss with ``ignore_index`` hold it at every fourth place.

    Args:
        sizes: Value per symbolic dimension; 2 when absent.
    """
    rng = np.random.default_rng(seed)
    sizes = sizes or {}
    batch = {}
    by_name = {v.name: v for v in graph.graph.inputs}
    for name in graph.signature.inputs:
        value = by_name[name]
        assert value.shape is not None and value.dtype is not None
        shape = tuple(d if isinstance(d, int) else sizes.get(str(d), 2) for d in value.shape)
        dtype = value.dtype.numpy()
        if dtype.kind not in "iub":
            batch[name] = rng.standard_normal(shape).astype(dtype)
            continue
        limit, ignored = _meaning(value) if dtype.kind == "i" else (2, None)
        batch[name] = rng.integers(0, limit, shape).astype(dtype)
        if ignored is not None and batch[name].size > 1:
            batch[name].reshape(-1)[1::4] = ignored
    return batch


def _meaning(value: ir.Value) -> tuple[int, int | None]:
    """Bound of an integer input, and the ``ignore_index`` of a loss if it is a target and nothing else."""
    limits: list[int] = []
    ignored: int | None = None
    indexes = False
    stack = [value]
    while stack:
        for node, index in stack.pop().uses():
            if node.op_type in _VIEWS and index == 0:
                stack.extend(node.outputs)
            elif node.op_type == "Gather" and index == 1:
                indexes = True
                limits.append(_size(node.inputs[0], node.attributes.get_int("axis", 0)))
            elif node.op_type == "EmbeddingGrad":
                indexes = True
                limits.append(node.attributes.get_int("rows", 2))
            elif "ignore_index" in node.attributes:
                limits.append(_size(node.inputs[index - 1], 1))  # scores stand before the targets, forward and backward
                ignored = node.attributes.get_int("ignore_index", -100)
            elif node.op_type != "Shape":
                return 2, None
    return max(2, min(limits, default=2)), None if indexes else ignored


def _size(value: ir.Value | None, axis: int) -> int:
    """The size of a dimension, 2 when it is unknown."""
    if value is None or value.shape is None or len(value.shape) <= axis:
        return 2
    size = value.shape[axis]
    return size if isinstance(size, int) else 2
