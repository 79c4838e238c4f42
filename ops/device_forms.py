"""Composites on a device provider: the ``runtime`` alternatives of targets such as ``onnxruntime-training:cuda``.

They are the CPU's forms with the types that the provider takes, and products in the low type itself: operands are
rounded to it, the provider sums (in float32, as its libraries do) and rounds the result once to that type. On a device
without com.microsoft operators products are MatMul behind a Transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import FP32, PRECISIONS
from ortgraph.ops.product import ACTIVATIONS, _activate, _cast
from ortgraph.ops.runtime_forms import RUNTIME_FORMS, RuntimeForm
from ortgraph.ops.shapes import attribute, decimal, given, rank_of
from ortgraph.ops.spec import CONTRIB
from ortgraph.ops.targets import DEVICE_TARGETS, STOCK, TRAINING, low_reason, target_of

_FLOAT = ir.DataType.FLOAT
_CUDA = (f"{TRAINING}:cuda", f"{STOCK}:cuda")
_CUDA_TRAINING = (f"{TRAINING}:cuda",)
# Left to the expansion: BatchNormGrad (what cuDNN makes of a saved inverse deviation is not verified).
_FORMS = {
    "Gelu": _CUDA, "Silu": _CUDA, "GeluGrad": _CUDA_TRAINING, "SiluGrad": _CUDA_TRAINING, "ReluGrad": _CUDA_TRAINING,
    "TanhGrad": _CUDA_TRAINING, "SigmoidGrad": _CUDA_TRAINING, "SoftmaxGrad": _CUDA_TRAINING,
    "LogSoftmaxGrad": _CUDA_TRAINING, "LayerNormGrad": _CUDA_TRAINING, "CrossEntropyGrad": _CUDA_TRAINING,
    "ConvGrad": _CUDA_TRAINING,
}  # fmt: skip


def _product_reason(node: ir.Node) -> str | None:
    if str(attribute(node, "precision", FP32)) not in PRECISIONS:
        return "an unknown precision"
    if str(attribute(node, "activation", "none")) not in ACTIVATIONS:
        return "an unknown activation"
    operands = [given(node, i) for i in (0, 1)]
    if any(v is None or v.dtype not in PRECISIONS.values() for v in operands):
        return "an operand is not float32, bfloat16 or float16"
    transposed = [v for i, v in enumerate(operands) if attribute(node, ("transA", "transB")[i], 0)]
    if any(v is None or v.shape is None or len(v.shape) < 2 for v in transposed):
        return "the rank of a transposed operand is not known"
    return None


def _product(fused: bool) -> Callable[[Builder, ir.Node], Sequence[ir.Value | None]]:
    """Z = alpha A' B' + Bias, Y = activation(Z) + Addend, with the product in the type ``precision``."""

    def build(b: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
        low = PRECISIONS[str(attribute(node, "precision", FP32))]
        to = ir.DataType(attribute(node, "to", _FLOAT))
        activation = str(attribute(node, "activation", "none"))
        sides = [_cast(b, v, low) for v in (given(node, 0), given(node, 1)) if v is not None]
        z = _multiplied(b, node, sides[0], sides[1], fused)
        bias, addend = given(node, 2), given(node, 3)
        after = to if activation == "none" else _FLOAT  # what has no low kernel everywhere is computed in float32
        z = _cast(b, z, after)
        if bias is not None:
            z = b.op("Add", z, _cast(b, bias, after))
        y = _activate(b, z, activation)
        if addend is not None:
            y = b.op("Add", y, _cast(b, addend, after))
        return [_cast(b, y, to), _cast(b, z, to)][: len(node.outputs)]

    return build


def _multiplied(b: Builder, node: ir.Node, left: ir.Value, right: ir.Value, fused: bool) -> ir.Value:
    alpha = decimal(node, "alpha", 1.0)
    trans: dict[str, Any] = {k: int(attribute(node, k, 0)) for k in ("transA", "transB")}
    if fused and (alpha != 1.0 or any(trans.values())):
        return b.op("FusedMatMul", left, right, domain=CONTRIB, alpha=alpha, **trans)
    sides = []
    for value, flag, side in ((left, "transA", "A"), (right, "transB", "B")):
        if trans[flag]:
            rank = rank_of(node, value, side)
            value = b.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])
        sides.append(value)
    z = b.op("MatMul", *sides)
    return z if alpha == 1.0 else b.op("Mul", z, b.scalar(alpha, z))


def _labels_reason(node: ir.Node) -> str | None:
    labels = given(node, 2)
    return None if labels is not None and labels.dtype == ir.DataType.INT64 else "labels must be int64"


def _on_device(form: RuntimeForm, op_type: str, targets: tuple[str, ...]) -> RuntimeForm:
    """A CPU form, where the provider takes the types that the node has: float32, or one low type throughout."""

    def applies(node: ir.Node) -> str | None:
        if op_type == "CrossEntropyGrad" and (reason := _labels_reason(node)):
            return reason
        return form.applies(node)

    return RuntimeForm(targets, applies, form.build)


def _low_form(made: str, op_type: str, approximate: str, targets: tuple[str, ...]) -> RuntimeForm:
    """An element-wise operator in a low type, where CUDA has it in that type."""

    def applies(node: ir.Node) -> str | None:
        if attribute(node, "approximate", "none") != approximate:
            return f"computes approximate={approximate}"
        values = (*node.inputs, *node.outputs)
        types = {v.dtype for v in values if v is not None and v.dtype is not None}
        if len(types) != 1 or _FLOAT in types:
            return "not of one low type"
        alone = ir.Node(CONTRIB, made, [ir.Value(name="x", type=ir.TensorType(t)) for t in types], num_outputs=1)
        return low_reason(alone, targets[0])

    def build(b: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
        attributes: dict[str, Any] = {"alpha": 1.0} if made.startswith("QuickGelu") else {}
        return [b.op(made, *node.inputs, domain=CONTRIB, **attributes)]

    return RuntimeForm(targets, applies, build)


_LOW = (
    ("Gelu", "Gelu", "none", _CUDA), ("FastGelu", "Gelu", "tanh", _CUDA), ("QuickGelu", "Silu", "none", _CUDA),
    ("GeluGrad", "GeluGrad", "none", _CUDA_TRAINING), ("FastGeluGrad", "GeluGrad", "tanh", _CUDA_TRAINING),
    ("QuickGeluGrad", "SiluGrad", "none", _CUDA_TRAINING), ("ReluGrad", "ReluGrad", "none", _CUDA_TRAINING),
    ("TanhGrad", "TanhGrad", "none", _CUDA_TRAINING), ("SigmoidGrad", "SigmoidGrad", "none", _CUDA_TRAINING),
)  # fmt: skip


def _table() -> dict[str, tuple[RuntimeForm, ...]]:
    found = {
        op_type: [_on_device(form, op_type, targets) for form in RUNTIME_FORMS[op_type]]
        for op_type, targets in _FORMS.items()
    }
    for made, op_type, approximate, targets in _LOW:
        found[op_type].append(_low_form(made, op_type, approximate, targets))
    contrib = tuple(t for t in DEVICE_TARGETS if "FusedMatMul" in target_of(t).provider.contrib)
    plain = tuple(t for t in DEVICE_TARGETS if t not in contrib)
    found["Product"] = [
        RuntimeForm(contrib, _product_reason, _product(fused=True)),
        RuntimeForm(plain, _product_reason, _product(fused=False)),
    ]
    return {op_type: tuple(forms) for op_type, forms in found.items()}


DEVICE_FORMS: dict[str, tuple[RuntimeForm, ...]] = _table()
