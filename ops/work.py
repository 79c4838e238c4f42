"""Work: what a run of a node does, in the terms that a cost model prices. Facts for every operator.

A node has a *class* (how its kernel spends time), floating point operations and bytes moved. The operator's own name comes
first when a price is looked up, the class is the answer for operators that nobody measured.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops.shapes import attribute, ints_of, operator
from ortgraph.ops.spec import KERNELS, spec_of

# How kernels spend their time. ``free`` is an alias bound in place.
CLASSES = (
    "free", "product", "convolution", "elementwise", "transcendental", "reduction", "leading_reduction", "softmax",
    "norm", "copy", "transpose", "gather", "scatter", "pool", "random", "optimizer", "other",
)  # fmt: skip
UNKNOWN_DIMENSION = 64  # a symbolic dimension counts as this many

_PRODUCTS = frozenset(
    {"MatMul", "Gemm", "FusedMatMul", "TransposeMatMul", "FusedGemm", "Einsum", "MatMulInteger", "LSTM", "GRU", "RNN"}
)
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv", "ConvGrad"})
_TRANSCENDENTAL = frozenset({
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Sin", "Sinh", "Tan", "Tanh", "Erf", "Exp", "Log",
    "Gelu", "GeluGrad", "FastGelu", "FastGeluGrad", "BiasGelu", "BiasGeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX",
    "QuickGelu", "QuickGeluGrad", "Silu", "SiluGrad", "Sigmoid", "Softplus", "Softsign", "Mish", "Elu", "Selu", "Celu",
    "Pow", "Mod", "ReduceLogSum", "ReduceLogSumExp",
})  # fmt: skip
_SOFTMAX = frozenset({
    "Softmax", "LogSoftmax", "SoftmaxGrad", "LogSoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad_13", "BiasSoftmax",
    "ScaledMaskedSoftmax", "ScaledSoftmaxGrad", "CrossEntropy", "CrossEntropyGrad", "CrossEntropyStatistics",
    "CrossEntropyStatisticsGrad", "SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossGrad", "NllLoss", "NllLossGrad",
    "SoftmaxCrossEntropyLossInternal", "SoftmaxCrossEntropyLossInternalGrad", "Hardmax", "NegativeLogLikelihoodLoss",
    "NegativeLogLikelihoodLossInternal", "NegativeLogLikelihoodLossInternal2",
})  # fmt: skip
_COPIES = frozenset({
    "Concat", "ConcatTraining", "Split", "SplitTraining", "Slice", "SliceGrad", "Pad", "Expand", "Tile", "ConstantOfShape",
    "Trilu", "Range", "EyeLike", "ZeroGradient", "PassThrough", "Dropout:none",
})  # fmt: skip
_TRANSPOSES = frozenset({"Transpose", "DepthToSpace", "SpaceToDepth", "ReverseSequence"})
_GATHERS = frozenset({"Gather", "GatherElements", "GatherND", "OneHot", "Compress", "Resize"})
_SCATTERS = frozenset({
    "ScatterElements", "ScatterND", "GatherGrad", "GatherElementsGrad", "GatherNDGrad", "MaxPoolGrad", "MaxUnpool",
    "EmbeddingGrad", "CumSum", "TopK", "Unique", "NonZero",
})  # fmt: skip
_POOLS = frozenset({"MaxPool", "AveragePool", "LpPool", "AveragePoolGrad", "GlobalAveragePool", "GlobalMaxPool", "LRN"})
_RANDOM = frozenset({
    "Dropout", "RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike", "Bernoulli", "Multinomial",
    "BitmaskDropout", "BiasDropout",
})  # fmt: skip
_OPTIMIZERS = frozenset({
    "AdamW", "MultiAdamW", "EmbeddingAdamW", "AdamOptimizer", "AdamWOptimizer", "SGDOptimizer", "SGDOptimizerV2",
    "InplaceClipGradNorm",
})  # fmt: skip
_BY_NAME = (
    ("product", _PRODUCTS),
    ("convolution", _CONVOLUTIONS),
    ("transcendental", _TRANSCENDENTAL),
    ("softmax", _SOFTMAX),
    ("copy", _COPIES),
    ("transpose", _TRANSPOSES),
    ("gather", _GATHERS),
    ("scatter", _SCATTERS),
    ("pool", _POOLS),
    ("random", _RANDOM),
    ("optimizer", _OPTIMIZERS),
)
_CLASS = {name: kind for kind, names in _BY_NAME for name in names}
_SHAPE_ONLY = frozenset({"Shape", "Size", "BroadcastGradientArgs", "YieldOp", "Group", "Constant"})


@dataclasses.dataclass(frozen=True)
class Work:
    """What one run does.

    Attributes:
        kind: One of CLASSES.
        names: Table entries to try, the most specific first; the class is the last.
        flops: Floating point operations.
        moved: Bytes read and written.
    """

    kind: str
    names: tuple[str, ...]
    flops: int
    moved: int


def work_of(node: ir.Node) -> Work:
    """The work of a node; dimensions that are not known count as UNKNOWN_DIMENSION."""
    kind = class_of(node)
    if kind == "free":
        return Work(kind, (kind,), 0, 0)
    flops = spec_of(node).flops
    name = operator(node)
    names = (f"{name}:{_form(node, kind)}", name, kind) if _form(node, kind) else (name, kind)
    return Work(kind, names, flops(node) if flops is not None else 0, moved_bytes(node))


def class_of(node: ir.Node) -> str:
    """How the node's kernel spends its time, one of CLASSES."""
    spec = spec_of(node)
    name = node.op_type
    if spec.alias or name in _SHAPE_ONLY:
        return "free"
    if name in _CLASS:
        return _CLASS[name]
    if name.startswith("Reduce") or name in ("BiasGrad", "SquaredNorm", "ArgMax", "ArgMin", "IsAllFinite"):
        return "reduction" if _over_last(node) else "leading_reduction"
    if "Norm" in name:
        return "norm"
    return "elementwise" if spec.elementwise else "other"


def _over_last(node: ir.Node) -> bool:
    """Whether a reduction runs over the last dimension (whose elements lie side by side)."""
    if node.op_type == "BiasGrad":
        return False
    value = node.inputs[0] if node.inputs else None
    rank = len(value.shape) if value is not None and value.shape is not None else 0
    axes = attribute(node, "axes")
    if axes is None:
        axes = ints_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None and "axis" in node.attributes:
        axes = [attribute(node, "axis")]
    return not axes or not rank or rank - 1 in [a % rank for a in axes]


def _form(node: ir.Node, kind: str) -> str:
    """What changes the speed of an operator beside its sizes: ``rows`` when rows stay whole in a transpose."""
    if kind == "transpose":
        perm = attribute(node, "perm")
        return "rows" if perm and perm[-1] == len(perm) - 1 else ""
    if kind == "leading_reduction":
        return "leading"
    form = attribute(node, "approximate", "none")
    return "" if form == "none" else str(form)


def moved_bytes(node: ir.Node) -> int:
    """Bytes read and written. Lookups read as much as they write, not their whole table."""
    inputs = [v for v in node.inputs if v is not None]
    outputs = [v for v in node.outputs if v.name]
    written = sum(map(value_bytes, outputs))
    kind = _CLASS.get(node.op_type)
    if kind == "gather" or node.op_type in ("Slice", "Expand", "Tile"):
        return 2 * written + sum(value_bytes(v) for v in inputs[1:2])
    return written + sum(map(value_bytes, inputs))


def value_bytes(value: ir.Value) -> int:
    """Bytes of a value; dimensions that are not known count as UNKNOWN_DIMENSION, unknown values as nothing."""
    if value.dtype is None or value.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED) or value.shape is None:
        return 0
    shape = static_shape(value) or [d if isinstance(d, int) else UNKNOWN_DIMENSION for d in value.shape]
    return -(-math.prod(shape) * value.dtype.bitwidth // 8)


def is_kernel(node: ir.Node) -> bool:
    """Whether the node is one of our compiled kernels."""
    return node.domain == KERNELS
