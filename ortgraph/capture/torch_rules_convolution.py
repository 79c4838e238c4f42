"""Convolutions and their backward halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation


def _attributes(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> dict[str, Any]:
    return {
        "strides": list(stride), "pads": [*padding, *padding], "dilations": list(dilation), "group": groups,
    }  # fmt: skip


@rule("convolution.default")
def _convolution(
    t: Translation, input: ir.Value, weight: ir.Value, bias: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> ir.Value:  # fmt: skip
    attributes = _attributes(stride, padding, dilation, groups)
    if not transposed:
        return t.op("Conv", input, weight, bias, **attributes)
    return t.op("ConvTranspose", input, weight, bias, output_padding=list(output_padding), **attributes)


@rule("convolution_backward.default")
def _convolution_backward(
    t: Translation, grad_output: ir.Value, input: ir.Value, weight: ir.Value, bias_sizes: Any, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    output_mask: Sequence[bool],
) -> Sequence[ir.Value | None]:  # fmt: skip
    attributes = _attributes(stride, padding, dilation, groups)
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
