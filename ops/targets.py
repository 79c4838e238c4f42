"""Which operators a target runs on its CPU provider."""

from __future__ import annotations

import functools
import importlib

import onnx
import onnx_ir as ir

from ortgraph.ops.precision import LOW
from ortgraph.ops.spec import COMPOSITE, CONTRIB, GENERATED, KERNELS

TRAINING = "onnxruntime-training"  # 1.19.2
STOCK = "onnxruntime"  # 1.22 and later
TARGETS = (TRAINING, STOCK)

# com.microsoft operators with a CPU kernel in every release since 1.19, by what a training graph may hold.
_CONTRIB_COMMON = frozenset({
    "Attention", "BiasGelu", "CDist", "EmbedLayerNormalization", "ExpandDims", "FastGelu", "FusedConv", "FusedGemm",
    "FusedMatMul", "GatherND", "Gelu", "GroupQueryAttention", "Inverse", "MultiHeadAttention", "MurmurHash3", "Pad",
    "QuickGelu", "Range", "RotaryEmbedding", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Trilu",
    "Unique",
})  # fmt: skip
# Only in the training build (facts of its CPU kernel registry). DivGrad is left out: it has a function body, no kernel.
_CONTRIB_TRAINING = frozenset({
    "AdamOptimizer", "AdamWOptimizer", "BatchNormInternal", "BatchNormalizationGrad", "BiasFastGeluGrad_dX",
    "BiasGeluGrad_dX", "BroadcastGradientArgs", "ConcatTraining", "ConvGrad", "DropoutGrad", "FakeQuant",
    "FakeQuantGrad", "FastGeluGrad", "GRUGrad", "GRUTraining", "GatherElementsGrad", "GatherGrad", "GatherNDGrad",
    "GeluGrad", "Group", "InPlaceAccumulator", "InPlaceAccumulatorV2", "InplaceClipGradNorm", "LSTMGrad",
    "LSTMTraining", "LayerNormalizationGrad", "LeakyReluGrad", "LogSoftmaxGrad", "LogSoftmaxGrad_13", "PassThrough",
    "QuickGeluGrad", "ReduceAllL2", "ReduceSumTraining", "ReluGrad", "SGDOptimizer", "SGDOptimizerV2", "Scale",
    "SigmoidGrad", "SimplifiedLayerNormalizationGrad", "SliceGrad", "SoftmaxCrossEntropy", "SoftmaxCrossEntropyGrad",
    "SoftmaxCrossEntropyLossGrad", "SoftmaxCrossEntropyLossInternal", "SoftmaxCrossEntropyLossInternalGrad",
    "SoftmaxGrad", "SoftmaxGrad_13", "SparseSoftmaxCrossEntropy", "SparseSoftmaxCrossEntropyGrad", "SplitTraining",
    "TanhGrad", "YieldOp", "ZeroGradient",
})  # fmt: skip
# Unversioned operators that ONNX Runtime keeps in the standard domain.
_STANDARD_COMMON = frozenset({"SimplifiedLayerNormalization"})
_STANDARD_TRAINING = frozenset({"AveragePoolGrad", "MaxPoolGrad"})
# Standard operators with a CPU kernel for bfloat16 and float16 values, measured on 1.19.2 and 1.32.0: data movement and
# Cast. Both releases refuse a session with any other operator on bfloat16. On float16 they also move by Expand and
# Compress; for everything else they put casts of their own around it, whose memory no plan knows.
MOVES_LOW = frozenset({
    "Concat", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Slice", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
})  # fmt: skip
_LOW_STANDARD = MOVES_LOW | {"Cast", "ScatterElements", "ScatterND", "Shape", "Size"}
_MAX_OPSET = {TRAINING: 21, STOCK: 23}


@functools.lru_cache(maxsize=4096)
def _in_onnx(op_type: str, opset: int) -> bool:
    try:
        onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    return True


def conv_grad_reason(node: ir.Node) -> str | None:
    """Why ONNX Runtime's ConvGrad is not used for a node (inputs dY, X, W); None for two spatial dimensions.

    In 1.19.2 it writes beyond its buffer for one-dimensional grouped convolutions with padding: gradients came out
    zero, or the heap broke. Only the two-dimensional path is trusted.
    """
    weight = node.inputs[2] if len(node.inputs) > 2 else None
    if weight is not None and weight.shape is not None and len(weight.shape) == 4:
        return None
    return "ONNX Runtime's ConvGrad is trusted for two spatial dimensions only"


def average_pool_grad_reason(node: ir.Node) -> str | None:
    """Why ONNX Runtime's AveragePoolGrad is not used for a node (input dY); None for one and two spatial dimensions.

    In 1.19.2 its three-dimensional form gives wrong gradients.
    """
    dy = node.inputs[0]
    if dy is not None and dy.shape is not None and len(dy.shape) <= 4:
        return None
    return "ONNX Runtime's AveragePoolGrad is trusted for one and two spatial dimensions only"


def reason_not_run(node: ir.Node, target: str, opset: int) -> str | None:
    """Why ``target`` cannot run the node's operator; None when it can.

    Args:
        node: Any node; its domain and operator name count, and the rank of gradients of convolutions and pools.
        target: One of TARGETS.
        opset: Version of the standard domain that the graph imports.
    """
    training = target == TRAINING
    if node.domain in ("", "ai.onnx"):
        if node.op_type == "AveragePoolGrad" and (reason := average_pool_grad_reason(node)):
            return reason
        known = node.op_type in _STANDARD_COMMON or (training and node.op_type in _STANDARD_TRAINING)
        if known or _in_onnx(node.op_type, min(opset, _MAX_OPSET[target])):
            return None
        return f"{node.op_type} is not an ONNX operator at opset {opset}"
    if node.domain == CONTRIB:
        if node.op_type == "ConvGrad" and (reason := conv_grad_reason(node)):
            return reason
        if node.op_type in _CONTRIB_COMMON or (training and node.op_type in _CONTRIB_TRAINING):
            return None
        return f"{target} has no CPU kernel for {CONTRIB}.{node.op_type}"
    if node.domain == KERNELS:
        return None
    if node.domain == GENERATED:
        return importlib.import_module("ortgraph.ops.generated").reason() or None
    return f"{target} does not know the domain {node.domain!r}"


def low_reason(node: ir.Node) -> str | None:
    """Why the CPU provider cannot run a node on the low types that it sees; None when it can, or sees none."""
    low = sorted({v.dtype.name for v in (*node.inputs, *node.outputs) if v is not None and v.dtype in LOW})
    standard = node.domain in ("", "ai.onnx")
    ours = not standard and node.domain not in (CONTRIB, COMPOSITE)  # compiled for the types that they have
    if not low or ours or (standard and node.op_type in _LOW_STANDARD):
        return None
    return f"{node.op_type} has no CPU kernel for {' and '.join(low)}"
