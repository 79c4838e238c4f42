"""Time per node stays flat, also with many graph outputs, many readers of one value and many rewrites."""

from __future__ import annotations

import time

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortgraph.manager.registry import get

PER_LAYER = {
    "eliminate-dead-code": [("Neg", 1, {}), ("Exp", 1, {})],
    "eliminate-identity": [("Identity", 1, {}), ("Mul", "one", {})],
    "eliminate-cast-pairs": [("Cast", 1, {"to": 11}), ("Cast", 1, {"to": 1})],
    "simplify-transposes": [("Transpose", 1, {"perm": [1, 0]}), ("Transpose", 1, {"perm": [1, 0]})],
    "simplify-reshapes": [("Reshape", "flat", {}), ("Reshape", "back", {})],
    "fold-constants": [("Add", "one", {}), ("Add", "fold", {})],
    "fold-shapes": [("Reshape", "shape", {}), ("Neg", 1, {})],
    "eliminate-common-subexpressions": [("Neg", "twice", {}), ("Neg", 1, {})],
    "sort-nodes": [("Neg", 1, {}), ("Exp", 1, {})],
}


def layered(name: str, nodes: int) -> ir.Model:
    """``nodes`` nodes in layers of about four, every layer with a graph output, one constant read by all."""
    made, outputs, last = [], [], "x"
    constants = [np.array(1, np.float32), np.array([6], np.int64), np.array([2, 3], np.int64)]
    init = [onnx.numpy_helper.from_array(a, n) for a, n in zip(constants, ("one", "flat", "back"), strict=True)]
    info = [onnx.helper.make_tensor_value_info("x", 1, [2, 3])]
    layer = 0
    while len(made) < nodes:
        start = last
        for i, (op, kind, attributes) in enumerate(PER_LAYER[name]):
            out = f"v{layer}_{i}"
            if kind == "shape":
                made.append(onnx.helper.make_node("Shape", [start], [f"s{layer}"]))
                inputs = [last, f"s{layer}"]
            elif kind == "fold":
                made.append(onnx.helper.make_node("Add", ["one", "one"], [f"k{layer}"]))
                inputs = [last, f"k{layer}"]
            elif kind == "twice":
                made.append(onnx.helper.make_node("Neg", [last], [f"d{layer}"]))
                made.append(onnx.helper.make_node("Add", [f"d{layer}", "one"], [f"e{layer}"]))
                outputs.append(f"e{layer}")
                inputs = [last]
            else:
                inputs = [last] if kind == 1 else [last, kind]
            made.append(onnx.helper.make_node(op, inputs, [out], **attributes))
            last = out
        if name == "eliminate-dead-code":
            last = start  # every layer is dead but for one node
        made.append(onnx.helper.make_node("Add", [last, "one"], [f"y{layer}"]))
        outputs.append(f"y{layer}")
        last = f"y{layer}"
        layer += 1
    out = [onnx.helper.make_tensor_value_info(o, 1, [2, 3]) for o in outputs]
    graph = onnx.helper.make_graph(made, "g", info, out, init)
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def seconds(name: str, nodes: int) -> float:
    best = float("inf")
    for _ in range(2):
        model = layered(name, nodes)
        began = time.process_time()
        outcome = get(name)()(model)
        best = min(best, time.process_time() - began)
    assert outcome.modified or name == "sort-nodes"
    return best


@pytest.mark.parametrize("name", PER_LAYER)
def test_three_thousand_nodes_take_less_than_half_a_second(name):
    assert seconds(name, 3000) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", PER_LAYER)
def test_time_per_node_is_flat(name):
    small, large = seconds(name, 3000), seconds(name, 12000)
    assert large / 4 < 2 * small + 0.02, f"{small:.3f} s for 3,000 nodes, {large:.3f} s for 12,000"
