"""The gradient of Gather: the builder's GatherGrad sums in an order that changes from run to run."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from ortgraph.capture.legalize_saved import COMPOSITE
from ortgraph.capture.onnx_joint import Joint
from ortgraph.graph import Names, replace_value, static_shape
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder


def finish_embeddings(graph: ir.Graph, names: Names) -> Callable[[Joint], None]:
    """A step that makes EmbeddingGrad of each GatherGrad of rows of a table of known shape."""

    def finish(joint: Joint) -> None:
        for node in joint.backward:
            if node.op_type != "GatherGrad" or node.graph is None or node.attributes.get_int("axis", 0) != 0:
                continue
            table = node.outputs[0]
            shape = static_shape(table)
            if not shape:
                continue
            build = Builder(graph, "legalize", before=node, origins=[node], names=names)
            replace_value(table, _embedding_grad(build, node, shape))
            remove_node(node)

    return finish


def _embedding_grad(build: Builder, node: ir.Node, shape: tuple[int, ...]) -> ir.Value:
    """EmbeddingGrad over rows, a row of several axes flattened."""
    _, indices, dy = node.inputs
    assert indices is not None and dy is not None
    width = math.prod(shape[1:])
    if len(shape) != 2:
        count = None if indices.shape is None else len(indices.shape)
        leading = [0] * count if count is not None and len(shape) > 1 and count > 0 else [-1]
        dy = build.op("Reshape", dy, build.ints([*leading, width]))
    gradient = build.op("EmbeddingGrad", dy, indices, domain=COMPOSITE, rows=shape[0], padding_idx=-1)
    if len(shape) != 2:
        gradient = build.op("Reshape", gradient, build.ints(shape))
    gradient.type, gradient.shape = node.outputs[0].type, node.outputs[0].shape
    return gradient
