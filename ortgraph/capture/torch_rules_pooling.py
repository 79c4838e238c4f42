"""Pooling. Ceil mode becomes explicit end padding, so that sizes are PyTorch's on every runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.capture.torch_dims import Dim
from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation


def _window(
    t: Translation, x: ir.Value, out: Sequence[Dim], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], ceil_mode: bool,
) -> dict[str, Any]:  # fmt: skip
    """Attributes of a pooling node; the pads at the end are as large as the traced output size needs."""
    n = len(kernel)
    stride = list(stride) or list(kernel)
    kernel, stride, padding, dilation = (_wide(v, n) for v in (kernel, stride, padding, dilation))
    sizes = t.dims(x)[-n:]
    ends = list(padding)
    if ceil_mode:
        for i in range(n):
            if not isinstance(sizes[i], int) or not isinstance(out[-n + i], int):
                raise t.unsupported("pooling in ceil mode over a symbolic size", "use ceil_mode=False")
            reach = (int(out[-n + i]) - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1
            ends[i] = max(padding[i], reach - int(sizes[i]) - padding[i])
    return {"kernel_shape": kernel, "strides": stride, "pads": [*padding, *ends], "dilations": dilation}


def _wide(values: Sequence[int], n: int) -> list[int]:
    return list(values) * n if len(values) == 1 else list(values)


@rule("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def _max_pool(
    t: Translation, self: ir.Value, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil_mode: bool,
) -> Sequence[ir.Value]:  # fmt: skip
    attributes = _window(t, self, t.out_dims(), kernel_size, stride, padding, dilation, ceil_mode)
    return _pooled_with_indices(t, self, attributes)


def _pooled_with_indices(t: Translation, x: ir.Value, attributes: dict[str, Any]) -> Sequence[ir.Value]:
    n = len(attributes["kernel_shape"])
    batched = len(t.dims(x)) == n + 2
    source = x if batched else t.reshape(x, [1, *t.dims(x)])
    y, flat = t.multi("MaxPool", source, outputs=2, **attributes)
    if not batched:
        y = t.reshape(t.typed(y, t.out_dtype(), [1, *t.out_dims()]), t.out_dims())
        flat = t.reshape(t.typed(flat, ir.DataType.INT64, [1, *t.out_dims()]), t.out_dims())
    indices = flat
    if _indices_are_read(t):
        # ONNX counts over the whole tensor, PyTorch within one plane
        plane: Dim = 1
        for d in t.dims(x)[-n:]:
            plane = plane * d
        indices = t.op("Mod", flat, t.tensor(plane, ir.DataType.INT64))
    t.flat_indices[indices] = flat
    return y, indices


def _indices_are_read(t: Translation) -> bool:
    """Whether anything but a pooling backward reads the indices."""
    assert t.fx is not None
    readers = [user for item in t.fx.users if item.args[1] == 1 for user in item.users]
    return any("_backward" not in str(reader.target) for reader in readers)


@rule("max_pool2d_with_indices_backward.default", "max_pool3d_with_indices_backward.default",
      "adaptive_max_pool2d_backward.default", "adaptive_max_pool3d_backward.default")  # fmt: skip
def _max_pool_backward(t: Translation, grad_output: ir.Value, self: ir.Value, indices: ir.Value, **_: Any) -> ir.Value:
    flat = t.flat_indices.get(indices)
    if flat is None:
        raise t.unsupported("a max pooling gradient with computed indices", "use the indices that max pooling gave")
    return t.composite("MaxPoolGrad", grad_output, flat, self)


@rule("adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def _adaptive_max_pool(t: Translation, self: ir.Value, output_size: Sequence[int]) -> Sequence[ir.Value]:
    return _pooled_with_indices(t, self, _even_window(t, self, output_size, "adaptive max pooling"))


def _even_window(t: Translation, x: ir.Value, out: Sequence[int], what: str) -> dict[str, Any]:
    sizes = t.dims(x)[-len(out) :]
    if not all(isinstance(s, int) and s % o == 0 for s, o in zip(sizes, out, strict=True)):
        raise t.unsupported(
            f"{what} of sizes {list(sizes)} to {list(out)}", "choose output sizes that divide the input's"
        )
    kernel = [int(s) // o for s, o in zip(sizes, out, strict=True)]
    return {"kernel_shape": kernel, "strides": kernel, "pads": [0] * (2 * len(out))}


# --- averages ----------------------------------------------------------------------------------------------------


def _average_window(
    t: Translation, x: ir.Value, out: Sequence[Dim], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], ceil_mode: bool, count_include_pad: bool, divisor: Any,
) -> dict[str, Any]:  # fmt: skip
    if divisor is not None:
        raise t.unsupported("average pooling with divisor_override", "scale the result instead")
    window = _window(t, x, out, kernel, stride, padding, [1], ceil_mode)
    window.pop("dilations")
    n = len(window["kernel_shape"])
    grown = window["pads"][n:] != window["pads"][:n]
    padded = any(window["pads"][:n])
    if grown and padded and count_include_pad:
        raise t.unsupported("average pooling in ceil mode that counts its padding", "use count_include_pad=False")
    return {**window, "count_include_pad": int(count_include_pad and padded)}


@rule("avg_pool2d.default", "avg_pool3d.default")
def _average_pool(
    t: Translation, self: ir.Value, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    ceil_mode: bool, count_include_pad: bool, divisor_override: Any,
) -> ir.Value:  # fmt: skip
    attributes = _average_window(
        t, self, t.out_dims(), kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )
    return _on_batches(
        t, self, t.out_dims(), len(attributes["kernel_shape"]), lambda x: t.op("AveragePool", x, **attributes)
    )


def _on_batches(t: Translation, x: ir.Value, out: Sequence[Dim], n: int, pool: Any) -> ir.Value:
    """Pooling without a batch dimension as a batch of one."""
    if len(t.dims(x)) != n + 1:
        return pool(x)
    y = pool(t.reshape(x, [1, *t.dims(x)]))
    return t.reshape(t.typed(y, t.out_dtype(), [1, *out]), out)


@rule("avg_pool2d_backward.default", "avg_pool3d_backward.default")
def _average_pool_backward(
    t: Translation, grad_output: ir.Value, self: ir.Value, kernel_size: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], ceil_mode: bool, count_include_pad: bool, divisor_override: Any,
) -> ir.Value:  # fmt: skip
    attributes = _average_window(
        t, self, t.dims(grad_output), kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )
    return _average_gradient(t, grad_output, self, attributes)


def _average_gradient(t: Translation, dy: ir.Value, x: ir.Value, attributes: dict[str, Any]) -> ir.Value:
    if len(t.dims(x)) != len(attributes["kernel_shape"]) + 1:
        return t.composite("AveragePoolGrad", dy, x, ceil_mode=0, **attributes)
    batch = t.reshape(x, [1, *t.dims(x)])
    dx = t.composite("AveragePoolGrad", t.reshape(dy, [1, *t.dims(dy)]), batch, ceil_mode=0, **attributes)
    return t.reshape(t.typed(dx, t.out_dtype(), t.dims(batch)), t.dims(x))


def _divides(t: Translation, x: ir.Value, out: Sequence[Dim]) -> bool:
    sizes = t.dims(x)[-len(out) :]
    if not all(isinstance(d, int) for d in (*sizes, *out)):
        raise t.unsupported("adaptive pooling over a symbolic size", "keep spatial sizes static")
    return all(int(s) % int(o) == 0 for s, o in zip(sizes, out, strict=True))


@rule("_adaptive_avg_pool2d.default")
def _adaptive_average(t: Translation, self: ir.Value, output_size: Sequence[int]) -> ir.Value:
    if _divides(t, self, output_size):
        window = {**_even_window(t, self, output_size, "adaptive pooling"), "count_include_pad": 0}
        return _on_batches(t, self, t.out_dims(), 2, lambda x: t.op("AveragePool", x, **window))
    rows, columns = _averaging(t, self, output_size)
    return t.op("MatMul", t.op("MatMul", rows, self), t.transpose(columns, (1, 0)))


@rule("_adaptive_avg_pool2d_backward.default")
def _adaptive_average_backward(t: Translation, grad_output: ir.Value, self: ir.Value) -> ir.Value:
    out = t.dims(grad_output)[-2:]
    if _divides(t, self, out):
        window = {**_even_window(t, self, [int(o) for o in out], "adaptive pooling"), "count_include_pad": 0}
        return _average_gradient(t, grad_output, self, window)
    rows, columns = _averaging(t, self, [int(o) for o in out])
    return t.op("MatMul", t.op("MatMul", t.transpose(rows, (1, 0)), grad_output), columns)


def _averaging(t: Translation, x: ir.Value, out: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """Uneven windows as two constant matrices: Y = R X C', each row holding one window's weights."""
    assert x.dtype is not None
    made = []
    for size, count in zip(t.dims(x)[-2:], out, strict=True):
        size = int(size)
        matrix = np.zeros((count, size), np.float64)
        for i in range(count):
            first, last = i * size // count, -(-(i + 1) * size // count)
            matrix[i, first:last] = 1 / (last - first)
        made.append(t.const(matrix, x.dtype))
    return made[0], made[1]
