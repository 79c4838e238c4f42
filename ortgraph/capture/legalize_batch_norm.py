"""BatchNormalization: batch statistics with updated running ones, or frozen statistics in plain operators."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortgraph.capture.legalize_saved import BY, CONTRIB, replace_in_place
from ortgraph.capture.onnx_joint import Joint
from ortgraph.errors import UnsupportedError
from ortgraph.graph import Names, is_used, replace_value
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder

logger = logging.getLogger(__name__)
_OUTPUTS = ("", "new_mean", "new_var", "saved_mean", "saved_inv_std")


def batch_norms(graph: ir.Graph) -> list[ir.Node]:
    return [n for n in graph if n.op_type == "BatchNormalization" and n.domain in ("", "ai.onnx")]


def freeze_statistics(graph: ir.Graph, names: Names) -> int:
    """Y = (X - mean) * (Scale / sqrt(var + epsilon)) + Bias with the running statistics, per channel.

    Raises:
        UnsupportedError: The rank of X is not known.
    """
    nodes = batch_norms(graph)
    for node in nodes:
        build = Builder(graph, BY, before=node, origins=[node], names=names)
        x, scale, bias, mean, variance = node.inputs[:5]
        if x is None or x.shape is None or variance is None or any(is_used(o) for o in node.outputs[1:]):
            raise UnsupportedError(
                f"node {node.name!r}: BatchNormalization of unknown rank, or whose running statistics are read",
                "give the input's shape with shapes={...}, or train_batch_norm=True",
            )
        column = build.ints([-1] + [1] * (len(x.shape) - 2))
        epsilon = build.scalar(node.attributes.get_float("epsilon", 1e-5), variance)
        factor = build.op("Div", scale, build.op("Sqrt", build.op("Add", variance, epsilon)))
        centred = build.op("Sub", x, build.op("Reshape", mean, column))
        scaled = build.op("Mul", centred, build.op("Reshape", factor, column))
        replace_value(node.outputs[0], build.op("Add", scaled, build.op("Reshape", bias, column)))
        remove_node(node)
    return len(nodes)


def train_statistics(graph: ir.Graph, names: Names) -> tuple[dict[str, str], Callable[[Joint], None]]:
    """Make stand-ins that the gradient builder knows; the returned step makes composites of them.

    Running statistics follow PyTorch: new = (1 - m) old + m batch with m = 1 - the ONNX momentum, and the unbiased
    batch variance. A statistic shared by several nodes is updated by each in turn.

    Returns:
        Per running statistic the output that updates it, and the step to run on the joint graph.
    """
    nodes = batch_norms(graph)
    momenta: dict[ir.Node, float] = {}
    latest: dict[str, ir.Value] = {}
    for node in nodes:
        momenta[node] = _torch_momentum(node)
        buffers = list(node.inputs[3:5])
        _stand_in(node, names)
        for i, buffer in enumerate(buffers):
            if buffer is None or not buffer.is_initializer():
                continue
            name = str(buffer.name)
            if name in latest:
                node.replace_input_with(3 + i, latest[name])
            latest[name] = node.outputs[1 + i]
    updates = {name: names.fresh(f"{name}.update") for name in latest}

    def finish(joint: Joint) -> None:
        for node in joint.backward:
            if node.op_type == "BatchNormalizationGrad" and node.graph is not None:
                replace_in_place(node, "BatchNormGrad", list(node.inputs), {})
        for node in nodes:
            epsilon = node.attributes.get_float("epsilon", 1e-5)
            replace_in_place(node, "BatchNorm", list(node.inputs), {"epsilon": epsilon, "momentum": momenta[node]})
        for name, value in latest.items():
            value.name = updates[name]
            graph.outputs.append(value)

    return updates, finish


def _torch_momentum(node: ir.Node) -> float:
    kept = float(str(np.float32(node.attributes.get_float("momentum", 0.9))))  # the decimal that was meant
    return round(1.0 - kept, 12)


def _stand_in(node: ir.Node, names: Names) -> None:
    node.resize_outputs(5)
    statistics = node.inputs[3]
    for output, suffix in zip(node.outputs, _OUTPUTS, strict=True):
        if suffix and not output.name:
            output.name = names.fresh(f"{node.outputs[0].name}.{suffix}")
        if suffix and statistics is not None:
            output.type, output.shape = statistics.type, statistics.shape
    node.domain, node.op_type = CONTRIB, "BatchNormInternal"
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    assert isinstance(node.graph, ir.Graph)
    node.graph.opset_imports.setdefault(CONTRIB, 1)
