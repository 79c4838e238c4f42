"""Work: what a run of a node does, in the terms that a cost model prices. Facts for every operator.

A node has a *class* (how its kernel spends time), floating point operations and bytes moved. The operator's own name comes
first when a price is looked up, the class is the answer for operators that nobody measured.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping

import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops.kernels.table import base_name
from ortgraph.ops.shapes import attribute, ints_of, operator
from ortgraph.ops.spec import GENERATED, KERNELS, spec_of

# How kernels spend their time. ``free`` is an alias bound in place.
CLASSES = (
    "free", "product", "convolution", "elementwise", "transcendental", "reduction", "leading_reduction", "softmax",
    "norm", "copy", "transpose", "gather", "scatter", "pool", "random", "optimizer", "other",
)  # fmt: skip
UNKNOWN_DIMENSION = 64  # a symbolic dimension counts as this many

_PRODUCTS = frozenset({
    "MatMul", "Gemm", "FusedMatMul", "TransposeMatMul", "FusedGemm", "Einsum", "MatMulInteger", "LSTM", "GRU", "RNN",
    "Product",
})  # fmt: skip
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv", "ConvGrad"})
_TRANSCENDENTAL = frozenset({
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Sin", "Sinh", "Tan", "Tanh", "Erf", "Exp", "Log",
    "Gelu", "GeluGrad", "FastGelu", "FastGeluGrad", "BiasGelu", "BiasGeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX",
    "QuickGelu", "QuickGeluGrad", "Silu", "SiluGrad", "Sigmoid", "Softplus", "Softsign", "Mish", "Elu", "Selu", "Celu",
    "Pow", "Mod", "ReduceLogSum", "ReduceLogSumExp",
})  # fmt: skip
_SOFTMAX = frozenset({
    "Softmax", "LogSoftmax", "SoftmaxGrad", "LogSoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad_13", "BiasSoftmax",
    "ScaledMaskedSoftmax", "ScaledSoftmaxGrad", "CrossEntropy", "CrossEntropyGrad", "CrossEntropyAndGrad",
    "LogSumExp", "CrossEntropyStatisticsGrad", "SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossGrad",
    "NllLoss", "NllLossGrad",
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
    "EmbeddingGrad", "EmbeddingGradAdd", "CumSum", "TopK", "Unique", "NonZero",
})  # fmt: skip
_POOLS = frozenset({"MaxPool", "AveragePool", "LpPool", "AveragePoolGrad", "GlobalAveragePool", "GlobalMaxPool", "LRN"})
_RANDOM = frozenset({
    "Dropout", "RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike", "Bernoulli", "Multinomial",
    "BitmaskDropout", "BiasDropout",
})  # fmt: skip
_OPTIMIZERS = frozenset({
    "AdamW", "LAMB", "SGD", "MultiAdamW", "MultiLAMB", "MultiSGD", "EmbeddingAdamW", "AdamOptimizer",
    "AdamWOptimizer", "SGDOptimizer", "SGDOptimizerV2",
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


# Features whose prices add up, for classes where size alone does not tell the time.
TERMS: dict[str, tuple[str, ...]] = {
    "product": ("nodes", "calls", "flops", "a_bytes", "b_bytes", "c_bytes"),
    "convolution": ("nodes", "calls", "flops", "x_bytes", "y_bytes", "w_bytes", "column_bytes"),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one run does.

    Attributes:
        kind: One of CLASSES.
        names: Names under which a price may stand, the most specific first; the class is the last.
        flops: Floating point operations.
        moved: Bytes read and written.
        features: Amounts by name, for a class in TERMS.
    """

    kind: str
    names: tuple[str, ...]
    flops: int
    moved: int
    features: Mapping[str, float] = dataclasses.field(default_factory=dict)


def work_of(node: ir.Node) -> Work:
    """The work of a node; dimensions that are not known count as UNKNOWN_DIMENSION."""
    kind = class_of(node)
    if kind == "free":
        return Work(kind, (kind,), 0, 0)
    rule = spec_of(node).flops
    flops, moved = rule(node) if rule is not None else 0, moved_bytes(node)
    if kind == "product":
        precision = attribute(node, "precision", "fp32")
        own = (f"product:{precision}:{_orientation(node)}", f"product:{precision}") if precision != "fp32" else ()
        return Work(kind, (*own, f"product:{_orientation(node)}", kind), flops, moved, _product_features(node, flops))
    name, form = operator(node), _form(node, kind)
    names = (f"{name}:{form}", f"{kind}:{form}", name, kind) if form else (name, kind)
    features = _convolution_features(node, flops) if kind == "convolution" else {}
    return Work(kind, names, flops, moved, features)


def _orientation(node: ir.Node) -> str:
    """``NN``, ``NT``, ``TN`` or ``TT``: which operand of a product is transposed."""
    return "".join("T" if attribute(node, f"trans{side}", 0) else "N" for side in "AB")


def _dims(node: ir.Node, index: int) -> tuple[int, ...]:
    value = node.inputs[index] if index < len(node.inputs) else None
    return () if value is None or value.shape is None else tuple(_number(d) for d in value.shape)


def _number(dim: int | ir.SymbolicDim) -> int:
    return dim if isinstance(dim, int) else UNKNOWN_DIMENSION


def _product_features(node: ir.Node, flops: int) -> Mapping[str, float]:
    a, b = _dims(node, 0), _dims(node, 1)
    folded = len(b) <= 2 and not attribute(node, "transA", 0)  # the runtime multiplies one tall matrix then
    calls = 1 if folded else math.prod(a[:-2])
    c_bytes = sum(value_bytes(o) for o in node.outputs)
    # each product of a batch packs its own second operand; a broadcast one counts as often as it is read
    b_bytes = 4 * math.prod(b[-2:]) * max(calls, math.prod(b[:-2]))
    a_bytes = value_bytes(node.inputs[0]) if node.inputs and node.inputs[0] is not None else 0
    return {"nodes": 1, "calls": calls, "flops": flops, "a_bytes": a_bytes, "b_bytes": b_bytes, "c_bytes": c_bytes}


def _convolution_features(node: ir.Node, flops: int) -> Mapping[str, float]:
    gradient = node.op_type == "ConvGrad"
    x, w = (_dims(node, i + gradient) for i in (0, 1))
    y = _dims(node, 0) if gradient else tuple(_number(d) for d in node.outputs[0].shape or ())
    group, window = attribute(node, "group", 1), math.prod(w[2:])
    columns = 4 * math.prod(y[2:]) * window * math.prod(x[:2]) if window > 1 else 0
    return {
        "nodes": 1, "calls": math.prod(x[:1]) * group, "flops": flops, "x_bytes": 4 * math.prod(x),
        "y_bytes": 4 * math.prod(y), "w_bytes": 4 * math.prod(w), "column_bytes": columns,
    }  # fmt: skip


def class_of(node: ir.Node) -> str:
    """How the node's kernel spends its time, one of CLASSES."""
    spec = spec_of(node)
    if node.domain == GENERATED:
        return importlib.import_module("ortgraph.ops.generated").class_of(node)
    name = base_name(node.op_type) if node.domain == KERNELS else node.op_type
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
    if node.op_type in ("Concat", "Split"):  # whole blocks, or pieces of every row
        return "last" if attribute(node, "axis", 0) in (-1, len(_dims(node, 0)) - 1) else ""
    if node.op_type == "Cast":
        return "from_bool" if node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.BOOL else ""
    if kind == "elementwise":
        return _broadcast_form(node)
    if kind == "convolution":
        return "grouped" if attribute(node, "group", 1) > 1 else ""
    form = attribute(node, "approximate", "none")
    return "" if form == "none" else str(form)


def _broadcast_form(node: ir.Node) -> str:
    """``column`` when an operand has one element per row of the result, ``row`` when one repeats in another way."""
    shape = tuple(node.outputs[0].shape or ())
    form = ""
    for value in node.inputs:
        if value is None or value.shape is None or tuple(value.shape) == shape or all(d == 1 for d in value.shape):
            continue
        if value.shape[-1] == 1:
            return "column"
        form = "row"
    return form


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
    shape = static_shape(value) or [_number(d) for d in value.shape]
    return -(-math.prod(shape) * value.dtype.bitwidth // 8)


def is_kernel(node: ir.Node) -> bool:
    """Whether the node is one of our compiled kernels."""
    return node.domain == KERNELS
