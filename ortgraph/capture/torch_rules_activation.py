"""Activations and softmax with their backward halves: composites where the graph keeps them whole."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation


def _grad(t: Translation, name: str, grad_output: ir.Value, saved: ir.Value, **attributes: Any) -> ir.Value:
    """Both at the size of the result: derivatives of many functions at once (``vmap``) broadcast them."""
    dims = t.out_dims()
    return t.composite(name, t.expand(grad_output, dims), t.expand(saved, dims), **attributes)


@rule("relu.default")
def _relu(t: Translation, self: ir.Value) -> ir.Value:
    return t.op("Relu", self)


@rule("threshold_backward.default")
def _threshold_backward(t: Translation, grad_output: ir.Value, self: ir.Value, threshold: float) -> ir.Value:
    if threshold == 0:
        return _grad(t, "ReluGrad", grad_output, self)
    dtype = t.out_dtype()
    kept = t.op("Greater", self, t.scalar(threshold, dtype))
    return t.op("Where", kept, grad_output, t.scalar(0, dtype))


@rule("gelu.default")
def _gelu(t: Translation, self: ir.Value, approximate: str) -> ir.Value:
    return t.composite("Gelu", self, approximate=approximate)


@rule("gelu_backward.default")
def _gelu_backward(t: Translation, grad_output: ir.Value, self: ir.Value, approximate: str) -> ir.Value:
    return _grad(t, "GeluGrad", grad_output, self, approximate=approximate)


@rule("silu.default")
def _silu(t: Translation, self: ir.Value) -> ir.Value:
    return t.composite("Silu", self)


@rule("silu_backward.default")
def _silu_backward(t: Translation, grad_output: ir.Value, self: ir.Value) -> ir.Value:
    return _grad(t, "SiluGrad", grad_output, self)


@rule("tanh_backward.default")
def _tanh_backward(t: Translation, grad_output: ir.Value, output: ir.Value) -> ir.Value:
    return _grad(t, "TanhGrad", grad_output, output)


@rule("sigmoid_backward.default")
def _sigmoid_backward(t: Translation, grad_output: ir.Value, output: ir.Value) -> ir.Value:
    return _grad(t, "SigmoidGrad", grad_output, output)


@rule("_softmax.default")
def _softmax(t: Translation, self: ir.Value, dim: int, half_to_float: bool) -> ir.Value:
    return t.op("Softmax", t.cast(self, t.out_dtype()), axis=dim)


@rule("_log_softmax.default")
def _log_softmax(t: Translation, self: ir.Value, dim: int, half_to_float: bool) -> ir.Value:
    return t.op("LogSoftmax", t.cast(self, t.out_dtype()), axis=dim)


@rule("_safe_softmax.default")
def _safe_softmax(t: Translation, self: ir.Value, dim: int, dtype: Any) -> ir.Value:
    """Softmax that gives 0 in rows that are -inf everywhere."""
    out = t.out_dtype()
    x = t.cast(self, out)
    top = t.op("ReduceMax", x, t.build.ints([dim]), keepdims=1)
    masked = t.op("Equal", top, t.scalar(float("-inf"), out))
    return t.op("Where", masked, t.scalar(0, out), t.op("Softmax", x, axis=dim))


@rule("_softmax_backward_data.default")
def _softmax_backward(t: Translation, grad_output: ir.Value, output: ir.Value, dim: int, input_dtype: Any) -> ir.Value:
    return t.cast(t.composite("SoftmaxGrad", grad_output, output, axis=dim), t.out_dtype())


@rule("_log_softmax_backward_data.default")
def _log_softmax_backward(
    t: Translation, grad_output: ir.Value, output: ir.Value, dim: int, input_dtype: Any
) -> ir.Value:
    return t.cast(t.composite("LogSoftmaxGrad", grad_output, output, axis=dim), t.out_dtype())


@rule("elu.default")
def _elu(t: Translation, self: ir.Value, alpha: float, scale: float, input_scale: float) -> ir.Value:
    dtype = t.out_dtype()
    if input_scale == 1:
        made = t.op("Elu", self, alpha=float(alpha))
        return made if scale == 1 else t.op("Mul", made, t.scalar(scale, dtype))
    below = t.op("Mul", t.op("Min", self, t.scalar(0, dtype)), t.scalar(input_scale, dtype))
    negative = t.op("Mul", t.op("Elu", below, alpha=1.0), t.scalar(alpha * scale, dtype))
    positive = self if scale == 1 else t.op("Mul", self, t.scalar(scale, dtype))
    return t.op("Where", t.op("Greater", self, t.scalar(0, dtype)), positive, negative)


@rule("leaky_relu.default")
def _leaky_relu(t: Translation, self: ir.Value, negative_slope: float) -> ir.Value:
    return t.op("LeakyRelu", self, alpha=float(negative_slope))
