"""Operators that inference optimizers make (com.microsoft), taken apart again into differentiable ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.capture.legalize_saved import BY, CONTRIB
from ortgraph.errors import UnsupportedError
from ortgraph.graph import Names, is_used, replace_value
from ortgraph.graph.edit import remove_node
from ortgraph.ops.builder import Builder
from ortgraph.ops.infer import infer_node

ML = "ai.onnx.ml"


def expand_fused(graph: ir.Graph, names: Names) -> int:
    """Take every fused operator of this table apart. Returns how many.

    Raises:
        UnsupportedError: A form of one that has no expansion.
    """
    count = 0
    for node in list(graph):
        rule = {CONTRIB: RULES, ML: ML_RULES}.get(node.domain, {}).get(node.op_type)
        if rule is None:
            infer_node(node, graph.opset_imports)
            continue
        build = Builder(graph, BY, before=node, origins=[node], names=names)
        results = rule(build, node)
        for old, new in zip(node.outputs, results, strict=False):
            if new is not None:
                replace_value(old, new)
            elif is_used(old):
                raise _refuse(node, f"its output {old.name!r} is read")
        remove_node(node)
        count += 1
    if not any(node.domain == ML for node in graph.all_nodes()):
        graph.opset_imports.pop(ML, None)
    return count


def _refuse(node: ir.Node, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"node {node.name!r}: the fused operator {node.op_type} cannot be taken apart: {reason}",
        "give the model as exported, before optimizing it for inference",
    )


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _transposed(b: Builder, node: ir.Node, index: int, flag: str, batch_flag: str) -> ir.Value:
    value = _input(node, index)
    assert value is not None
    if node.attributes.get_int(batch_flag, 0):
        raise _refuse(node, f"{batch_flag}=1")
    if not node.attributes.get_int(flag, 0):
        return value
    if value.shape is None:
        raise _refuse(node, f"the rank of input {index} is not known")
    rank = len(value.shape)
    if rank < 2:
        return value
    return b.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])


def _fused_matmul(b: Builder, node: ir.Node) -> list[ir.Value]:
    left = _transposed(b, node, 0, "transA", "transBatchA")
    right = _transposed(b, node, 1, "transB", "transBatchB")
    product = b.op("MatMul", left, right)
    alpha = node.attributes.get_float("alpha", 1.0)
    return [product if alpha == 1.0 else b.op("Mul", product, b.scalar(alpha, left))]


def _activated(b: Builder, node: ir.Node, value: ir.Value, parameters: dict[str, float]) -> ir.Value:
    name = node.attributes.get_string("activation", "")
    if not name:
        return value
    if name == "Clip":
        return b.op("Clip", value, b.scalar(parameters["min"], value), b.scalar(parameters["max"], value))
    if name not in ("Elu", "HardSigmoid", "LeakyRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Tanh"):
        raise _refuse(node, f"its activation {name}")
    options: dict[str, Any] = {**parameters}
    return b.op(name, value, **options)


def _fused_gemm(b: Builder, node: ir.Node) -> list[ir.Value]:
    kept = ("alpha", "beta", "transA", "transB")
    plain = {k: node.attributes[k].value for k in kept if k in node.attributes}
    product = b.op("Gemm", *node.inputs, **plain)
    extra = {
        k.removeprefix("activation_"): node.attributes.get_float(k)
        for k in ("activation_alpha", "activation_beta", "activation_gamma")
        if k in node.attributes
    }
    return [_activated(b, node, product, extra)]


def _fused_conv(b: Builder, node: ir.Node) -> list[ir.Value]:
    kept = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    plain = {k: node.attributes[k].value for k in kept if k in node.attributes}
    value = b.op("Conv", *(v for v in node.inputs[:3]), **plain)
    added = _input(node, 3)
    if added is not None:
        value = b.op("Add", value, added)
    given = list(node.attributes.get_floats("activation_params", []))
    name = node.attributes.get_string("activation", "")
    names = {"Clip": ("min", "max"), "LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}.get(name, ())
    return [_activated(b, node, value, dict(zip(names, given, strict=False)))]


def _gelu(b: Builder, node: ir.Node) -> list[ir.Value]:
    """Gelu, BiasGelu, FastGelu: the ONNX form, which becomes a composite operator after differentiation."""
    value, bias = node.inputs[0], _input(node, 1)
    if bias is not None:
        value = b.op("Add", value, bias)
    assert value is not None
    result = b.op("Gelu", value, approximate="tanh" if node.op_type == "FastGelu" else "none")
    result.type, result.shape = value.type, value.shape
    return [result]


def _quick_gelu(b: Builder, node: ir.Node) -> list[ir.Value]:
    x = node.inputs[0]
    assert x is not None
    scaled = b.op("Mul", x, b.scalar(node.attributes.get_float("alpha", 1.702), x))
    return [b.op("Mul", x, b.op("Sigmoid", scaled))]


def _layer_norm(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    found = b.op("LayerNormalization", *node.inputs, axis=node.attributes.get_int("axis", -1),
                 epsilon=node.attributes.get_float("epsilon", 1e-5))  # fmt: skip
    return [found]


def _root_mean_square(b: Builder, node: ir.Node, x: ir.Value, scale: ir.Value | None) -> list[ir.Value]:
    axis = node.attributes.get_int("axis", -1)
    if axis != -1 and x.shape is None:
        raise _refuse(node, "the rank of its input is not known")
    axes = [-1] if axis == -1 else list(range(axis % len(x.shape), len(x.shape)))  # type: ignore[arg-type]
    mean = b.op("ReduceMean", b.op("Mul", x, x), b.ints(axes), keepdims=1)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    inverse = b.op("Reciprocal", b.op("Sqrt", b.op("Add", mean, b.scalar(epsilon, x))))
    return [b.op("Mul", b.op("Mul", x, inverse), scale), inverse]


def _simplified_layer_norm(b: Builder, node: ir.Node) -> list[ir.Value]:
    x = node.inputs[0]
    assert x is not None
    return _root_mean_square(b, node, x, node.inputs[1])


def _skip_sum(b: Builder, node: ir.Node, bias_at: int) -> ir.Value:
    total = b.op("Add", node.inputs[0], node.inputs[1])
    bias = _input(node, bias_at)
    return total if bias is None else b.op("Add", total, bias)


def _skip_layer_norm(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    total = _skip_sum(b, node, 4)
    scale, bias = node.inputs[2], _input(node, 3)
    inputs = [total, scale] if bias is None else [total, scale, bias]
    normal = b.op("LayerNormalization", *inputs, axis=-1, epsilon=node.attributes.get_float("epsilon", 1e-12))
    return [normal, None, None, total]


def _skip_simplified_layer_norm(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    total = _skip_sum(b, node, 3)
    normal, inverse = _root_mean_square(b, node, total, node.inputs[2])
    return [normal, None, inverse, total]


def _array_feature_extractor(b: Builder, node: ir.Node) -> list[ir.Value]:
    """Columns of X by their numbers; of a vector, a row of them: how scikit-learn's labels are looked up."""
    x, columns = node.inputs[:2]
    if x is None or x.shape is None:
        raise _refuse(node, "the rank of its input is not known")
    picked = b.op("Gather", x, b.op("Reshape", columns, b.ints([-1])), axis=-1)
    return [b.op("Unsqueeze", picked, b.ints([0])) if len(x.shape) == 1 else picked]


ML_RULES: dict[str, Callable[[Builder, ir.Node], Sequence[ir.Value | None]]] = {
    "ArrayFeatureExtractor": _array_feature_extractor,
}
RULES: dict[str, Callable[[Builder, ir.Node], Sequence[ir.Value | None]]] = {
    "BiasGelu": _gelu,
    "FastGelu": _gelu,
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "Gelu": _gelu,
    "LayerNormalization": _layer_norm,
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _simplified_layer_norm,
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_norm,
    "TransposeMatMul": _fused_matmul,
}
