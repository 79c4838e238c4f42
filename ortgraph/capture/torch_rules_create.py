"""Tensors made from nothing: filled, ranges, identities."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_translate import Translation


@rule("zeros.default", "zeros_like.default", "new_zeros.default", "new_empty.default", "empty.memory_format",
      "empty_like.default", "new_empty_strided.default", "empty_strided.default", "empty_permuted.default")  # fmt: skip
def _zeros(t: Translation, **_: Any) -> ir.Value:
    return t.filled(0, t.out_dims(), t.out_dtype())


@rule("ones.default", "ones_like.default", "new_ones.default")
def _ones(t: Translation, **_: Any) -> ir.Value:
    return t.filled(1, t.out_dims(), t.out_dtype())


@rule("full.default", "full_like.default", "new_full.default")
def _full(t: Translation, fill_value: Any, **_: Any) -> ir.Value:
    return t.filled(fill_value, t.out_dims(), t.out_dtype())


@rule("fill.Scalar", "fill.Tensor")
def _fill(t: Translation, self: ir.Value, value: Any) -> ir.Value:
    return t.filled(value, t.out_dims(), t.out_dtype())


@rule("scalar_tensor.default")
def _scalar_tensor(t: Translation, s: Any, **_: Any) -> ir.Value:
    return t.tensor(s, t.out_dtype())


@rule("arange.default", "arange.start", "arange.start_step")
def _arange(t: Translation, end: Any, start: Any = 0, step: Any = 1, **_: Any) -> ir.Value:
    dtype = t.out_dtype()
    if all(isinstance(x, (int, float)) for x in (start, end, step)):
        count = t.out_dims()[0]
        assert isinstance(count, int)
        values = np.asarray(
            start + np.arange(count, dtype=np.float64 if dtype.is_floating_point() else np.int64) * step
        )
        return t.const(values.astype(dtype.numpy()), dtype)
    return t.op("Range", t.tensor(start, dtype), t.tensor(end, dtype), t.tensor(step, dtype))


@rule("linspace.default")
def _linspace(t: Translation, start: float, end: float, steps: int, **_: Any) -> ir.Value:
    dtype = t.out_dtype()
    return t.const(np.linspace(start, end, steps).astype(dtype.numpy()), dtype)


@rule("eye.default", "eye.m")
def _eye(t: Translation, n: int, m: int | None = None, **_: Any) -> ir.Value:
    dtype = t.out_dtype()
    return t.const(np.eye(n, m).astype(dtype.numpy()), dtype)
