"""Targets: a runtime and one of its execution providers, and which operators they run."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir

from ortgraph.errors import InputError
from ortgraph.ops.precision import LOW
from ortgraph.ops.providers import CPU, PROVIDERS, Provider
from ortgraph.ops.spec import COMPOSITE, CONTRIB, GENERATED, KERNELS

TRAINING = "onnxruntime-training"  # 1.19.2
STOCK = "onnxruntime"  # 1.22 and later
CPU_TARGETS = (TRAINING, STOCK)
DEVICE_TARGETS = (f"{TRAINING}:cuda", f"{STOCK}:cuda", f"{TRAINING}:rocm", f"{STOCK}:migraphx")
TARGETS = (*CPU_TARGETS, *DEVICE_TARGETS)

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
# Standard operators without a CPU kernel for float64, measured on 1.19.2 and 1.32.0.
_NO_DOUBLE = frozenset({
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Erf", "Gelu", "Mean", "Sinh", "Tan",
})  # fmt: skip
_NO_DOUBLE_TRAINING = frozenset({"Cos", "ReduceProd"})
_MAX_OPSET = {TRAINING: 21, STOCK: 23}


@dataclasses.dataclass(frozen=True)
class Target:
    """A runtime and the provider that it computes with.

    Attributes:
        runtime: TRAINING or STOCK.
        provider: See ``ortgraph.ops.providers``.
    """

    runtime: str
    provider: Provider = CPU

    @property
    def text(self) -> str:
        """``onnxruntime``, ``onnxruntime:cuda``: without a provider it is the CPU's."""
        return self.runtime if self.on_cpu else f"{self.runtime}:{self.provider.name}"

    @property
    def on_cpu(self) -> bool:
        """Whether it computes on the processor: compiled kernels exist there only."""
        return self.provider is CPU


@functools.lru_cache(maxsize=64)
def target_of(text: str, option: str = "") -> Target:
    """Read a target's text; ``option`` names where it was given, for the message.

    Raises:
        InputError: There is no such target.
    """
    runtime, colon, provider = text.partition(":")
    found = Target(runtime, PROVIDERS.get(provider, CPU))
    if found.text not in TARGETS or (colon and provider != found.provider.name):
        raise InputError(f"{option}unknown target {text!r}", f"one of {', '.join(TARGETS)}")
    return found


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
        target: One of TARGETS. On a device standard operators without a kernel there run on the CPU provider beside it
            (see ``beside_reason``), so that they count as run.
        opset: Version of the standard domain that the graph imports.
    """
    found = target_of(target)
    if not found.on_cpu:
        return _reason_not_on_device(node, found, opset)
    training = target == TRAINING
    if node.domain in ("", "ai.onnx"):
        lacking = _NO_DOUBLE | _NO_DOUBLE_TRAINING if training else _NO_DOUBLE
        if node.op_type in lacking and any(v is not None and v.dtype == ir.DataType.DOUBLE for v in node.inputs):
            return f"ONNX Runtime has no kernel for {node.op_type} in float64; compute it in float32"
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
        return importlib.import_module("ortgraph.ops.generated").reason(node.op_type) or None
    return f"{target} does not know the domain {node.domain!r}"


def _reason_not_on_device(node: ir.Node, target: Target, opset: int) -> str | None:
    provider = target.provider
    if node.domain in ("", "ai.onnx"):
        known = node.op_type in _STANDARD_COMMON and node.op_type in (provider.standard or ())
        if known or _in_onnx(node.op_type, min(opset, _MAX_OPSET[target.runtime])):
            return None
        return f"{node.op_type} is not an ONNX operator at opset {opset}"
    if node.domain != CONTRIB:
        return f"{target.text} does not know the domain {node.domain!r}"
    if node.op_type == "ConvGrad" and (reason := conv_grad_reason(node)):
        return reason
    training = target.runtime == TRAINING and node.op_type in provider.contrib_training
    if training or node.op_type in provider.contrib:
        return None
    return f"{target.text} has no kernel for {CONTRIB}.{node.op_type}"


def beside_reason(node: ir.Node, target: str) -> str | None:
    """Why a standard operator runs on the CPU provider beside the target's own, between copies; None when it does not,
    or when that is not known."""
    provider = target_of(target).provider
    if node.domain not in ("", "ai.onnx") or provider.standard is None or node.op_type == "Constant":
        return None
    return None if node.op_type in provider.standard else f"{provider.execution} has no kernel for {node.op_type}"


def low_reason(node: ir.Node, target: str = TRAINING) -> str | None:
    """Why a target cannot run a node on the low types that it sees; None when it can, or sees none."""
    low = sorted({v.dtype.name for v in (*node.inputs, *node.outputs) if v is not None and v.dtype in LOW})
    standard = node.domain in ("", "ai.onnx")
    ours = not standard and node.domain not in (CONTRIB, COMPOSITE)  # compiled for the types that they have
    if not low or ours:
        return None
    found = target_of(target)
    if not found.on_cpu:
        return _low_on_device(node, found.provider, low)
    if standard and node.op_type in _LOW_STANDARD:
        return None
    return f"{node.op_type} has no CPU kernel for {' and '.join(low)}"


def _low_on_device(node: ir.Node, provider: Provider, low: list[str]) -> str | None:
    if node.domain == COMPOSITE:
        return f"{node.op_type} is not lowered yet"
    missing = [name for name in low if node.op_type not in provider.low.get(ir.DataType[name], ())]
    if missing:
        return f"{node.op_type} has no kernel for {' and '.join(missing)} in {provider.execution}"
    if node.op_type != "Cast" and (mixed := _mixed(node)):
        return f"{node.op_type} takes {mixed} of one type"
    return None


def _mixed(node: ir.Node) -> str:
    """Names of inputs and outputs that ONNX wants of one type and that have several; empty when there are none."""
    if node.domain == CONTRIB or not _in_onnx(node.op_type, 21):  # those that are used take one type throughout
        formal = [("T", "all") for _ in (*node.inputs, *node.outputs)]
    else:
        schema = onnx.defs.get_schema(node.op_type, 21, "")
        formal = [(f.type_str, f.name) for f in _formals(schema.inputs, len(node.inputs))]
        formal += [(f.type_str, f.name) for f in _formals(schema.outputs, len(node.outputs))]
    types: dict[str, dict[ir.DataType, str]] = {}
    for value, (variable, name) in zip((*node.inputs, *node.outputs), formal, strict=True):
        if value is not None and value.dtype is not None and value.name:
            types.setdefault(variable, {}).setdefault(value.dtype, name)
    return next((" and ".join(dict.fromkeys(t.values())) for t in types.values() if len(t) > 1), "")


def _formals(formals: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> list[Any]:
    """One for each actual: the last one stands for the rest of a variadic operator's."""
    return [formals[min(i, len(formals) - 1)] for i in range(count)]
