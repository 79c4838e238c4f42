"""Other distributions than the uniform and the normal one, drawn from uniform numbers."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from ortgraph.capture.torch_rules import rule
from ortgraph.capture.torch_rules_random import standard_normal, uniform
from ortgraph.capture.torch_translate import Translation

FLOAT, DOUBLE, INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64
_LEAST = 2.0**-25  # half of the generator's unit: what stands for an exponential number of 0
_COARSE = 4096  # range of integers from which one draw of 24 bits is too coarse


def exponential(t: Translation, dims: Any) -> ir.Value:
    """-log(1 - u) above 0, float32."""
    log = t.op("Log", t.op("Sub", t.scalar(1, FLOAT), uniform(t, dims)))
    return t.typed(t.op("Max", t.op("Neg", log), t.scalar(_LEAST, FLOAT)), FLOAT, dims)


@rule("exponential.default")
def _exponential(t: Translation, self: ir.Value, lambd: float, **_: Any) -> ir.Value:
    drawn = t.cast(exponential(t, t.out_dims()), t.out_dtype())
    return drawn if lambd == 1 else t.op("Mul", drawn, t.scalar(1 / lambd, t.out_dtype()))


@rule("log_normal.default")
def _log_normal(t: Translation, self: ir.Value, mean: float, std: float, **_: Any) -> ir.Value:
    normal = t.op("Mul", standard_normal(t, t.out_dims()), t.scalar(std, FLOAT))
    return t.cast(t.op("Exp", t.op("Add", normal, t.scalar(mean, FLOAT))), t.out_dtype())


@rule("cauchy.default")
def _cauchy(t: Translation, self: ir.Value, median: float, sigma: float, **_: Any) -> ir.Value:
    angle = t.op("Mul", t.op("Sub", uniform(t, t.out_dims()), t.scalar(0.5, FLOAT)), t.scalar(math.pi, FLOAT))
    wide = t.op("Mul", t.op("Tan", angle), t.scalar(sigma, FLOAT))
    return t.cast(t.op("Add", wide, t.scalar(median, FLOAT)), t.out_dtype())


@rule("geometric.default")
def _geometric(t: Translation, self: ir.Value, p: float, **_: Any) -> ir.Value:
    if p == 1:
        return t.filled(1, t.out_dims(), t.out_dtype())
    trials = t.op("Ceil", t.op("Mul", exponential(t, t.out_dims()), t.scalar(-1 / math.log1p(-p), FLOAT)))
    return t.cast(t.op("Max", trials, t.scalar(1, FLOAT)), t.out_dtype())


@rule("randint.default", "randint.low", "randint_like.default", "randint_like.low_dtype", "random.from", "random.to")
def _randint(t: Translation, **arguments: Any) -> ir.Value:
    low, high = arguments.get("low", arguments.get("from", 0)), arguments.get("high", arguments.get("to"))
    if not isinstance(low, int) or not isinstance(high, int):
        raise t.unsupported("random integers up to a symbolic limit", "draw torch.rand and multiply it")
    dims, count = t.out_dims(), high - low
    drawn = t.cast(uniform(t, dims), DOUBLE)
    if count > _COARSE:
        drawn = t.op("Add", drawn, t.op("Mul", t.cast(uniform(t, dims), DOUBLE), t.scalar(2.0**-24, DOUBLE)))
    whole = t.op("Cast", t.op("Floor", t.op("Mul", drawn, t.scalar(count, DOUBLE))), to=int(INT64))
    moved = whole if low == 0 else t.op("Add", t.typed(whole, INT64, dims), t.scalar(low, INT64))
    return t.cast(t.typed(moved, INT64, dims), t.out_dtype())


@rule("randperm.default")
def _randperm(t: Translation, n: Any, **_: Any) -> ir.Value:
    """The order of uniform numbers."""
    order = t.multi("TopK", uniform(t, (n,)), t.size(n), outputs=2, axis=0, largest=1, sorted=1)[1]
    return t.cast(t.typed(order, INT64, (n,)), t.out_dtype())


@rule("multinomial.default")
def _multinomial(t: Translation, self: ir.Value, num_samples: Any, replacement: bool, **_: Any) -> ir.Value:
    """The largest p / e of exponential numbers e: the first of independent arrivals with rates p."""
    dims, weights = t.dims(self), t.cast(self, FLOAT)
    if not replacement:
        arrivals = t.op("Div", weights, exponential(t, dims))
        return t.multi("TopK", arrivals, t.size(num_samples), outputs=2, axis=-1, largest=1, sorted=1)[1]
    wide = [*dims[:-1], num_samples, dims[-1]]
    rates = t.reshape(weights, [*dims[:-1], 1, dims[-1]])
    arrivals = t.typed(t.op("Div", rates, exponential(t, wide)), FLOAT, wide)
    return t.op("ArgMax", arrivals, axis=len(wide) - 1, keepdims=0)


@rule("rrelu_with_noise_functional.default")
def _rrelu(
    t: Translation, self: ir.Value, noise: ir.Value, lower: float, upper: float, training: bool, **_: Any
) -> tuple[ir.Value, ir.Value]:
    dtype, dims = t.out_dtype(), t.out_dims()
    zero = t.scalar(0, dtype)
    if not training:
        slope = t.scalar((lower + upper) / 2, dtype)
        return t.op("Where", t.op("Greater", self, zero), self, t.op("Mul", self, slope)), noise
    drawn = t.op("Mul", uniform(t, dims), t.scalar(upper - lower, FLOAT))
    slopes = t.cast(t.typed(t.op("Add", drawn, t.scalar(lower, FLOAT)), FLOAT, dims), dtype)
    slopes = t.op("Where", t.op("Greater", self, zero), t.scalar(1, dtype), slopes)
    return t.op("Mul", self, slopes), slopes


@rule("rrelu_with_noise_backward.default")
def _rrelu_backward(
    t: Translation, grad_output: ir.Value, self: ir.Value, noise: ir.Value, lower: float, upper: float, training: bool,
    self_is_result: bool,
) -> ir.Value:  # fmt: skip
    if training and upper - lower > 1e-6:
        return t.op("Mul", grad_output, noise)
    dtype = t.out_dtype()
    slope = t.op("Mul", grad_output, t.scalar((lower + upper) / 2, dtype))
    return t.op("Where", t.op("Greater", self, t.scalar(0, dtype)), grad_output, slope)
