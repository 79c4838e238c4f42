"""Decompositions that move data: Einsum, DepthToSpace, Resize, ConvTranspose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ortgraph.errors import UnsupportedError
from ortgraph.ops.builder import Builder


def refuse(node: ir.Node, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"node {node.name!r} ({node.op_type}): {reason}", "change it in the model, or freeze the weights before it"
    )


def rank(node: ir.Node, index: int = 0) -> int:
    value = node.inputs[index]
    if value is None or value.shape is None:
        raise refuse(node, f"the rank of input {index} is not known")
    return len(value.shape)


def optional(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _dims(node: ir.Node, index: int = 0) -> list[int | ir.SymbolicDim]:
    value = node.inputs[index]
    if value is None or value.shape is None:
        raise refuse(node, f"the rank of input {index} is not known")
    return list(value.shape)


def _shape_of(b: Builder, parts: Sequence[tuple[ir.Value, Sequence[int]] | int]) -> ir.Value:
    """An int64 shape; each part is a number, or the product of dimensions (value, axes)."""
    numbers: list[int | ir.Value] = []
    for part in parts:
        if isinstance(part, int):
            numbers.append(part)
            continue
        value, axes = part
        assert value.shape is not None
        known, unknown = 1, []
        for axis in axes:
            d = value.shape[axis]
            if isinstance(d, int):
                known *= d
            else:
                unknown.append(b.op("Shape", value, start=axis, end=axis + 1))
        if not unknown:
            numbers.append(known)
            continue
        total = unknown[0]
        for factor in (*unknown[1:], *([b.ints([known])] if known != 1 else [])):
            total = b.op("Mul", total, factor)
        numbers.append(total)
    dynamic = [i for i, n in enumerate(numbers) if isinstance(n, ir.Value)]
    if len(dynamic) <= 1:
        return b.ints([-1 if isinstance(n, ir.Value) else n for n in numbers])
    return b.op("Concat", *(n if isinstance(n, ir.Value) else b.ints([n]) for n in numbers), axis=0)


def _einsum(b: Builder, node: ir.Node) -> list[ir.Value]:
    """Contractions two operands at a time, each a batched MatMul over transposed and merged axes."""
    terms, result = _parse(node)
    operands = list(node.inputs)
    labels = terms[0]
    value = operands[0]
    assert value is not None
    for i in range(1, len(operands)):
        other, later = operands[i], set(result).union(*terms[i + 1 :])
        assert other is not None
        value, labels = _contract(b, value, labels, other, terms[i], later)
    value, labels = _sum_out(b, value, labels, set(result))
    if labels != result:
        value = b.op("Transpose", value, perm=[labels.index(c) for c in result])
    return [b.op("Identity", value) if value is operands[0] else value]


def _parse(node: ir.Node) -> tuple[list[str], str]:
    equation = node.attributes.get_string("equation").replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if "..." in equation:
        spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
        widths = [len(_dims(node, i)) - len(t.replace("...", "")) for i, t in enumerate(terms)]
        widths = [w if "..." in t else 0 for w, t in zip(widths, terms, strict=True)]
        if len({w for w, t in zip(widths, terms, strict=True) if "..." in t}) > 1:
            raise refuse(node, f"equation {equation!r}: its ellipses stand for different ranks")
        fill = "".join(spare[: max(widths)])
        terms = [t.replace("...", fill) for t in terms]
        result = result.replace("...", fill) if arrow else fill + _implicit(terms, fill)
    elif not arrow:
        result = _implicit(terms, "")
    if any(len(set(t)) != len(t) for t in terms):
        raise refuse(node, f"equation {equation!r} takes a diagonal")
    return terms, result


def _implicit(terms: list[str], ellipsis: str) -> str:
    text = "".join(terms)
    return "".join(sorted(c for c in set(text) if text.count(c) == 1 and c not in ellipsis))


def _sum_out(b: Builder, value: ir.Value, labels: str, kept: set[str]) -> tuple[ir.Value, str]:
    axes = [i for i, c in enumerate(labels) if c not in kept]
    if not axes:
        return value, labels
    return b.op("ReduceSum", value, b.ints(axes), keepdims=0), "".join(c for c in labels if c in kept)


def _contract(
    b: Builder, left: ir.Value, l_labels: str, right: ir.Value, r_labels: str, later: set[str]
) -> tuple[ir.Value, str]:
    left, l_labels = _sum_out(b, left, l_labels, later | set(r_labels))
    right, r_labels = _sum_out(b, right, r_labels, later | set(l_labels))
    shared = [c for c in l_labels if c in r_labels]
    batch = [c for c in shared if c in later]
    summed = [c for c in shared if c not in later]
    rows = [c for c in l_labels if c not in r_labels]
    columns = [c for c in r_labels if c not in l_labels]
    if not summed:
        return _outer(b, left, l_labels, right, r_labels)
    a = _merged(b, left, l_labels, batch, rows, summed)
    c = _merged(b, right, r_labels, batch, summed, columns)
    product = b.op("MatMul", a, c)
    parts = [(left, [l_labels.index(x)]) for x in (*batch, *rows)] + [(right, [r_labels.index(x)]) for x in columns]
    return b.op("Reshape", product, _shape_of(b, parts)), "".join((*batch, *rows, *columns))


def _merged(b: Builder, value: ir.Value, labels: str, *groups: list[str]) -> ir.Value:
    """Transpose to the groups' order and merge each group into one axis."""
    order = [labels.index(c) for group in groups for c in group]
    moved = value if order == list(range(len(order))) else b.op("Transpose", value, perm=order)
    parts, at = [], 0
    for group in groups:
        parts.append((moved, list(range(at, at + len(group)))))
        at += len(group)
    return b.op("Reshape", moved, _shape_of(b, parts))


def _outer(b: Builder, left: ir.Value, l_labels: str, right: ir.Value, r_labels: str) -> tuple[ir.Value, str]:
    """No common sum: a broadcast product."""
    labels = l_labels + "".join(c for c in r_labels if c not in l_labels)
    aligned = []
    for value, own in ((left, l_labels), (right, r_labels)):
        order = [own.index(c) for c in labels if c in own]
        moved = value if order == list(range(len(order))) else b.op("Transpose", value, perm=order)
        missing = [i for i, c in enumerate(labels) if c not in own]
        aligned.append(b.op("Unsqueeze", moved, b.ints(missing)) if missing else moved)
    return b.op("Mul", *aligned), labels


def _depth_to_space(b: Builder, node: ir.Node) -> list[ir.Value]:
    x, block = node.inputs[0], node.attributes.get_int("blocksize")
    channels = _dims(node)[1]
    assert x is not None
    if not isinstance(channels, int):
        raise refuse(node, "the number of channels is not known")
    depth = channels // block**2
    column_row = node.attributes.get_string("mode", "DCR") == "CRD"
    inner = [depth, block, block] if column_row else [block, block, depth]
    split = b.op("Reshape", x, _shape_of(b, [(x, [0]), *inner, (x, [2]), (x, [3])]))
    moved = b.op("Transpose", split, perm=[0, 1, 4, 2, 5, 3] if column_row else [0, 3, 4, 1, 5, 2])
    return [b.op("Reshape", moved, _shape_of(b, [(moved, [0]), (moved, [1]), (moved, [2, 3]), (moved, [4, 5])]))]


def _space_to_depth(b: Builder, node: ir.Node) -> list[ir.Value]:
    x, block = node.inputs[0], node.attributes.get_int("blocksize")
    _, channels, height, width = _dims(node)
    assert x is not None
    if not (isinstance(channels, int) and isinstance(height, int) and isinstance(width, int)):
        raise refuse(node, "its channels, height and width must be known")
    split = b.op("Reshape", x, _shape_of(b, [(x, [0]), channels, height // block, block, width // block, block]))
    moved = b.op("Transpose", split, perm=[0, 3, 5, 1, 2, 4])
    return [b.op("Reshape", moved, _shape_of(b, [(x, [0]), channels * block**2, height // block, width // block]))]


def _resize(b: Builder, node: ir.Node) -> list[ir.Value]:
    """Interpolation is linear in X and separable: one product with a constant matrix for each resized axis."""
    x = node.inputs[0]
    sizes, result = _dims(node), node.outputs[0].shape
    assert x is not None and x.dtype is not None
    if (
        result is None
        or node.attributes.get_string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    ):
        raise refuse(node, "its output shape is not known, or it crops")
    value = x
    for axis, (before, after) in enumerate(zip(sizes, result, strict=True)):
        if before == after or (axis == 0 and not (isinstance(before, int) and isinstance(after, int))):
            continue
        if not isinstance(before, int) or not isinstance(after, int):
            raise refuse(node, f"axis {axis} must have a known length before and after")
        matrix = b.const(_interpolation(node, axis, before, after), x.dtype)
        last = len(sizes) - 1
        order = list(range(last + 1))
        order[axis], order[last] = order[last], order[axis]
        moved = value if axis == last else b.op("Transpose", value, perm=order)
        product = b.op("MatMul", moved, matrix)
        value = product if axis == last else b.op("Transpose", product, perm=order)
    return [b.op("Identity", value) if value is x else value]


def _interpolation(node: ir.Node, axis: int, before: int, after: int) -> np.ndarray:
    """The [before, after] matrix of one axis: the reference implementation applied to the identity."""
    scales_value = node.inputs[2] if len(node.inputs) > 2 else None
    scales = None if scales_value is None else ir.convenience.get_const_tensor(scales_value)
    attributes = {
        k: a.value
        for k, a in node.attributes.items()
        if k
        in ("coordinate_transformation_mode", "mode", "nearest_mode", "cubic_coeff_a", "exclude_outside", "antialias")
    }
    inputs = ["x", "", "", "sizes"]
    feeds: dict[str, np.ndarray] = {"x": np.eye(before, dtype=np.float64), "sizes": np.array([before, after])}
    if scales is not None and scales.size:
        given = scales.numpy().reshape(-1)
        axes = node.attributes.get_ints("axes", None)
        scale = given[[a % rank(node) for a in axes].index(axis)] if axes else given[axis]
        inputs, feeds = ["x", "", "scales"], {"x": feeds["x"], "scales": np.array([1.0, scale], np.float32)}
    call = onnx.helper.make_node("Resize", inputs, ["y"], **attributes)
    (matrix,) = ReferenceEvaluator(call, opsets={"": 19}).run(None, feeds)
    return np.asarray(matrix)


def _conv_transpose(b: Builder, node: ir.Node) -> list[ir.Value]:
    """A convolution of X, spread out by the strides, with the mirrored weight."""
    x, weight = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    dims, w_dims = _dims(node), _dims(node, 1)
    assert x is not None and weight is not None
    spatial = len(dims) - 2
    if not all(isinstance(d, int) for d in w_dims) or not all(isinstance(d, int) for d in dims[2:]):
        raise refuse(node, "spatial sizes of input and weight must be known")
    kernel = [int(d) for d in w_dims[2:]]  # type: ignore[arg-type]
    strides = list(node.attributes.get_ints("strides", [1] * spatial))
    dilations = list(node.attributes.get_ints("dilations", [1] * spatial))
    pads = _transposed_pads(node, [int(d) for d in dims[2:]], kernel)  # type: ignore[arg-type]
    extra = list(node.attributes.get_ints("output_padding", [0] * spatial))
    group = node.attributes.get_int("group", 1)
    spread = _spread(b, x, dims, strides)
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    begin = [r - p for r, p in zip(reach, pads[:spatial], strict=True)]
    end = [r - p + e for r, p, e in zip(reach, pads[spatial:], extra, strict=True)]
    if min((*begin, *end)) < 0:
        raise refuse(node, "it crops more than its kernel reaches")
    mirrored = _mirrored(b, weight, [int(d) for d in w_dims], group)  # type: ignore[arg-type]
    inputs = [spread, mirrored] if bias is None else [spread, mirrored, bias]
    return [b.op("Conv", *inputs, pads=[*begin, *end], dilations=dilations, group=group, kernel_shape=kernel)]


def _transposed_pads(node: ir.Node, sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Pads of a ConvTranspose, from its pads, its output_shape or its auto_pad."""
    spatial = len(kernel)
    ones = [1] * spatial
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    wanted = list(node.attributes.get_ints("output_shape", []))[-spatial:]
    if not wanted and mode in ("NOTSET", "VALID"):
        return list(node.attributes.get_ints("pads", [0] * 2 * spatial)) if mode == "NOTSET" else [0] * 2 * spatial
    strides, dilations = node.attributes.get_ints("strides", ones), node.attributes.get_ints("dilations", ones)
    extra = node.attributes.get_ints("output_padding", [0] * spatial)
    begin, end = [], []
    for i, size in enumerate(sizes):
        target = wanted[i] if wanted else size * strides[i]
        total = strides[i] * (size - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1 - target
        if total < 0:
            raise refuse(node, f"axis {2 + i} would be longer ({target}) than its kernel reaches")
        small = total // 2
        begin.append(small if mode == "SAME_UPPER" else total - small)
        end.append(total - begin[-1])
    return [*begin, *end]


def _spread(b: Builder, x: ir.Value, dims: Sequence[int | ir.SymbolicDim], strides: list[int]) -> ir.Value:
    """Put stride - 1 zeros between neighbours along each spatial axis."""
    for i, stride in enumerate(strides):
        if stride == 1:
            continue
        axis = 2 + i
        assert x.shape is not None
        rank, length = len(x.shape), int(dims[axis])  # type: ignore[arg-type]
        opened = b.op("Unsqueeze", x, b.ints([axis + 1]))
        pads = [0] * (rank + 1) * 2
        pads[-(rank + 1) + axis + 1] = stride - 1
        padded = b.op("Pad", opened, b.ints(pads))
        parts = [(x, [j]) if j != axis else length * stride for j in range(rank)]
        merged = b.op("Reshape", padded, _shape_of(b, parts))
        x = b.op("Slice", merged, b.ints([0]), b.ints([(length - 1) * stride + 1]), b.ints([axis]))
    return x


def _mirrored(b: Builder, weight: ir.Value, dims: list[int], group: int) -> ir.Value:
    """[C, M/g, k...] to [M, C/g, k...] with every spatial axis reversed."""
    c, m, *kernel = dims
    spatial = list(range(len(kernel)))
    grouped = b.op("Reshape", weight, b.ints([group, c // group, m, *kernel]))
    swapped = b.op("Transpose", grouped, perm=[0, 2, 1, *(3 + i for i in spatial)])
    flat = b.op("Reshape", swapped, b.ints([group * m * (c // group), -1]))
    count = int(np.prod(kernel))
    assert weight.dtype is not None
    reversal = b.const(np.eye(count)[::-1], weight.dtype)  # all axes at once: row-major order reversed
    return b.op("Reshape", b.op("MatMul", flat, reversal), b.ints([group * m, c // group, *kernel]))


LAYOUT: dict[str, Callable[[Builder, ir.Node], Sequence[ir.Value]]] = {
    "ConvTranspose": _conv_transpose,
    "DepthToSpace": _depth_to_space,
    "Einsum": _einsum,
    "Resize": _resize,
    "SpaceToDepth": _space_to_depth,
}
