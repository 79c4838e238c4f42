"""Operator table: ONNX Runtime's com.microsoft operators, for inference and for training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from ortgraph.errors import UnsupportedError
from ortgraph.ops import contrib_grad as grad
from ortgraph.ops.activation import gelu, log_softmax_grad, relu_grad, sigmoid_grad, softmax_grad, tanh_grad
from ortgraph.ops.builder import Builder
from ortgraph.ops.convolution import conv_flops, conv_grad, conv_grad_flops, conv_grad_types
from ortgraph.ops.matmul import gemm_flops, product_flops, product_shape
from ortgraph.ops.movement import concat_shape, split_types
from ortgraph.ops.normalization import layer_norm_types
from ortgraph.ops.reduction import reduction_types
from ortgraph.ops.shapes import (
    Types,
    attribute,
    decimal,
    element_count,
    elements_flops,
    given,
    like,
    operand,
    operands,
    operator,
    retyped,
    shape_of,
    typed,
)
from ortgraph.ops.spec import CONTRIB, Expansion, InferRule, OpSpec, register

_FIRST = ((0, 0),)
_BOTH = ((0, 0), (1, 0))

_PRODUCT: dict[str, Any] = {"precision": "low", "low_inputs": (0, 1), "low_outputs": (0,)}


def _op(
    op_type: str,
    doc: str,
    infer: InferRule | None = None,
    flops: int = 0,
    domain: str = CONTRIB,
    cost_rule: Callable[[ir.Node], int] | None = None,
    **facts: Any,
) -> OpSpec:
    cost = cost_rule or (elements_flops(flops) if flops else None)
    return OpSpec(domain, op_type, infer=infer, doc=doc, flops=cost, **facts)


def _fused_matmul_types(node: ir.Node) -> Types | None:
    a, b = given(node, 0), given(node, 1)
    left, right = shape_of(a), shape_of(b)
    if attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0) or left is None or right is None:
        return [retyped(a, None)]
    if attribute(node, "transA", 0) and len(left) > 1:
        left = (*left[:-2], left[-1], left[-2])
    if attribute(node, "transB", 0) and len(right) > 1:
        right = (*right[:-2], right[-1], right[-2])
    return [retyped(a, product_shape(left, right))]


def _fused_matmul_flops(node: ir.Node) -> int:
    shape = shape_of(given(node, 0))
    if not shape:
        return 0
    inner = shape[-2 if attribute(node, "transA", 0) and len(shape) > 1 else -1]
    return product_flops(node, inner) if isinstance(inner, int) else 0


def _gemm_types(node: ir.Node) -> Types:
    a = given(node, 0)
    left, right = shape_of(a), shape_of(given(node, 1))
    if left is None or right is None:
        return [retyped(a, None)]
    rows, columns = left[1 if attribute(node, "transA", 0) else 0], right[0 if attribute(node, "transB", 0) else 1]
    return [retyped(a, (rows, columns))]


def _skip_norm_types(node: ir.Node) -> Types:
    x = given(node, 0)
    shape = shape_of(x)
    row = None if shape is None else (*shape[:-1], 1)
    saved = None if x is None else (ir.DataType.FLOAT, row)
    return [typed(x), saved, saved, typed(x)][: len(node.outputs)]


def _rms_norm_types(node: ir.Node) -> Types:
    types = layer_norm_types(node)
    return types[:2]


def _shape_input(index: int, dtype_of: int) -> InferRule:
    """The output has the shape that a shape tensor holds, when that is known."""

    def rule(node: ir.Node) -> Types:
        dims = grad.shape_elements(given(node, index))
        return [retyped(given(node, dtype_of), None if dims is None else tuple(dims))]

    return rule


def _concat_training_types(node: ir.Node) -> Types:
    first = given(node, 0)
    shape = shape_of(first)
    joined = retyped(first, None if shape is None else concat_shape(node, shape))
    return [joined, (ir.DataType.INT64, (len(node.inputs),))][: len(node.outputs)]


def _loss_types(node: ir.Node) -> Types:
    scores, labels = given(node, 0), given(node, 1)
    to = attribute(node, "output_type", 0)
    shape = shape_of(labels) if attribute(node, "reduction", "mean") == "none" else ()
    value = retyped(scores, shape)
    if value is not None and to:
        value = (ir.DataType(to), value[1])
    return [value, typed(scores)][: len(node.outputs)]


def _loss_grad_types(node: ir.Node) -> Types:
    result, to = typed(given(node, 1)), attribute(node, "output_type", 0)
    return [(ir.DataType(to), result[1]) if result is not None and to else result]


def _batch_norm_types(node: ir.Node) -> Types:
    return [typed(given(node, i)) for i in (0, 3, 4, 3, 4)][: len(node.outputs)]


def _unknown_shape(node: ir.Node) -> Types:
    return [retyped(given(node, 0), None)]


def _accumulator_types(node: ir.Node) -> Types:
    return [(ir.DataType.BOOL, (1,)), typed(given(node, 0))][: len(node.outputs)]


def _adam_types(node: ir.Node) -> Types:
    order = (1, 4, 5, 2, 3, 6)
    return [typed(given(node, i)) for i in order][: len(node.outputs)]


def _axes_types(node: ir.Node) -> Types:
    shapes = [grad.shape_elements(given(node, i)) for i in (0, 1)]
    if shapes[0] is None or shapes[1] is None:
        return [(ir.DataType.INT64, None)] * len(node.outputs)
    axes = [grad.reduced_axes(shapes[0], shapes[1]), grad.reduced_axes(shapes[1], shapes[0])]
    return [(ir.DataType.INT64, (len(a),)) for a in axes][: len(node.outputs)]


def _reduce_training_types(node: ir.Node) -> Types:
    return reduction_types(node) or [retyped(given(node, 0), None)]


def _weight_flops(node: ir.Node) -> int:
    return 14 * element_count(given(node, 2))


def _scalar_float(node: ir.Node) -> Types:
    return [retyped(given(node, 0), ())]


def _scalar_bool(node: ir.Node) -> Types:
    return [(ir.DataType.BOOL, ())]


def _quick_gelu(b: Builder, node: ir.Node) -> list[ir.Value]:
    x = operand(node, 0)
    alpha = decimal(node, "alpha", 1.702)
    scaled = x if alpha == 1.0 else b.op("Mul", x, b.scalar(alpha, x))
    return [b.op("Mul", x, b.op("Sigmoid", scaled))]


def _bias_gelu(tanh: bool) -> Expansion:
    def expand(b: Builder, node: ir.Node) -> list[ir.Value]:
        bias = given(node, 1)
        x = operand(node, 0) if bias is None else b.op("Add", operand(node, 0), bias)
        return [gelu(b, x, tanh)]

    return expand


def _fused_matmul(b: Builder, node: ir.Node) -> list[ir.Value]:
    sides = []
    for value, side in zip(operands(node, 2), "AB", strict=True):
        turned = attribute(node, f"transBatch{side}", 0)
        if turned and value.shape is None:
            raise UnsupportedError(
                f"{operator(node)} {node.name!r}: the rank of operand {side} is not known",
                "use a runtime with the kernel",
            )
        rank = len(value.shape) if value.shape is not None else 0
        order = [*range(1, rank - 1), 0, rank - 1] if turned and rank > 2 else list(range(rank))
        if attribute(node, f"trans{side}", 0) and rank > 1:
            order[-2:] = order[:-3:-1]
        if order != list(range(rank)):
            value = b.op("Transpose", value, perm=order)
        sides.append(value)
    result = b.op("MatMul", *sides)
    alpha = decimal(node, "alpha", 1.0)
    return [result if alpha == 1.0 else b.op("Mul", result, b.scalar(alpha, result))]


register(
    # Inference operators.
    _op("FusedMatMul", "Y = alpha A' B'", _fused_matmul_types, expand=_fused_matmul,
        cost_rule=_fused_matmul_flops, **_PRODUCT),
    _op("TransposeMatMul", "Y = alpha A' B'", _fused_matmul_types, expand=_fused_matmul,
        cost_rule=_fused_matmul_flops, **_PRODUCT),
    _op("FusedGemm", "Y = activation(alpha A' B' + beta C)", _gemm_types, precision="accumulate",
        cost_rule=gemm_flops),
    _op("FusedConv", "Y = activation(X * W + B)", precision="accumulate", cost_rule=conv_flops),
    _op("Gelu", "Y = X Phi(X)", like(0), 8, elementwise=True, expand=_bias_gelu(False)),
    _op("FastGelu", "Y = gelu(X + bias), tanh form", like(0), 10, elementwise=True, expand=_bias_gelu(True)),
    _op("BiasGelu", "Y = gelu(X + bias)", like(0), 9, elementwise=True, inplace=_FIRST, expand=_bias_gelu(False)),
    _op("QuickGelu", "Y = X sigmoid(alpha X)", like(0), 6, elementwise=True, expand=_quick_gelu),
    _op("SkipLayerNormalization", "Y = LayerNorm(X + skip + bias)", _skip_norm_types, 9, precision="accumulate",
        optional_outputs=(1, 2, 3)),
    _op("SkipSimplifiedLayerNormalization", "Y = RMSNorm(X + skip + bias)", _skip_norm_types, 7, precision="accumulate",
        optional_outputs=(1, 2, 3)),
    _op("SimplifiedLayerNormalization", "Y = Scale X / sqrt(mean(X^2) + epsilon)", _rms_norm_types, 6,
        precision="accumulate", optional_outputs=(1,)),
    _op("SimplifiedLayerNormalization", "Y = Scale X / sqrt(mean(X^2) + epsilon)", _rms_norm_types, 6, domain="",
        precision="accumulate", optional_outputs=(1,)),
    _op("BiasSoftmax", "Y = Softmax(X + bias)", like(0), 10, precision="accumulate"),
    _op("BiasDropout", "Y = Dropout(X + bias) + residual", like(0), deterministic=False, recompute=False,
        optional_outputs=(1,)),
    _op("BitmaskDropout", "Y = Dropout(X), mask in bits", like(0), deterministic=False, recompute=False,
        optional_outputs=(1,)),
    _op("Inverse", "Y = X^-1", like(0)),
    _op("Trilu", "Y = upper or lower triangle of X", like(0), precision="any"),
    # Activation gradients.
    _op("ReluGrad", "dX = dY where Y > 0, else 0", like(0), 2, elementwise=True, inplace=_BOTH, precision="any",
        expand=grad.pair(relu_grad)),
    _op("TanhGrad", "dX = dY (1 - Y^2)", like(0), 3, elementwise=True, inplace=_BOTH, expand=grad.pair(tanh_grad)),
    _op("SigmoidGrad", "dX = dY Y (1 - Y)", like(0), 3, elementwise=True, inplace=_BOTH,
        expand=grad.pair(sigmoid_grad)),
    _op("LeakyReluGrad", "dX = dY where Y > 0, else alpha dY", like(0), 2, elementwise=True, inplace=_BOTH,
        precision="any", expand=grad.leaky_relu_grad),
    _op("GeluGrad", "dX = dY (Phi(X) + X phi(X))", like(0), 12, elementwise=True, inplace=_BOTH,
        expand=grad.gelu_grad(False)),
    _op("FastGeluGrad", "dX = dY gelu'(X), tanh form", like(0), 16, elementwise=True, inplace=_BOTH,
        expand=grad.gelu_grad(True)),
    _op("QuickGeluGrad", "dX = dY s (1 + alpha X (1 - s)), s = sigmoid(alpha X)", like(0), 8, elementwise=True,
        expand=grad.quick_gelu_grad),
    _op("BiasGeluGrad_dX", "dX = dY gelu'(X + bias)", like(0), 13, elementwise=True, inplace=_BOTH,
        expand=grad.gelu_grad(False, bias=True)),
    _op("BiasFastGeluGrad_dX", "dX = dY gelu'(X + bias), tanh form", like(0), 17, elementwise=True,
        expand=grad.gelu_grad(True, bias=True)),
    # Softmax and norm gradients.
    _op("SoftmaxGrad_13", "dX = Y (dY - sum(Y dY, axis))", like(0), 4, inplace=_FIRST,
        expand=grad.over_axis(softmax_grad)),
    _op("LogSoftmaxGrad_13", "dX = dY - exp(Y) sum(dY, axis)", like(0), 4, inplace=_FIRST,
        expand=grad.over_axis(log_softmax_grad)),
    _op("SoftmaxGrad", "dX = Y (dY - sum(Y dY)) over all axes from axis on", like(0), 4,
        expand=grad.over_flat_axes(softmax_grad)),
    _op("LogSoftmaxGrad", "dX = dY - exp(Y) sum(dY) over all axes from axis on", like(0), 4,
        expand=grad.over_flat_axes(log_softmax_grad)),
    _op("LayerNormalizationGrad", "gradients of LayerNormalization", like(1, 2, 2), 14, precision="accumulate",
        expand=grad.layer_norm_grad),
    _op("SimplifiedLayerNormalizationGrad", "gradients of RMS normalization", like(1, 2), 10, precision="accumulate",
        expand=grad.rms_norm_grad),
    _op("InvertibleLayerNormalizationGrad", "gradients of LayerNormalization from its output", like(1, 2, 2), 14,
        precision="accumulate"),
    _op("BatchNormInternal", "training-mode BatchNormalization with saved statistics", _batch_norm_types, 8,
        optional_outputs=(1, 2, 3, 4), expand=grad.batch_norm_internal),
    _op("BatchNormalizationGrad", "gradients of BatchNormInternal", like(1, 2, 2), 12, expand=grad.batch_norm_grad),
    # Losses.
    _op("SoftmaxCrossEntropyLossInternal", "Loss = NLL(LogSoftmax(X)), LogProb", _loss_types,
        expand=grad.cross_entropy),
    _op("SoftmaxCrossEntropyLossInternalGrad", "dX = dLoss w[t] / sum w[t] (exp(LogProb) - onehot(t)) (+ bias)",
        _loss_grad_types, 4, expand=grad.cross_entropy_grad),
    _op("SoftmaxCrossEntropyLossGrad", "dX = dLoss w[t] / sum w[t] (exp(LogProb) - onehot(t))", _loss_grad_types, 4,
        expand=grad.cross_entropy_grad),
    _op("NegativeLogLikelihoodLossInternal", "Loss = -sum w[t] X[t] / sum w[t] (mean)", _loss_types,
        expand=grad.nll_loss),
    _op("NegativeLogLikelihoodLossInternal2", "Loss = -sum w[t] X[t] / sum w[t] (mean)", _loss_types,
        expand=grad.nll_loss),
    # Movement gradients.
    _op("GatherGrad", "dX[Indices[i]] += dY[i]", _shape_input(0, 2), 1, precision="accumulate",
        expand=grad.gather_grad),
    _op("GatherElementsGrad", "dX[Indices[i, j], j] += dY[i, j]", _shape_input(1, 0), 1, precision="accumulate",
        expand=grad.gather_elements_grad),
    _op("GatherNDGrad", "dX[Indices[i]] += dY[i], index tuples", _shape_input(0, 2), 1, precision="accumulate"),
    _op("SliceGrad", "dX = dY at its place in zeros", _shape_input(1, 0), precision="any", expand=grad.slice_grad),
    _op("ConcatTraining", "Y = inputs joined along an axis, and their lengths", _concat_training_types, precision="any",
        optional_outputs=(1,), expand=grad.concat_training),
    _op("SplitTraining", "Y_i = parts of X along an axis", split_types, precision="any", expand=grad.split_training),
    _op("ReduceSumTraining", "Y = sum(X) over axes", _reduce_training_types, precision="accumulate",
        expand=grad.reduce_sum_training),
    _op("BroadcastGradientArgs", "axes over which broadcast gradients are summed", _axes_types, precision="any",
        optional_outputs=(0, 1), expand=grad.broadcast_axes),
    _op("DivGrad", "dA = dY / B; dB = -dY A / B^2, summed to their shapes", like(1, 2), 4, optional_outputs=(0, 1),
        expand=grad.div_grad),
    _op("DropoutGrad", "dX = dY Mask / (1 - ratio)", like(0), 2, elementwise=True, inplace=_FIRST, precision="any",
        expand=grad.dropout_grad),
    _op("Scale", "Y = X scale, or X / scale", like(0), 1, elementwise=True, inplace=_FIRST, precision="any",
        expand=grad.scale),
    # Convolution gradients.
    _op("ConvGrad", "gradients of Conv", conv_grad_types, cost_rule=conv_grad_flops,
        optional_outputs=(0, 1, 2), expand=conv_grad, precision="low", low_inputs=(0, 1, 2), low_outputs=(0,)),
    _op("MaxPoolGrad", "dX[Indices[i]] += dY[i], flat", _unknown_shape, domain="", expand=grad.max_pool_grad),
    _op("AveragePoolGrad", "dX[window i] += dY[i] / elements of window i", _unknown_shape, domain="",
        expand=grad.average_pool_grad),
    # State: they write over an input.
    _op("InPlaceAccumulator", "sum += value", like(0), 1, effects=True, recompute=False, inplace=_FIRST),
    _op("InPlaceAccumulatorV2", "buffer += value, or = value when overwriting", _accumulator_types, 1, effects=True,
        recompute=False, inplace=((0, 1),), optional_outputs=(1,)),
    _op("ZeroGradient", "gradient = 0", like(0), effects=True, recompute=False),
    _op("AdamOptimizer", "one Adam step of one tensor", _adam_types, effects=True, recompute=False,
        inplace=((2, 3), (4, 1), (5, 2)), optional_outputs=(3, 4, 5), cost_rule=_weight_flops),
    _op("SGDOptimizer", "W' = W - lr G", like(1, 2), effects=True, recompute=False, optional_outputs=(0, 1)),
    _op("AdamWOptimizer", "one AdamW step of sequences of tensors", effects=True, recompute=False),
    _op("SGDOptimizerV2", "one SGD step of sequences of tensors", effects=True, recompute=False),
    _op("InplaceClipGradNorm", "gradients scaled to a norm", effects=True, recompute=False),
    _op("Group", "done, once all inputs are", effects=True, recompute=False),
    _op("PassThrough", "Y_i = X_i, ordered", effects=True, recompute=False),
    _op("YieldOp", "hands outputs to the host and takes gradients", deterministic=False, effects=True, recompute=False),
    _op("ReduceAllL2", "Y = sqrt(sum of all squares)", _scalar_float),
    _op("IsAllFinite", "Y = all inputs are finite", _scalar_bool),
)  # fmt: skip
