"""Layer, batch and group normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_dims import Dim
from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation


@rule("native_layer_norm.default")
def _layer_norm(
    t: Translation, input: ir.Value, normalized_shape: Sequence[Dim], weight: Any, bias: Any, eps: float
) -> Sequence[ir.Value]:
    dtype = t.out_dtype()
    axis = len(t.dims(input)) - len(normalized_shape)
    if dtype != ir.DataType.FLOAT:
        return _layer_norm_apart(t, input, axis, weight, bias, eps)
    scale = weight if weight is not None else t.filled(1, normalized_shape, dtype)
    return t.multi("LayerNormalization", input, scale, bias, outputs=3, axis=axis, epsilon=eps)


def _layer_norm_apart(t: Translation, x: ir.Value, axis: int, weight: Any, bias: Any, eps: float) -> Sequence[ir.Value]:
    """For other types than float32: ONNX's LayerNormalization gives its statistics in float32 only.

    float64 is computed in float64; 16-bit types in float32, as PyTorch does.
    """
    dtype = t.out_dtype()
    wide = dtype if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    axes = t.build.ints(range(axis, len(t.dims(x))))
    x = t.cast(x, wide)
    mean = t.op("ReduceMean", x, axes, keepdims=1)
    error = t.op("Sub", x, mean)
    variance = t.op("ReduceMean", t.op("Mul", error, error), axes, keepdims=1)
    invstd = t.op("Reciprocal", t.op("Sqrt", t.op("Add", variance, t.scalar(eps, wide))))
    y = t.op("Mul", error, invstd)
    if weight is not None:
        y = t.op("Mul", y, t.cast(weight, wide))
    if bias is not None:
        y = t.op("Add", y, t.cast(bias, wide))
    dims = [t.out_dims(i) for i in range(3)]
    made = [t.typed(v, wide, d) for v, d in zip((y, mean, invstd), dims, strict=True)]
    return [t.cast(v, t.out_dtype(i)) for i, v in enumerate(made)]


@rule("native_layer_norm_backward.default")
def _layer_norm_backward(
    t: Translation,
    grad_out: ir.Value,
    input: ir.Value,
    normalized_shape: Sequence[Dim],
    mean: ir.Value,
    rstd: ir.Value,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> Sequence[ir.Value | None]:
    axis = len(t.dims(input)) - len(normalized_shape)
    return t.composites("LayerNormGrad", grad_out, input, mean, rstd, weight, outputs=3, wanted=output_mask, axis=axis)


@rule("_native_batch_norm_legit_functional.default")
def _batch_norm_training(
    t: Translation, input: ir.Value, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
    momentum: float, eps: float,
) -> Sequence[ir.Value | None]:  # fmt: skip
    if not training:
        frozen = _batch_norm_frozen(t, input, weight, bias, running_mean, running_var, eps)
        return frozen, None, None, running_mean, running_var
    if input.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        raise t.unsupported(f"BatchNorm in {input.dtype}", "train in float32: module.float()")
    scale, shift = _affine(t, input, weight, bias)
    y, mean, var, saved_mean, saved_invstd = t.composites(
        "BatchNorm", input, scale, shift, running_mean, running_var, outputs=5, epsilon=eps, momentum=momentum
    )
    return y, saved_mean, saved_invstd, mean, var


@rule("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    t: Translation, input: ir.Value, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Sequence[ir.Value | None]:
    scale, shift = _affine(t, input, weight, bias)
    channels = t.dims(input)[1]
    zero, one = t.filled(0, [channels], t.out_dtype()), t.filled(1, [channels], t.out_dtype())
    made = t.composites(
        "BatchNorm", input, scale, shift, zero, one, outputs=5, wanted=[True, False, False, True, True],
        epsilon=eps, momentum=momentum,
    )  # fmt: skip
    return made[0], made[3], made[4]


@rule("_native_batch_norm_legit_no_training.default")
def _batch_norm_inference(
    t: Translation, input: ir.Value, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float,
    eps: float,
) -> Sequence[ir.Value | None]:  # fmt: skip
    return _batch_norm_frozen(t, input, weight, bias, running_mean, running_var, eps), None, None


def _batch_norm_frozen(
    t: Translation, x: ir.Value, weight: Any, bias: Any, mean: ir.Value, var: ir.Value, eps: float
) -> ir.Value:
    scale, shift = _affine(t, x, weight, bias)
    return t.op("BatchNormalization", x, scale, shift, mean, var, epsilon=eps)


def _affine(t: Translation, x: ir.Value, weight: Any, bias: Any) -> tuple[ir.Value, ir.Value]:
    channels, dtype = t.dims(x)[1], t.out_dtype()
    scale = weight if weight is not None else t.filled(1, [channels], dtype)
    shift = bias if bias is not None else t.filled(0, [channels], dtype)
    return scale, shift


@rule("native_batch_norm_backward.default")
def _batch_norm_backward(
    t: Translation,
    grad_out: ir.Value,
    input: ir.Value,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Sequence[ir.Value | None]:
    dtype, channels = t.out_dtype() if output_mask[0] else grad_out.dtype, t.dims(input)[1]
    assert dtype is not None
    scale = weight if weight is not None else t.filled(1, [channels], dtype)
    if train:
        return t.composites(
            "BatchNormGrad",
            grad_out,
            input,
            scale,
            save_mean,
            save_invstd,
            outputs=3,
            wanted=_at_least_first(output_mask),
        )
    rank = len(t.dims(input))
    wide = [1, channels, *([1] * (rank - 2))]
    axes = t.build.ints([i for i in range(rank) if i != 1])
    invstd = t.op("Reciprocal", t.op("Sqrt", t.op("Add", running_var, t.scalar(eps, dtype))))
    invstd = t.typed(invstd, dtype, (channels,))
    factor = t.typed(t.op("Mul", scale, invstd), dtype, (channels,))
    dx = t.op("Mul", grad_out, t.reshape(factor, wide)) if output_mask[0] else None
    dscale = dbias = None
    if output_mask[1]:
        centred = t.op("Sub", input, t.reshape(running_mean, wide))
        normal = t.op("Mul", centred, t.reshape(invstd, wide))
        dscale = t.op("ReduceSum", t.op("Mul", grad_out, normal), axes, keepdims=0)
    if output_mask[2]:
        dbias = t.op("ReduceSum", grad_out, axes, keepdims=0)
    return dx, dscale, dbias


def _at_least_first(mask: Sequence[bool]) -> list[bool]:
    return [True, *mask[1:]]


@rule("native_group_norm.default")
def _group_norm(
    t: Translation, input: ir.Value, weight: Any, bias: Any, N: Dim, C: Dim, HxW: Dim, group: int, eps: float
) -> Sequence[ir.Value]:
    dtype, dims = t.out_dtype(), t.dims(input)
    rows = t.reshape(input, [N, group, _quotient(C, group) * HxW])
    size = _quotient(C, group) * HxW
    if not isinstance(size, int):
        raise t.unsupported("group normalization over a symbolic size", "keep channels and spatial sizes static")
    y, mean, invstd = t.multi(
        "LayerNormalization", rows, t.filled(1, [size], dtype), None, outputs=3, axis=2, epsilon=eps
    )
    y = t.reshape(t.typed(y, dtype, (N, group, size)), dims)
    wide = [1, C, *([1] * (len(dims) - 2))]
    if weight is not None:
        y = t.op("Mul", y, t.reshape(weight, wide))
    if bias is not None:
        y = t.op("Add", y, t.reshape(bias, wide))
    mean, invstd = (t.reshape(t.typed(v, dtype, (N, group, 1)), [N, group]) for v in (mean, invstd))
    return y, mean, invstd


@rule("native_group_norm_backward.default")
def _group_norm_backward(
    t: Translation, grad_out: ir.Value, input: ir.Value, mean: ir.Value, rstd: ir.Value, weight: Any, N: Dim, C: Dim,
    HxW: Dim, group: int, output_mask: Sequence[bool],
) -> Sequence[ir.Value | None]:  # fmt: skip
    dims = t.dims(input)
    dtype = input.dtype
    assert dtype is not None
    rows, wide = [N, group, _quotient(C, group) * HxW], [1, C, *([1] * (len(dims) - 2))]
    column = [N, group, 1]
    means, invs = t.reshape(mean, column), t.reshape(rstd, column)
    dx = dscale = dbias = None
    if output_mask[0]:
        inner = t.typed(t.op("Mul", grad_out, t.reshape(weight, wide)), dtype, dims) if weight is not None else grad_out
        dx = t.composites(
            "LayerNormGrad", t.reshape(inner, rows), t.reshape(input, rows), means, invs, None, outputs=3,
            wanted=[True, False, False], axis=2,
        )[0]  # fmt: skip
        assert dx is not None
        dx = t.reshape(t.typed(dx, dtype, rows), dims)
    axes = t.build.ints([i for i in range(len(dims)) if i != 1])
    if output_mask[1]:
        normal = t.op("Mul", t.op("Sub", t.reshape(input, rows), means), invs)
        shaped = t.reshape(t.typed(normal, dtype, rows), dims)
        dscale = t.op("ReduceSum", t.op("Mul", grad_out, shaped), axes, keepdims=0)
    if output_mask[2]:
        dbias = t.op("ReduceSum", grad_out, axes, keepdims=0)
    return dx, dscale, dbias


def _quotient(size: Dim, parts: int) -> Dim:
    return size // parts if isinstance(size, int) else size / parts


@rule("_weight_norm_interface_backward.default")
def _weight_norm_backward(
    t: Translation, grad_w: ir.Value, saved_v: ir.Value, saved_g: ir.Value, saved_norms: ir.Value, dim: int
) -> Sequence[ir.Value]:
    """w = g v / |v|: dg = sum(dw v) / |v|, dv = g / |v| (dw - v dg / |v|)."""
    rank = len(t.dims(saved_v))
    axes = t.build.ints([i for i in range(rank) if i != dim % rank])
    dg = t.op("Div", t.op("ReduceSum", t.op("Mul", grad_w, saved_v), axes, keepdims=1), saved_norms)
    along = t.op("Mul", saved_v, t.op("Div", dg, saved_norms))
    return t.op("Mul", t.op("Div", saved_g, saved_norms), t.op("Sub", grad_w, along)), dg
