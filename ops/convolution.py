"""Operator table: gradients of convolution and pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.errors import UnsupportedError
from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import is_low
from ortgraph.ops.shapes import (
    Types,
    attribute,
    bound_shape,
    element_count,
    elements_flops,
    given,
    like,
    operand,
    operands,
    rank_of,
    shape_of,
    static_dim,
    typed,
    wanted,
    zeros,
)
from ortgraph.ops.spec import COMPOSITE, OpSpec, register

_NARROW = 16  # channels per group below which one wide product beats one product per kernel position


def _spatial(node: ir.Node, value: ir.Value, what: str) -> list[int]:
    return [static_dim(node, value, axis, what) for axis in range(2, rank_of(node, value, what))]


def _options(node: ir.Node, dims: int) -> tuple[list[int], list[int], list[int]]:
    """Strides, pads and dilations with their defaults."""
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET":
        raise UnsupportedError(
            f"{node.op_type} {node.name!r}: auto_pad={attribute(node, 'auto_pad')} is not expanded",
            "write pads instead",
        )
    return (
        list(attribute(node, "strides", [1] * dims)),
        list(attribute(node, "pads", [0] * (2 * dims))),
        list(attribute(node, "dilations", [1] * dims)),
    )


def _transposed(
    b: Builder,
    dy: ir.Value,
    weight: ir.Value,
    sizes: Sequence[int],
    outs: Sequence[int],
    kernel: Sequence[int],
    options: tuple[list[int], list[int], list[int]],
    group: int,
) -> ir.Value:
    """ConvTranspose to exactly ``sizes``: the end pads are computed, what the windows never reached is padded."""
    strides, pads, dilations = options
    dims = len(sizes)
    begin, end, extra = pads[:dims], [], []
    for i in range(dims):
        beyond = strides[i] * (outs[i] - 1) + dilations[i] * (kernel[i] - 1) + 1 - sizes[i] - begin[i]
        end.append(max(beyond, 0))
        extra.append(max(-beyond, 0))
    return b.op(
        "ConvTranspose", dy, weight, strides=strides, pads=begin + end, dilations=dilations, group=group,
        output_padding=extra if any(extra) else None, kernel_shape=list(kernel),
    )  # fmt: skip


def _weight_gradient(b: Builder, node: ir.Node, dy: ir.Value, x: ir.Value, weight: ir.Value) -> ir.Value:
    """dW: for each kernel position the strided window of X times dY, summed over samples.

    Products stay large (channels x positions x filters), unlike a convolution with batch and channel swapped.
    """
    kernel, outs = _spatial(node, weight, "W"), _spatial(node, dy, "dY")
    strides, pads, dilations = _options(node, len(kernel))
    group, filters, channels = attribute(node, "group", 1), *(static_dim(node, weight, a, "W") for a in (0, 1))
    dims, positions = len(kernel), math.prod(outs)
    if any(pads):
        x = b.op("Pad", x, b.ints([0, 0, *pads[:dims], 0, 0, *pads[dims:]]))
    axes, steps = b.ints(range(2, 2 + dims)), b.ints(strides)
    windows = []
    for offset in itertools.product(*(range(k) for k in kernel)):
        start = [o * d for o, d in zip(offset, dilations, strict=True)]
        stop = [s + t * (n - 1) + 1 for s, t, n in zip(start, strides, outs, strict=True)]
        window = b.op("Slice", x, b.ints(start), b.ints(stop), axes, steps)
        windows.append(b.op("Reshape", window, b.ints([0, group, channels, positions])))
    rows = b.op("Reshape", dy, b.ints([0, group, filters // group, positions]))
    rows = b.op("Transpose", rows, perm=[0, 1, 3, 2])
    if channels < _NARROW and len(windows) > 1:
        windows = [b.op("Concat", *windows, axis=2)]
    samples = b.ints([0])
    sums = [b.op("ReduceSum", b.op("MatMul", w, rows), samples, keepdims=0) for w in windows]
    stacked = sums[0] if len(sums) == 1 else b.op("Concat", *sums, axis=1)
    split = b.op("Reshape", stacked, b.ints([group, math.prod(kernel), channels, filters // group]))
    ordered = b.op("Transpose", split, perm=[0, 3, 2, 1])
    return b.op("Reshape", ordered, b.ints([filters, channels, *kernel]))


def conv_grad(b: Builder, node: ir.Node) -> list[ir.Value | None]:
    """Expansion of ConvGrad(dY, X, W): only the outputs that are read are made."""
    dy, x, weight = operands(node, 3)
    results: list[ir.Value | None] = [None, None, None]
    if wanted(node, 0):
        kernel = _spatial(node, weight, "W")
        sizes, outs = _spatial(node, x, "X"), _spatial(node, dy, "dY")
        options = _options(node, len(kernel))
        results[0] = _transposed(b, dy, weight, sizes, outs, kernel, options, attribute(node, "group", 1))
    if wanted(node, 1):
        results[1] = _weight_gradient(b, node, dy, x, weight)
    if wanted(node, 2):
        axes = [a for a in range(rank_of(node, dy, "dY")) if a != 1]
        results[2] = b.op("ReduceSum", dy, b.ints(axes), keepdims=0)
    return results


def max_pool_grad(b: Builder, dy: ir.Value, indices: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Each dY element is added at the flat position of the maximum that it came from."""
    flat = b.ints([-1])
    start = zeros(b, [math.prod(shape)], dy.dtype)
    added = b.op(
        "ScatterElements", start, b.op("Reshape", indices, flat), b.op("Reshape", dy, flat), axis=0, reduction="add"
    )
    return b.op("Reshape", added, b.ints(shape))


def _expand_max_pool_grad(b: Builder, node: ir.Node) -> list[ir.Value]:
    dy, indices = operands(node, 2)
    return [max_pool_grad(b, dy, indices, bound_shape(node, given(node, 2), "X"))]


def _divisors(
    sizes: Sequence[int], outs: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int],
    include_pad: bool,
) -> np.ndarray:  # fmt: skip
    """Elements that each window averages over, as PyTorch counts them. Shape ``outs``."""
    total = np.ones([1] * len(sizes))
    for i in range(len(sizes)):
        start = np.arange(outs[i]) * strides[i] - pads[i]
        stop = np.minimum(start + kernel[i], sizes[i] + pads[len(sizes) + i])
        if not include_pad:
            start, stop = np.maximum(start, 0), np.minimum(stop, sizes[i])
        count = np.maximum(stop - start, 1)
        total = total * count.reshape([-1 if a == i else 1 for a in range(len(sizes))])
    return total


def average_pool_grad(b: Builder, node: ir.Node, dy: ir.Value, shape: Sequence[int]) -> ir.Value:
    """dY / (elements of its window), added back over the window."""
    sizes, outs = list(shape[2:]), _spatial(node, dy, "dY")
    kernel = list(attribute(node, "kernel_shape"))
    dims = len(kernel)
    strides, pads, _ = _options(node, dims)
    divisors = _divisors(sizes, outs, kernel, strides, pads, bool(attribute(node, "count_include_pad", 0)))
    factor = 1.0 / divisors
    if (divisors == divisors.flat[0]).all():
        scaled = b.op("Mul", dy, b.scalar(float(factor.flat[0]), dy))
    else:
        scaled = b.op("Mul", dy, b.const(factor.astype(dy.dtype.numpy()), name="divisor"))  # type: ignore[union-attr]
    planes = b.op("Reshape", scaled, b.ints([shape[0] * shape[1], 1, *outs]))
    ones = b.const(np.ones([1, 1, *kernel]), dy.dtype, name="ones")
    options = (strides, pads, [1] * dims)
    return b.op("Reshape", _transposed(b, planes, ones, sizes, outs, kernel, options, 1), b.ints(shape))


def _expand_average_pool_grad(b: Builder, node: ir.Node) -> list[ir.Value]:
    return [average_pool_grad(b, node, operand(node, 0), bound_shape(node, given(node, 1), "X"))]


def conv_grad_types(node: ir.Node) -> Types:
    """dX like X, dW like W, dBias [filters]; dW and dBias are float32 where W is in low precision."""
    weight = given(node, 2)
    shape, dtype = shape_of(weight), None if weight is None else weight.dtype
    if dtype is None:
        return [typed(given(node, 1)), None, None][: len(node.outputs)]
    dtype = ir.DataType.FLOAT if is_low(weight) else dtype
    bias = None if shape is None else shape[:1]
    return [typed(given(node, 1)), (dtype, shape), (dtype, bias)][: len(node.outputs)]


def conv_grad_flops(node: ir.Node) -> int:
    """Operations of dX and dW, those that are read."""
    weight = shape_of(given(node, 2))
    if weight is None or not all(isinstance(d, int) for d in weight[1:]):
        return 0
    one = 2 * element_count(given(node, 0)) * math.prod(weight[1:])
    return one * sum(wanted(node, i) for i in (0, 1))


register(
    OpSpec(
        COMPOSITE, "ConvGrad", precision="low", low_inputs=(0, 1, 2), low_outputs=(0,), infer=conv_grad_types, expand=conv_grad,
        flops=conv_grad_flops, optional_outputs=(0, 1, 2),
        doc="dX = ConvTranspose(dY, W); dW = sum over samples of X's windows times dY; dBias = sum(dY)",
    ),
    OpSpec(
        COMPOSITE, "MaxPoolGrad", infer=like(2), expand=_expand_max_pool_grad,
        flops=lambda n: element_count(n.inputs[0]), doc="dX[Indices[i]] += dY[i], flat",
    ),
    OpSpec(
        COMPOSITE, "AveragePoolGrad", infer=like(1), expand=_expand_average_pool_grad, flops=elements_flops(2),
        doc="dX[window i] += dY[i] / elements of window i",
    ),
)  # fmt: skip


def conv_flops(node: ir.Node) -> int:
    weight = shape_of(given(node, 1))
    if weight is None or not all(isinstance(d, int) for d in weight[1:]):
        return 0
    return 2 * element_count(node.outputs[0]) * math.prod(weight[1:])


def _conv_transpose_flops(node: ir.Node) -> int:
    weight = shape_of(given(node, 1))
    if weight is None or not all(isinstance(d, int) for d in weight[1:]):
        return 0
    return 2 * element_count(given(node, 0)) * math.prod(weight[1:])


def _pool_flops(node: ir.Node) -> int:
    return element_count(node.outputs[0]) * math.prod(attribute(node, "kernel_shape", [1]))


register(
    OpSpec("", "Conv", precision="low", low_inputs=(0, 1), low_outputs=(0,), flops=conv_flops, doc="Y = X * W + B"),
    OpSpec("", "ConvTranspose", precision="accumulate", flops=_conv_transpose_flops, doc="Y = X *^T W + B"),
    OpSpec("", "MaxPool", precision="any", flops=_pool_flops, doc="Y = max over windows; Indices flat over the tensor"),
    OpSpec("", "AveragePool", precision="accumulate", flops=_pool_flops, doc="Y = mean over windows"),
    OpSpec("", "LpPool", precision="float32", flops=_pool_flops, doc="Y = p-norm over windows"),
    OpSpec("", "MaxUnpool", precision="any", doc="Y = X put at its indices"),
    OpSpec("", "GlobalAveragePool", precision="accumulate", flops=lambda n: element_count(given(n, 0)),
           doc="Y = mean over space"),
    OpSpec("", "GlobalMaxPool", precision="any", flops=lambda n: element_count(given(n, 0)), doc="Y = max over space"),
)  # fmt: skip
