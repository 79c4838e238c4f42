"""Composites that a target's own operators compute: the ``runtime`` alternatives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.graph import static_shape
from ortgraph.ops.builder import Builder
from ortgraph.ops.shapes import attribute, given, ints_of
from ortgraph.ops.spec import CONTRIB
from ortgraph.ops.targets import STOCK, TRAINING, conv_grad_reason

_BOTH = (TRAINING, STOCK)
_TRAINING = (TRAINING,)
_LABELS = (ir.DataType.INT32, ir.DataType.INT64)


@dataclasses.dataclass(frozen=True)
class RuntimeForm:
    """How one target operator stands for a composite.

    Attributes:
        targets: Targets with a CPU kernel for it.
        applies: Why not for this node, or None.
        build: Makes the outputs.
    """

    targets: tuple[str, ...]
    applies: Callable[[ir.Node], str | None]
    build: Callable[[Builder, ir.Node], Sequence[ir.Value | None]]


def _float32(node: ir.Node) -> str | None:
    """The com.microsoft CPU kernels used here are registered for float32 only."""
    value = node.inputs[0]
    if value is None or value.dtype != ir.DataType.FLOAT:
        return f"the kernel is float32 only, not {value.dtype if value is not None else 'unknown'}"
    return None


def _same(op_type: str, approximate: str | None = None, **fixed: Any) -> tuple[Callable, Callable]:
    """A contrib operator with the composite's own inputs; ``approximate`` restricts the form."""

    def applies(node: ir.Node) -> str | None:
        form = attribute(node, "approximate", "none")
        if approximate is not None and form != approximate:
            return f"computes approximate={approximate}, not {form}"
        return _float32(node)

    def build(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
        return builder.multi(op_type, *node.inputs, outputs=len(node.outputs), domain=CONTRIB, **fixed)

    return applies, build


def _with_axis(op_type: str) -> Callable[[Builder, ir.Node], Sequence[ir.Value | None]]:
    def build(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
        return [builder.op(op_type, *node.inputs, domain=CONTRIB, axis=attribute(node, "axis", -1))]

    return build


def _layer_norm_applies(node: ir.Node) -> str | None:
    if given(node, 4) is None:
        return "LayerNormalizationGrad needs a scale"
    if static_shape(given(node, 4)) == (1,):  # type: ignore[arg-type]
        return "LayerNormalizationGrad stops at a scale of one number"
    return _float32(node)


def _layer_norm_grad(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    dy, x, mean, inv_std, scale = node.inputs
    axis = attribute(node, "axis", -1)
    return builder.multi(
        "LayerNormalizationGrad", dy, x, scale, mean, inv_std, outputs=3, domain=CONTRIB, axis=axis
    )[: len(node.outputs)]  # fmt: skip


def _batch_norm_grad(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    # The kernel takes the inverse deviation and does not use its epsilon.
    made = builder.multi("BatchNormalizationGrad", *node.inputs, outputs=3, domain=CONTRIB, epsilon=1e-5)
    return made[: len(node.outputs)]


def _cross_entropy_applies(node: ir.Node) -> str | None:
    labels = node.inputs[2]
    if labels is None or labels.dtype not in _LABELS:
        return "labels must be int32 or int64"
    if node.inputs[1] is None or node.inputs[1].shape is None or len(node.inputs[1].shape) != 2:
        return "only for log-probabilities [N, C]: the kernel transposes further dimensions"
    return _float32(node)


def _cross_entropy_grad(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    d_loss, log_prob, target, weight = (*node.inputs, None)[:4]
    return [
        builder.op(
            "SoftmaxCrossEntropyLossGrad", d_loss, log_prob, target, weight, domain=CONTRIB,
            reduction=attribute(node, "reduction", "mean"), ignore_index=attribute(node, "ignore_index", -100),
        )
    ]  # fmt: skip


def _conv_applies(node: ir.Node) -> str | None:
    if reason := conv_grad_reason(node):
        return reason
    wants_input = any(o.uses() or o.is_graph_output() for o in node.outputs[:1])
    if wants_input and any(d != 1 for d in attribute(node, "dilations", ())):
        return "dilated"
    return _float32(node)


def _conv_grad(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    attributes: dict[str, Any] = {
        k: list(a.as_ints()) for k, a in node.attributes.items() if k in ("strides", "pads", "dilations")
    }
    weight = static_shape(node.inputs[2])  # type: ignore[arg-type]
    kernel = list(weight[2:]) if weight is not None else None
    wanted = len(node.outputs)
    return builder.multi(
        "ConvGrad", *node.inputs[:3], outputs=wanted, domain=CONTRIB, kernel_shape=kernel,
        group=attribute(node, "group", 1), **attributes,
    )  # fmt: skip


def _rows_summed(node: ir.Node) -> str | None:
    """Why a ReduceSum is not the sum over all dimensions but the last of a float value with a known shape."""
    value = node.inputs[0]
    axes = ints_of(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if value is None or value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return "not float32 or float64"
    shape = static_shape(value)
    if shape is None or axes is None:
        return "its shape or axes are not known"
    n = len(shape)
    if n < 2 or sorted(a % n for a in axes) != list(range(n - 1)):
        return "does not sum over all dimensions but the last"
    return None


def _rows_product(builder: Builder, node: ir.Node) -> Sequence[ir.Value | None]:
    """A product with a row of ones: twice as fast as ONNX Runtime's sum over the first dimension."""
    value = node.inputs[0]
    assert value is not None and value.dtype is not None
    shape = static_shape(value)
    assert shape is not None
    rows, width = math.prod(shape[:-1]), shape[-1]
    flat = value if len(shape) == 2 else builder.op("Reshape", value, builder.ints([rows, width]))
    made = builder.op("MatMul", builder.const(np.ones(rows), value.dtype, name="row_of_ones"), flat)
    if not attribute(node, "keepdims", 1):
        return [made]
    return [builder.op("Reshape", made, builder.ints([*[1] * (len(shape) - 1), width]))]


# Standard operators that another standard form may beat. Lowering compares it with the operator as it is.
STANDARD_FORMS: dict[str, RuntimeForm] = {"ReduceSum": RuntimeForm(_BOTH, _rows_summed, _rows_product)}

RUNTIME_FORMS: dict[str, tuple[RuntimeForm, ...]] = {
    "Gelu": (RuntimeForm(_BOTH, *_same("Gelu", "none")), RuntimeForm(_BOTH, *_same("FastGelu", "tanh"))),
    "GeluGrad": (
        RuntimeForm(_TRAINING, *_same("GeluGrad", "none")),
        RuntimeForm(_TRAINING, *_same("FastGeluGrad", "tanh")),
    ),
    # Not on a processor (exact_forms.py): for devices.
    "Silu": (RuntimeForm((), *_same("QuickGelu", alpha=1.0)),),
    "SiluGrad": (RuntimeForm((), *_same("QuickGeluGrad", alpha=1.0)),),
    "ReluGrad": (RuntimeForm(_TRAINING, *_same("ReluGrad")),),
    "TanhGrad": (RuntimeForm(_TRAINING, *_same("TanhGrad")),),
    "SigmoidGrad": (RuntimeForm(_TRAINING, *_same("SigmoidGrad")),),
    "SoftmaxGrad": (RuntimeForm(_TRAINING, _float32, _with_axis("SoftmaxGrad_13")),),
    "LogSoftmaxGrad": (RuntimeForm(_TRAINING, _float32, _with_axis("LogSoftmaxGrad_13")),),
    "LayerNormGrad": (RuntimeForm(_TRAINING, _layer_norm_applies, _layer_norm_grad),),
    "BatchNormGrad": (RuntimeForm(_TRAINING, _float32, _batch_norm_grad),),
    "CrossEntropyGrad": (RuntimeForm(_TRAINING, _cross_entropy_applies, _cross_entropy_grad),),
    "ConvGrad": (RuntimeForm(_TRAINING, _conv_applies, _conv_grad),),
}
