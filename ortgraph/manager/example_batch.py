"""A made-up batch of a graph's input types, for comparisons without data."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ortgraph.graph import TrainingGraph

_VIEWS = frozenset({"Reshape", "Slice", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose", "Cast", "Pad"})


def example_batch(graph: TrainingGraph, sizes: Mapping[str, int] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of the graph's input types: what was recorded at capture is not known, so integers are small.

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
        if dtype.kind in "iub":
            batch[name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            batch[name] = rng.standard_normal(shape).astype(dtype)
        ignored = _ignored(value)
        if ignored is not None and dtype.kind == "i" and batch[name].size > 1:
            batch[name].reshape(-1)[1::4] = ignored
    return batch


def _ignored(value: ir.Value) -> int | None:
    """The ``ignore_index`` of a loss whose target is this input, if nothing but losses reads it as anything else."""
    found: int | None = None
    stack = [value]
    while stack:
        for node, index in stack.pop().uses():
            if node.op_type in _VIEWS and index == 0:
                stack.extend(node.outputs)
            elif "ignore_index" in node.attributes:
                found = node.attributes["ignore_index"].as_int()
            elif node.op_type not in ("Equal", "Shape"):
                return None
    return found
