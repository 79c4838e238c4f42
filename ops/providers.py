"""Execution providers: what a runtime's device backend has kernels for, by operator and type.

The CUDA columns are read off ONNX Runtime's registration tables of about 1.16; later releases are assumed to add only.
Nothing here was run on a device: docs/gpu.md says what that means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

_BF16, _FP16 = ir.DataType.BFLOAT16, ir.DataType.FLOAT16
_NONE: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Provider:
    """One execution provider.

    Attributes:
        name: As in the text of a target: ``cuda``.
        execution: ONNX Runtime's name: ``CUDAExecutionProvider``.
        device: What ONNX Runtime's Python interface calls its memory.
        standard: Standard operators with a kernel for float32; None: not known, the runtime decides. An operator without
            one runs on the CPU provider beside it, between copies.
        contrib: com.microsoft operators of every build.
        contrib_training: com.microsoft operators of the training build.
        low: Standard and com.microsoft operators with a kernel, by low type.
    """

    name: str
    execution: str
    device: str
    standard: frozenset[str] | None = None
    contrib: frozenset[str] = _NONE
    contrib_training: frozenset[str] = _NONE
    low: Mapping[ir.DataType, frozenset[str]] = dataclasses.field(default_factory=dict)


_MOVES = frozenset({
    "Cast", "Concat", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Reshape", "ScatterElements",
    "ScatterND", "Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
_CUDA_BF16 = _MOVES | {
    "Add", "Compress", "ConstantOfShape", "Div", "Dropout", "GatherND", "Gemm", "LayerNormalization", "MatMul", "Max",
    "Min", "Mul", "ReduceSum", "Relu", "Sigmoid", "Softmax", "Sub", "Sum", "Tanh", "Trilu",
}  # fmt: skip
_CUDA_FP16 = _CUDA_BF16 | {
    "Abs", "AveragePool", "BatchNormalization", "Ceil", "Conv", "ConvTranspose", "Cos", "CumSum", "Einsum", "Elu",
    "Equal", "Erf", "Exp", "Floor", "GlobalAveragePool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "HardSigmoid",
    "InstanceNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "MaxPool", "Mod", "Neg", "OneHot",
    "PRelu", "Pad", "Pow", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSumSquare", "Resize", "Round", "Selu", "Sign", "SimplifiedLayerNormalization",
    "Sin", "Softplus", "Softsign", "Sqrt", "Tile", "TopK", "Where",
}  # fmt: skip
_CUDA_STANDARD = _CUDA_FP16 | {
    "And", "ArgMax", "ArgMin", "DepthToSpace", "EyeLike", "GRU", "If", "LRN", "LSTM", "Loop", "NonZero", "Not", "Or",
    "RNN", "Range", "ReduceLogSum", "ReverseSequence", "RoiAlign", "Scan", "Shrink", "SpaceToDepth", "ThresholdedRelu",
    "Xor",
}  # fmt: skip
_CUDA_CONTRIB = frozenset({"BiasGelu", "FastGelu", "FusedMatMul", "Gelu", "QuickGelu", "Trilu"})
_CUDA_TRAINING = frozenset({
    "BiasFastGeluGrad_dX", "BiasGeluGrad_dX", "ConvGrad", "DropoutGrad", "FastGeluGrad", "GatherElementsGrad",
    "GatherGrad", "GeluGrad", "LayerNormalizationGrad", "LeakyReluGrad", "LogSoftmaxGrad", "LogSoftmaxGrad_13",
    "QuickGeluGrad", "ReluGrad", "SigmoidGrad", "SimplifiedLayerNormalizationGrad", "SliceGrad",
    "SoftmaxCrossEntropyLossGrad", "SoftmaxGrad", "SoftmaxGrad_13", "TanhGrad",
})  # fmt: skip
_CUDA_LOW_CONTRIB = {
    _BF16: {"FastGelu", "FusedMatMul", "QuickGeluGrad"},
    _FP16: {
        "BiasGelu", "ConvGrad", "FastGelu", "FastGeluGrad", "FusedMatMul", "Gelu", "GeluGrad", "LeakyReluGrad",
        "QuickGelu", "QuickGeluGrad", "ReluGrad", "SigmoidGrad", "TanhGrad",
    },
}  # fmt: skip

CPU = Provider("cpu", "CPUExecutionProvider", "cpu")
CUDA = Provider(
    "cuda", "CUDAExecutionProvider", "cuda", _CUDA_STANDARD, _CUDA_CONTRIB, _CUDA_TRAINING,
    {_BF16: _CUDA_BF16 | _CUDA_LOW_CONTRIB[_BF16], _FP16: _CUDA_FP16 | _CUDA_LOW_CONTRIB[_FP16]},
)  # fmt: skip
# Little is known of these two, so that little is asked of them: standard operators, products in float16, moves.
ROCM = Provider("rocm", "ROCMExecutionProvider", "cuda", low={_FP16: _MOVES | {"MatMul", "Gemm"}, _BF16: _MOVES})
MIGRAPHX = Provider(
    "migraphx", "MIGraphXExecutionProvider", "cuda", low={_FP16: _MOVES | {"MatMul", "Gemm"}, _BF16: _MOVES}
)
PROVIDERS = {p.name: p for p in (CPU, CUDA, ROCM, MIGRAPHX)}
