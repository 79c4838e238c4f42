"""The seed of the backward half: a float32 scalar input."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortgraph.graph import stamp
from ortgraph.graph.edit import add_constant


def seed_input(graph: ir.Graph, seed: ir.Value) -> str:
    """Make ``seed`` (without producer) a float32 scalar graph input, cast and reshaped where the loss is another type.

    Returns:
        The input's name.
    """
    if seed.dtype == ir.DataType.FLOAT and seed.shape is not None and len(seed.shape) == 0:
        graph.inputs.append(seed)
        return str(seed.name)
    scalar = ir.Value(name=seed.name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(()))
    seed.name = None
    graph.inputs.append(scalar)
    assert seed.shape is not None and seed.dtype is not None
    constant = add_constant(graph, ir.tensor(np.arange(len(seed.shape))), f"{scalar.name}.axes")
    cast = ir.node("Cast", [scalar], {"to": seed.dtype}, name=f"{scalar.name}.cast")
    shaped = ir.node("Unsqueeze", [cast.outputs[0], constant], name=f"{scalar.name}.shape")
    for node in (cast, shaped):
        stamp(node, "from-onnx")
        node.outputs[0].name = f"{node.name}d"
        node.outputs[0].type = seed.type
    cast.outputs[0].shape, shaped.outputs[0].shape = ir.Shape(()), seed.shape
    ir.convenience.replace_all_uses_with(seed, shaped.outputs[0])
    graph.insert_before(graph[0], [cast, shaped])
    return str(scalar.name)
