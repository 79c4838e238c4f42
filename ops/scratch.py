"""Scratch: bytes that a kernel allocates during a run, beside its inputs and outputs, when all of them are bound.

Measured on ONNX Runtime's CPU kernels with every allocation counted (tests/ops/test_scratch.py repeats that for the rules
that matter), 1.19.2 and later; kernels without a rule take less than about a kilobyte. That holds for matrix products
(packing goes through fixed buffers), element-wise operators, Transpose, Slice, Gather, Reduce* and normalizations. Scratch
does not depend on values, and on the number of threads only where a rule says so.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops.kernels.table import KERNELS as TABLE
from ortgraph.ops.kernels.table import base_name
from ortgraph.ops.shapes import attribute, broadcast
from ortgraph.ops.spec import CONTRIB, GENERATED, KERNELS

Rule = Callable[[ir.Node, int], int]  # from a node with static shapes and a number of threads
_TILE = 65536  # bytes that a segmented convolution expands at a time, per thread
_PER_THREAD = 65536  # multiply-adds for which MLAS takes one more thread


def scratch_bytes(node: ir.Node, threads: int = 2) -> int:
    """Bytes that a run of the node allocates for itself; 0 where a shape that counts is not known.

    Args:
        node: A node as the runtime runs it.
        threads: Threads of one operator.
    """
    if any(v is not None and static_shape(v) is None for v in (*node.inputs, *(o for o in node.outputs if o.name))):
        return 0
    if node.domain == GENERATED:
        return importlib.import_module("ortgraph.ops.generated").scratch_bytes(node, threads)
    if node.domain == KERNELS:
        entry = TABLE.get(base_name(node.op_type))
        return entry.scratch(node) + threads * entry.thread_scratch(node) if entry is not None else 0
    rule = _RULES.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
    return rule(node, threads) if rule is not None else 0


def _dims(node: ir.Node, index: int) -> tuple[int, ...]:
    value = node.inputs[index] if index < len(node.inputs) else None
    return (static_shape(value) if value is not None else None) or ()


def _bytes(value: ir.Value | None) -> int:
    shape = static_shape(value) if value is not None else None
    return (
        0 if shape is None or value is None or value.dtype is None else -(-math.prod(shape) * value.dtype.bitwidth // 8)
    )


def _times(factor: int, index: int = 0) -> Rule:
    """So many times the bytes of an input."""
    return lambda node, threads: factor * _bytes(node.inputs[index])


def _last_axis(node: ir.Node) -> bool:
    rank = len(_dims(node, 0))
    return rank == 0 or attribute(node, "axis", -1) % rank == rank - 1


def _softmax(node: ir.Node, threads: int) -> int:
    """Along another axis than the last, the input is transposed into one buffer, the result out of another."""
    return 0 if _last_axis(node) else 2 * _bytes(node.inputs[0])


def _softmax_grad(node: ir.Node, threads: int) -> int:
    shape = _dims(node, 0)
    width = shape[attribute(node, "axis", -1)] if shape else 1
    sums = 4 * (math.prod(shape) // max(width, 1) + width)
    return sums + (0 if _last_axis(node) else 3 * _bytes(node.inputs[0]))


def _flat_softmax_grad(node: ir.Node, threads: int) -> int:
    shape = _dims(node, 0)
    axis = attribute(node, "axis", 1) % max(len(shape), 1)
    return 4 * (math.prod(shape[:axis]) + math.prod(shape[axis:]))


def _log_softmax_grad(node: ir.Node, threads: int) -> int:
    return (1 if _last_axis(node) else 4) * _bytes(node.inputs[0])


def _where(node: ir.Node, threads: int) -> int:
    """Both choices are made whole, each broadcast with the condition, before they are put together."""
    total = 0
    for value in node.inputs[1:3]:
        shape = broadcast(_dims(node, 0), tuple(static_shape(value) or ())) if value is not None else None
        if shape is not None and value is not None and value.dtype is not None:
            total += -(-math.prod(shape) * value.dtype.bitwidth // 8)
    return total


def _layer_norm_grad(node: ir.Node, threads: int) -> int:
    shape = _dims(node, 1)
    axis = attribute(node, "axis", -1) % max(len(shape), 1)
    return 4 * _bytes(node.inputs[1]) + 8 * math.prod(shape[:axis])


def _cross_entropy(node: ir.Node, threads: int) -> int:
    """The log-probabilities twice, one of them in the output where that is asked for; transposed when there is space."""
    wanted = len(node.outputs) > 1 and bool(node.outputs[1].name)
    return (1 + (not wanted) + (len(_dims(node, 0)) > 2)) * _bytes(node.inputs[0])


def _cross_entropy_grad(node: ir.Node, threads: int) -> int:
    return _bytes(node.inputs[1]) if len(_dims(node, 1)) > 2 else 0


def _biased(node: ir.Node, threads: int) -> int:
    """The sum with the bias, when there is one."""
    biased = len(node.inputs) > 1 and node.inputs[-1] is not None
    return _bytes(node.inputs[0]) if biased else 0


def _many_inputs(node: ir.Node, threads: int) -> int:
    return _bytes(node.outputs[0]) * min(max(len(node.inputs) - 2, 0), 2)


def _convolution(node: ir.Node, threads: int) -> int:
    """MLAS expands the whole window matrix of a group when it is small beside the filters, else tiles of 64 KiB."""
    weight, output = _dims(node, 1), tuple(static_shape(node.outputs[0]) or ())
    if not weight or not output:
        return 0
    strides, pads = attribute(node, "strides", []), attribute(node, "pads", [])
    if math.prod(weight[2:]) == 1 and all(s == 1 for s in strides) and not any(pads):
        return 0
    filters, inner, pixels = weight[0] // attribute(node, "group", 1), math.prod(weight[1:]), math.prod(output[2:])
    if filters > pixels:
        return 4 * inner * pixels
    parts = threads if attribute(node, "group", 1) > 1 else filters * inner * pixels // _PER_THREAD + 1
    return _TILE * min(threads, parts)


def _columns(dy: int, weight: int, ones: int) -> Rule:
    """The window matrix of one sample and group, and ``ones`` rows of ones to sum with."""

    def rule(node: ir.Node, threads: int) -> int:
        return 4 * math.prod(_dims(node, dy)[2:]) * (math.prod(_dims(node, weight)[1:]) + ones)

    return rule


def _batched(node: ir.Node, threads: int) -> int:
    """Three offsets and a record of 64 bytes for each product of a batch."""
    a, b = _dims(node, 0), _dims(node, 1)
    if len(b) <= 2 and not attribute(node, "transA", 0):
        return 0
    batch = broadcast(a[:-2], b[:-2])
    return 88 * math.prod(batch) if batch else 0


def _einsum(node: ir.Node, threads: int) -> int:
    """Transposed operands and the product before its own transpose."""
    sizes = [_bytes(v) for v in node.inputs]
    return sum(sizes) + max(sizes, default=0) + _bytes(node.outputs[0])


def _recurrent(node: ir.Node, threads: int) -> int:
    """The inputs' share of all gates, for the whole sequence."""
    x, weight = _dims(node, 0), _dims(node, 1)
    return 4 * math.prod(x[:2]) * math.prod(weight[:2]) if x and weight else 0


def _index_tuples(node: ir.Node, threads: int) -> int:
    return 8 * math.prod(_dims(node, 1)[:-1])


def _table(names: Sequence[str], domain: str, rule: Rule) -> dict[tuple[str, str], Rule]:
    return {(domain, name): rule for name in names}


_RULES: dict[tuple[str, str], Rule] = {
    **_table(("Softmax", "LogSoftmax"), "", _softmax),
    **_table(("SoftmaxGrad_13",), CONTRIB, _softmax_grad),
    **_table(("LogSoftmaxGrad_13",), CONTRIB, _log_softmax_grad),
    **_table(("SoftmaxGrad",), CONTRIB, _flat_softmax_grad),
    **_table(("LogSoftmaxGrad",), CONTRIB, _times(1)),
    **_table(("LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad"), CONTRIB, _layer_norm_grad),
    **_table(("SoftmaxCrossEntropyLoss",), "", _cross_entropy),
    **_table(("SoftmaxCrossEntropyLossInternal",), CONTRIB, _cross_entropy),
    **_table(("SoftmaxCrossEntropyLossGrad", "SoftmaxCrossEntropyLossInternalGrad"), CONTRIB, _cross_entropy_grad),
    **_table(("BiasGelu", "FastGelu"), CONTRIB, _biased),
    **_table(("BiasGeluGrad_dX", "BiasFastGeluGrad_dX"), CONTRIB, _times(1)),
    **_table(("Sum", "Mean", "Max", "Min"), "", _many_inputs),
    **_table(("HardSwish", "Mish"), "", _times(1)),
    **_table(("MatMul",), "", _batched),
    **_table(("FusedMatMul", "TransposeMatMul"), CONTRIB, _batched),
    **_table(("Conv",), "", _convolution),
    **_table(("FusedConv",), CONTRIB, _convolution),
    **_table(("ConvTranspose",), "", _columns(0, 1, 0)),
    **_table(("ConvGrad",), CONTRIB, _columns(0, 2, 1)),
    **_table(("LSTM", "GRU", "RNN"), "", _recurrent),
    ("", "Where"): _where,
    ("", "Einsum"): _einsum,
    ("", "ScatterElements"): _times(1, 1),
    ("", "OneHot"): lambda node, threads: 8 * math.prod(_dims(node, 0)),
    ("", "ScatterND"): _index_tuples,
    ("", "GatherND"): _index_tuples,
    ("", "TopK"): lambda node, threads: 8 * threads * (_dims(node, 0) or (0,))[attribute(node, "axis", -1)],
}
