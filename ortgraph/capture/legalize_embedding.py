"""The gradient of Gather: the builder's GatherGrad sums in an order that changes from run to run."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ortgraph.capture.legalize_saved import COMPOSITE
from ortgraph.capture.onnx_joint import Joint
from ortgraph.graph import Names, replace_value, static_shape
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder


def finish_embeddings(graph: ir.Graph, names: Names) -> Callable[[Joint], None]:
    """A step that makes EmbeddingGrad of each GatherGrad of rows of a table [rows, width] of known shape."""

    def finish(joint: Joint) -> None:
        for node in joint.backward:
            if node.op_type != "GatherGrad" or node.graph is None or node.attributes.get_int("axis", 0) != 0:
                continue
            table = node.outputs[0]
            shape = static_shape(table)
            if shape is None or len(shape) != 2:
                continue
            build = Builder(graph, "legalize", before=node, origins=[node], names=names)
            _, indices, dy = node.inputs
            gradient = build.op("EmbeddingGrad", dy, indices, domain=COMPOSITE, rows=shape[0], padding_idx=-1)
            gradient.type, gradient.shape = table.type, table.shape
            replace_value(table, gradient)
            remove_node(node)

    return finish
