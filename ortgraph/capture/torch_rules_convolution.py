"""Convolutions and their backward halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation


def _attributes(
    t: Translation,
    weight: ir.Value,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> dict[str, Any]:
    axes = len(t.dims(weight)) - 2
    strides, pads, dilations = (_per_axis(given, axes) for given in (stride, padding, dilation))
    return {"strides": strides, "pads": pads * 2, "dilations": dilations, "group": groups}


def _per_axis(given: Sequence[int], axes: int) -> list[int]:
    """PyTorch takes one number for all axes (``padding="valid"`` is traced as such)."""
    return list(given) * axes if len(given) == 1 else list(given)


@rule("convolution.default")
def _convolution(
    t: Translation, input: ir.Value, weight: ir.Value, bias: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> ir.Value:  # fmt: skip
    attributes = _attributes(t, weight, stride, padding, dilation, groups)
    if not transposed:
        return t.op("Conv", input, weight, bias, **attributes)
    added = _per_axis(output_padding, len(t.dims(weight)) - 2)
    return t.op("ConvTranspose", input, weight, bias, output_padding=added, **attributes)


@rule("convolution_backward.default")
def _convolution_backward(
    t: Translation, grad_output: ir.Value, input: ir.Value, weight: ir.Value, bias_sizes: Any, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    output_mask: Sequence[bool],
) -> Sequence[ir.Value | None]:  # fmt: skip
    attributes = _attributes(t, weight, stride, padding, dilation, groups)
    if not transposed:
        return t.composites("ConvGrad", grad_output, input, weight, outputs=3, wanted=output_mask, **attributes)
    # y = ConvTranspose(x, w) is the input gradient of a convolution: its own gradients are that convolution of dY,
    # and the weight gradient of that convolution with x in the place of dY
    dx = t.op("Conv", grad_output, weight, None, **attributes) if output_mask[0] else None
    dw = None
    if output_mask[1]:
        dw = t.composites("ConvGrad", input, grad_output, weight, outputs=3, wanted=[False, True, False], **attributes)[
            1
        ]
    db = None
    if output_mask[2]:
        axes = [i for i in range(len(t.dims(grad_output))) if i != 1]
        db = t.op("ReduceSum", grad_output, t.build.ints(axes), keepdims=0)
    return dx, dw, db
