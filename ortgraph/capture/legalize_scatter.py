"""ScatterElements that adds: shown to the gradient builder as one that puts, whose gradient by the updates is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.capture.legalize_saved import BY
from ortgraph.capture.onnx_joint import Joint
from ortgraph.graph import Names, replace_value, static_shape
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder


def add_apart(path: Sequence[ir.Node], names: Names) -> Callable[[Joint], None]:
    """Y = X + (zeros with the updates added at their places); the returned step makes the inner node add again."""
    inner: list[ir.Node] = []
    for node in path:
        if node.op_type != "ScatterElements" or node.attributes.get_string("reduction", "none") != "add":
            continue
        assert isinstance(node.graph, ir.Graph)
        build = Builder(node.graph, BY, before=node, origins=[node], names=names)
        x, indices, updates = node.inputs[:3]
        assert x is not None and x.dtype is not None
        shape, zero = static_shape(x), ir.tensor(np.zeros(1, x.dtype.numpy()))
        size = build.op("Shape", x) if shape is None else build.ints(shape)
        start = build.op("ConstantOfShape", size, value=zero)
        put = build.op("ScatterElements", start, indices, updates, axis=node.attributes.get_int("axis", 0))
        inner.append(put.producer())  # type: ignore[arg-type]
        replace_value(node.outputs[0], build.op("Add", x, put))
        remove_node(node)

    def finish(joint: Joint) -> None:
        for node in inner:
            node.attributes["reduction"] = ir.AttrString("reduction", "add")

    return finish
