"""Random operators as functions of a key, a step and a node number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.capture.torch_dims import Dim
from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation
from ortgraph.ops.spec import COMPOSITE

FLOAT = ir.DataType.FLOAT


@rule("native_dropout.default")
def _dropout(t: Translation, input: ir.Value, p: float, train: bool | None) -> tuple[ir.Value | None, ...]:
    dims, dtype = t.out_dims(), t.out_dtype()
    if train is False or p == 0:
        return input, t.filled(True, dims, ir.DataType.BOOL)
    if p == 1:
        return t.filled(0, dims, dtype), t.filled(False, dims, ir.DataType.BOOL)
    key, step, node = t.draw()
    return t.composites("Dropout", input, key, step, outputs=2, ratio=float(p), node=node)


@rule("native_dropout_backward.default")
def _dropout_backward(t: Translation, grad_output: ir.Value, mask: ir.Value, scale: float) -> ir.Value:
    producer = mask.producer()
    if producer is not None and producer.domain == COMPOSITE and producer.op_type == "Dropout":
        ratio = producer.attributes["ratio"].as_float()
        number = producer.attributes["node"].as_int()
        return t.composite("DropoutGrad", grad_output, mask, ratio=ratio, draw=number)
    dtype = t.out_dtype()
    return t.op("Mul", grad_output, t.op("Mul", t.cast(mask, dtype), t.scalar(scale, dtype)))


def uniform(t: Translation, dims: Sequence[Dim]) -> ir.Value:
    """Numbers in [0, 1), float32. Symbolic dimensions are written when they are bound."""
    key, step, node = t.draw()
    shape = list(dims) if all(isinstance(d, int) for d in dims) else None
    return t.typed(t.composite("RandomUniform", key, step, node=node, shape=shape), FLOAT, dims)


@rule("rand.default", "rand_like.default", "uniform.default")
def _rand(t: Translation, **arguments: Any) -> ir.Value:
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    dtype = t.out_dtype()
    drawn = t.cast(uniform(t, t.out_dims()), dtype)
    if (low, high) == (0.0, 1.0):
        return drawn
    return t.op("Add", t.op("Mul", drawn, t.scalar(high - low, dtype)), t.scalar(low, dtype))


@rule("bernoulli.p", "bernoulli.default", "bernoulli.Tensor")
def _bernoulli(t: Translation, self: ir.Value, p: Any = None, **_: Any) -> ir.Value:
    probability = t.tensor(self if p is None else p, FLOAT)
    return t.cast(t.op("Less", uniform(t, t.out_dims()), probability), t.out_dtype())


@rule("randn.default", "randn_like.default", "normal_functional.default", "normal.float_float",
      "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")  # fmt: skip
def _randn(t: Translation, **arguments: Any) -> ir.Value:
    dtype = t.out_dtype()
    normal = t.cast(standard_normal(t, t.out_dims()), dtype)
    mean, std = arguments.get("mean", 0.0), arguments.get("std", 1.0)
    if not isinstance(std, float) or std != 1.0:
        normal = t.op("Mul", normal, t.tensor(std, dtype))
    return normal if isinstance(mean, float) and mean == 0.0 else t.op("Add", normal, t.tensor(mean, dtype))


def standard_normal(t: Translation, dims: Sequence[Dim]) -> ir.Value:
    """Normal numbers by Box and Muller, sqrt(-2 log(1 - u)) cos(2 pi v), float32."""
    u, v = uniform(t, dims), uniform(t, dims)
    log = t.op("Log", t.op("Sub", t.scalar(1, FLOAT), u))
    radius = t.op("Sqrt", t.op("Mul", t.scalar(-2, FLOAT), log))
    return t.op("Mul", radius, t.op("Cos", t.op("Mul", t.scalar(2 * np.pi, FLOAT), v)))
