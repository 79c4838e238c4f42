"""Outputs that the backward half reads: added before differentiation. Operators with state become stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.capture.legalize_control import constant_value
from ortgraph.capture.onnx_joint import Joint
from ortgraph.errors import UnsupportedError
from ortgraph.graph import Names, State, is_used, replace_value, static_shape
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder

BY = "legalize"
CONTRIB = "com.microsoft"
COMPOSITE = "ortgraph"
_OUTPUTS = {"LayerNormalization": 3, "MaxPool": 2, "SoftmaxCrossEntropyLoss": 2, "SimplifiedLayerNormalization": 2}


def add_saved_outputs(graph: ir.Graph, path: list[ir.Node], names: Names) -> int:
    """LayerNormalization gets mean and inverse deviation, MaxPool its indices, the loss its log-probabilities."""
    count = 0
    for node in path:
        wanted = _OUTPUTS.get(node.op_type, 0) if node.domain in ("", "ai.onnx") else 0
        named = [o.name for o in node.outputs]
        if not wanted or (len(named) >= wanted and all(named)):
            continue
        node.resize_outputs(max(wanted, len(named)))
        for output in node.outputs:
            if not output.name:
                output.name = names.fresh(f"{node.outputs[0].name}.saved")
        count += 1
    return count


def row_major_indices(path: list[ir.Node]) -> int:
    """MaxPools count their indices row by row: the runtime's gradient takes column-major ones for row-major ones.

    Raises:
        UnsupportedError: Something reads the column-major indices.
    """
    count = 0
    for node in path:
        if node.op_type != "MaxPool" or not node.attributes.get_int("storage_order", 0):
            continue
        if len(node.outputs) > 1 and is_used(node.outputs[1]):
            raise UnsupportedError(
                f"node {node.name!r}: the column-major indices of MaxPool are read", "use storage_order=0"
            )
        del node.attributes["storage_order"]
        count += 1
    return count


def complete_norms(path: list[ir.Node], names: Names) -> int:
    """LayerNormalization without bias gets one of zeros: the builder reads it.

    Raises:
        UnsupportedError: The shape of the scale is not known.
    """
    count = 0
    for node in path:
        if node.op_type != "LayerNormalization" or (len(node.inputs) > 2 and node.inputs[2] is not None):
            continue
        scale = node.inputs[1]
        shape = None if scale is None else static_shape(scale)
        if scale is None or shape is None or scale.dtype is None:
            raise UnsupportedError(f"node {node.name!r}: the shape of its scale is not known", "give it a static shape")
        assert isinstance(node.graph, ir.Graph)
        build = Builder(node.graph, BY, before=node, origins=[node], names=names)
        node.resize_inputs(3)
        node.replace_input_with(2, build.const(np.zeros(shape), scale.dtype))
        count += 1
    return count


def explicit_pads(path: list[ir.Node]) -> int:
    """Convolutions and pools with auto_pad get their pads as numbers: the runtime's gradients ignore auto_pad.

    Raises:
        UnsupportedError: A spatial size is not known.
    """
    count = 0
    for node in path:
        mode = node.attributes.get_string("auto_pad", "NOTSET")
        if mode == "NOTSET" or node.op_type not in ("Conv", "MaxPool", "AveragePool"):
            continue
        x, weight = node.inputs[0], node.inputs[1] if node.op_type == "Conv" else None
        kernel = node.attributes.get_ints("kernel_shape", None)
        kernel = kernel or (None if weight is None or static_shape(weight) is None else static_shape(weight)[2:])  # type: ignore[index]
        if x is None or x.shape is None or kernel is None:
            raise UnsupportedError(f"node {node.name!r}: auto_pad with unknown sizes", "export with explicit pads")
        pads = [0] * 2 * len(kernel) if mode == "VALID" else _same_pads(node, list(x.shape)[2:], list(kernel), mode)
        del node.attributes["auto_pad"]
        node.attributes["pads"] = ir.AttrInt64s("pads", pads)
        count += 1
    return count


def _same_pads(node: ir.Node, sizes: list[int | ir.SymbolicDim], kernel: list[int], mode: str) -> list[int]:
    ones = [1] * len(kernel)
    begin, end = [], []
    strides, dilations = node.attributes.get_ints("strides", ones), node.attributes.get_ints("dilations", ones)
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        if not isinstance(size, int):
            raise UnsupportedError(
                f"node {node.name!r}: auto_pad={mode} with an unknown spatial size", "fix it with shapes={...}"
            )
        total = max((-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        small = total // 2
        begin.append(small if mode == "SAME_UPPER" else total - small)
        end.append(total - begin[-1])
    return [*begin, *end]


def separate_repeated_inputs(path: list[ir.Node], names: Names) -> int:
    """Where a node reads one weight or input twice (X * X), let it read a copy the second time.

    The builder would define that gradient twice.
    """
    count = 0
    for node in path:
        seen: set[ir.Value] = set()
        for i, value in enumerate(node.inputs):
            if value is None or value.producer() is not None or value not in seen:
                seen.update([] if value is None else [value])
                continue
            assert isinstance(node.graph, ir.Graph)
            build = Builder(node.graph, BY, before=node, origins=[node], names=names)
            node.replace_input_with(i, build.op("Identity", value))
            count += 1
    return count


def training_dropouts(graph: ir.Graph, names: Names) -> list[ir.Node]:
    """Remove the Dropouts that are identities and give the others their mask. Returns those that draw.

    Raises:
        UnsupportedError: The mode or the ratio is computed when the graph runs.
    """
    drawing = []
    for node in list(graph):
        if node.op_type != "Dropout" or node.domain not in ("", "ai.onnx"):
            continue
        training, ratio = _constant_input(node, 2, False), float(_constant_input(node, 1, 0.5))
        if not training or ratio == 0.0:
            _remove_identity(node, names)
            continue
        if not 0.0 < ratio < 1.0:
            raise UnsupportedError(
                f"node {node.name!r}: Dropout with ratio {ratio}", "a ratio from 0 up to, not including, 1"
            )
        node.resize_outputs(2)
        if not node.outputs[1].name:
            node.outputs[1].name = names.fresh(f"{node.outputs[0].name}.mask")
        node.outputs[1].type, node.outputs[1].shape = ir.TensorType(ir.DataType.BOOL), node.outputs[0].shape
        drawing.append(node)
    return drawing


def _constant_input(node: ir.Node, index: int, default: float | bool) -> float | bool:
    value = node.inputs[index] if len(node.inputs) > index else None
    if value is None:
        return default
    tensor = ir.convenience.get_const_tensor(value)
    known = tensor.numpy() if tensor is not None else constant_value(value)
    if known is None:
        what = "ratio" if index == 1 else "training_mode"
        raise UnsupportedError(
            f"node {node.name!r}: the {what} of Dropout is computed when the graph runs", f"make {what} a constant"
        )
    return known.reshape(()).item()


def _remove_identity(node: ir.Node, names: Names) -> None:
    source = node.inputs[0]
    assert source is not None and isinstance(node.graph, ir.Graph)
    if len(node.outputs) > 1 and is_used(node.outputs[1]):
        build = Builder(node.graph, BY, before=node, origins=[node], names=names)
        everything = ir.tensor(np.ones(1, dtype=bool))
        mask = build.op("ConstantOfShape", build.op("Shape", source), value=everything)
        replace_value(node.outputs[1], mask)
    replace_value(node.outputs[0], source)
    remove_node(node)


def finish_dropouts(
    graph: ir.Graph, drawing: list[ir.Node], uniform: list[ir.Node], names: Names
) -> tuple[list[State], Callable[[Joint], None]]:
    """States of the random generator, and the step that makes composites of Dropout, its gradient and uniform draws."""
    if not drawing and not uniform:
        return [], lambda joint: None
    key, step, following = names.fresh("random_key"), names.fresh("random_step"), names.fresh("random_step.next")
    states = [
        State("random_key", key, None, "random_key"),
        State("random_step", step, following, "random_step"),
    ]

    def finish(joint: Joint) -> None:
        scalars = [ir.Value(name=n, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(())) for n in (key, step)]
        graph.inputs.extend(scalars)
        masks = {node.outputs[1]: (float(_constant_input(node, 1, 0.5)), i) for i, node in enumerate(drawing)}
        for node in joint.backward:
            if node.op_type == "DropoutGrad" and node.graph is not None:
                ratio, number = masks[node.inputs[1]]  # type: ignore[index]
                replace_in_place(node, "DropoutGrad", node.inputs[:2], {"ratio": ratio, "draw": number})
        for number, node in enumerate(drawing):
            ratio = float(_constant_input(node, 1, 0.5))
            replace_in_place(node, "Dropout", [node.inputs[0], *scalars], {"ratio": ratio, "node": number})
        for number, node in enumerate(uniform, len(drawing)):
            shape = static_shape(node.outputs[0])
            fixed = {} if shape is None else {"shape": list(shape)}
            replace_in_place(node, "RandomUniform", scalars, {"node": number, **fixed})
        build = Builder(graph, BY, names=names)
        advanced = build.op("Add", scalars[1], build.const(1, np.int64))
        advanced.name = following
        graph.outputs.append(advanced)

    return states, finish


def replace_in_place(
    node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> None:
    """A composite in the place of ``node``, with the same outputs."""
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)
    node.resize_inputs(len(inputs))
    for i, value in enumerate(inputs):
        node.replace_input_with(i, value)
    node.domain, node.op_type = COMPOSITE, op_type
    node.attributes.clear()
    for name, attribute in attributes.items():
        node.attributes[name] = ir.convenience.convert_attribute(name, attribute)
    assert isinstance(node.graph, ir.Graph)
    node.graph.opset_imports.setdefault(COMPOSITE, 1)
