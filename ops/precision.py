"""Low precision: the types, what they hold, and how each operator takes them.

A value of a low type is a plain ONNX value of that type; what computes on it is a kernel, a product, or a float32
operator between casts. ``OpSpec.precision`` says which: ``low`` operators read and write the low type and accumulate in
float32, ``any`` and ``accumulate`` operators compute in float32 on values that may be stored low, ``float32`` operators
want float32 inputs.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx_ir as ir

FP32 = "fp32"
PRECISIONS = {FP32: ir.DataType.FLOAT, "bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16}
LOW = tuple(t for t in PRECISIONS.values() if t != ir.DataType.FLOAT)
NAMES = {dtype: name for name, dtype in PRECISIONS.items()}


@dataclasses.dataclass(frozen=True)
class Range:
    """What a type holds.

    Attributes:
        largest: Greatest finite magnitude; what rounds beyond it becomes infinite.
        smallest: Least magnitude that is not rounded to zero.
        unit: Half the distance from 1 to the next number: the relative error of one rounding.
    """

    largest: float
    smallest: float
    unit: float


def range_of(dtype: ir.DataType) -> Range:
    """The range of a float type."""
    info = ml_dtypes.finfo(dtype.numpy())
    return Range(float(info.max), float(info.smallest_subnormal) / 2, float(info.eps) / 2)


def is_low(value: ir.Value | None) -> bool:
    """Whether the value has a low type."""
    return value is not None and value.dtype in LOW


def sees_low(node: ir.Node) -> bool:
    """Whether an input or output of the node has a low type."""
    return any(is_low(v) for v in (*node.inputs, *node.outputs))


def round_to(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """The array rounded to a low type, as float32: to nearest even, overflow to infinity."""
    with np.errstate(over="ignore"):
        return np.asarray(array, np.float32).astype(dtype.numpy()).astype(np.float32)
