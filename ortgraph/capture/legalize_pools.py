"""Pools whose gradient the runtime gets wrong or lacks: sums over windows as convolutions, divided by their counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.capture.legalize_layout import rank, refuse
from ortgraph.ops.builder import Builder


def _windows(node: ir.Node) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, strides, dilations and pads (begins, then ends) of a pool."""
    kernel = list(node.attributes.get_ints("kernel_shape"))
    ones = [1] * len(kernel)
    strides = list(node.attributes.get_ints("strides", ones))
    dilations = list(node.attributes.get_ints("dilations", ones))
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    if mode not in ("NOTSET", "VALID"):
        raise refuse(node, f"auto_pad={mode} with ceil_mode, dilations or a power")
    pads = list(node.attributes.get_ints("pads", [0] * 2 * len(kernel))) if mode == "NOTSET" else [0] * 2 * len(kernel)
    return kernel, strides, dilations, pads


def _sizes(node: ir.Node) -> tuple[list[int], int]:
    """Spatial sizes of the input, and its channels."""
    x = node.inputs[0]
    dims = [] if x is None or x.shape is None else list(x.shape)[1:]
    if not dims or not all(isinstance(d, int) for d in dims):
        raise refuse(node, "its channels and spatial sizes must be known: fix them with shapes={...}")
    return [int(d) for d in dims[1:]], int(dims[0])  # type: ignore[arg-type]


def _trailing(size: int, kernel: int, stride: int, dilation: int, begin: int, end: int, ceil: bool) -> tuple[int, int]:
    """How many windows there are, and the padding after the last element that they reach into."""
    reach = (kernel - 1) * dilation + 1
    free = size + begin + end - reach
    count = (-(-free // stride) if ceil else free // stride) + 1
    if ceil and (count - 1) * stride >= size + begin:
        count -= 1  # a window that starts in the padding after the last element is none
    return count, max((count - 1) * stride + reach - size - begin, 0)


def _window_sums(b: Builder, node: ir.Node, x: ir.Value, *, padded: bool) -> tuple[ir.Value, np.ndarray]:
    """Sums over the windows, [batch, channels, ...], and how many elements each window counts.

    ``padded``: elements of the padding count too, those beyond it do not.
    """
    kernel, strides, dilations, pads = _windows(node)
    sizes, channels = _sizes(node)
    ceil, half = bool(node.attributes.get_int("ceil_mode", 0)), len(kernel)
    counts: np.ndarray = np.ones(())
    ends: list[int] = []
    for i, size in enumerate(sizes):
        begin, end = pads[i], pads[half + i]
        count, trailing = _trailing(size, kernel[i], strides[i], dilations[i], begin, end, ceil)
        places = np.arange(count)[:, None] * strides[i] - begin + np.arange(kernel[i]) * dilations[i]
        inside = (places >= -begin) & (places < size + end) if padded else (places >= 0) & (places < size)
        counts = counts[..., None] * inside.sum(1)
        ends.append(trailing)
    recorded = node.outputs[0].shape
    if recorded is not None and any(
        isinstance(want, int) and want != made for want, made in zip(list(recorded)[2:], counts.shape, strict=True)
    ):
        raise refuse(node, f"its recorded result {list(recorded)} has other sizes than {list(counts.shape)}")
    assert x.dtype is not None
    flat = b.op("Reshape", x, b.ints([-1, 1, *sizes]))
    ones = b.const(np.ones((1, 1, *kernel)), x.dtype)
    summed = b.op(
        "Conv", flat, ones, kernel_shape=kernel, strides=strides, dilations=dilations, pads=[*pads[:half], *ends]
    )
    return b.op("Reshape", summed, b.ints([-1, channels, *counts.shape])), counts


def _average_pool(b: Builder, node: ir.Node) -> list[ir.Value] | None:
    """None for the plain form, which the runtime differentiates."""
    x = node.inputs[0]
    assert x is not None and x.dtype is not None
    dilated = any(d != 1 for d in node.attributes.get_ints("dilations", []))
    if not dilated and not node.attributes.get_int("ceil_mode", 0):
        return None
    summed, counts = _window_sums(b, node, x, padded=bool(node.attributes.get_int("count_include_pad", 0)))
    return [b.op("Div", summed, b.const(counts, x.dtype))]


def _lp_pool(b: Builder, node: ir.Node) -> list[ir.Value]:
    """(sum |X|^p) ^ 1/p over each window, p 1 or 2."""
    x = node.inputs[0]
    assert x is not None
    return [_root(b, node, _window_sums(b, node, _power(b, node, x), padded=True)[0])]


def _global_lp_pool(b: Builder, node: ir.Node) -> list[ir.Value]:
    x = node.inputs[0]
    assert x is not None
    where = b.ints(list(range(2, rank(node))))
    return [_root(b, node, b.op("ReduceSum", _power(b, node, x), where, keepdims=1))]


def _power(b: Builder, node: ir.Node, x: ir.Value) -> ir.Value:
    p = node.attributes.get_int("p", 2)
    if p not in (1, 2):
        raise refuse(node, f"p={p}, where 1 and 2 have a gradient")
    return b.op("Abs", x) if p == 1 else b.op("Mul", x, x)


def _root(b: Builder, node: ir.Node, total: ir.Value) -> ir.Value:
    """The square root for p = 2, with derivative 0, not NaN, where the sum is 0."""
    if node.attributes.get_int("p", 2) == 1:
        return total
    positive = b.op("Greater", total, b.scalar(0.0, total))
    root = b.op("Sqrt", b.op("Where", positive, total, b.scalar(1.0, total)))
    return b.op("Where", positive, root, b.scalar(0.0, total))


def padded_positions(length: int, before: int, after: int, mode: str) -> list[int]:
    """Which element stands at each place of an axis padded in a mode other than ``constant``."""
    places = np.arange(-before, length + after)
    if mode == "edge":
        return [int(p) for p in np.clip(places, 0, length - 1)]
    if mode == "wrap":
        return [int(p) for p in places % length]
    period = max(2 * (length - 1), 1)
    folded = places % period
    return [int(p) for p in np.minimum(folded, period - folded) % length]


POOLS: dict[str, Callable[[Builder, ir.Node], Sequence[ir.Value] | None]] = {
    "AveragePool": _average_pool,
    "GlobalLpPool": _global_lp_pool,
    "LpPool": _lp_pool,
}
