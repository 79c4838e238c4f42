"""Generated kernels against float64: named regions at odd sizes, empty, not finite, in place, at one and two threads."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.ops.spec import spec_of

F32, B16, BOOL, I64 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.BOOL, ir.DataType.INT64
COMPOSITE = "ortgraph"


def rms_norm(b, x, scale):
    mean = b.op("ReduceMean", b.op("Mul", x, x), b.ints([-1]), keepdims=1)
    inverse = b.op("Reciprocal", b.op("Sqrt", b.op("Add", mean, b.scalar(1e-6, x))))
    y = b.op("Mul", x, inverse)
    return [b.op("Mul", scale, y), y, inverse]


def rms_norm_grad(b, dy, x, inverse, scale):
    """As autograd writes it, with the sum for the scale."""
    rank = len(x.shape)
    g = b.op("Mul", dy, scale)
    total = b.op("ReduceSum", b.op("Mul", g, x), b.ints([rank - 1]), keepdims=1)
    factor = b.op("Mul", b.op("Mul", total, b.scalar(-0.5, x)), b.op("Pow", inverse, b.scalar(3.0, x)))
    spread = b.op("Expand", factor, b.ints(list(x.shape)))
    spread = b.op("Div", spread, b.scalar(float(x.shape[-1]), x))
    dx = b.op("Add", b.op("Mul", g, inverse), b.op("Mul", spread, b.op("Mul", x, b.scalar(2.0, x))))
    flat = b.op("Reshape", b.op("Mul", dy, b.op("Mul", x, inverse)), b.ints([-1, x.shape[-1]]))
    return [dx, b.op("ReduceSum", flat, b.ints([0]), keepdims=0)]


def rotary(b, x, cos, sin):
    half = x.shape[-1] // 2
    low = b.op("Slice", x, b.ints([0]), b.ints([half]), b.ints([-1]))
    high = b.op("Slice", x, b.ints([half]), b.ints([2**31]), b.ints([-1]))
    turned = b.op("Concat", b.op("Neg", high), low, axis=-1)
    return [b.op("Add", b.op("Mul", x, cos), b.op("Mul", turned, sin))]


def rotary_grad(b, dy, cos, sin):
    half = dy.shape[-1] // 2
    g = b.op("Mul", dy, sin)
    low = b.op("Slice", g, b.ints([0]), b.ints([half]), b.ints([-1]))
    high = b.op("Slice", g, b.ints([half]), b.ints([2 * half]), b.ints([-1]))
    left, right = [0] * 8, [0] * 8
    left[3], right[7] = half, half
    turned = b.op("Add", b.op("Pad", b.op("Neg", low), b.ints(left)), b.op("Pad", high, b.ints(right)))
    return [b.op("Add", turned, b.op("Mul", dy, cos))]


def swiglu(b, gate, up):
    return [b.op("Mul", b.op("Silu", gate, domain=COMPOSITE), up)]


def swiglu_grad(b, dy, gate, up, act):
    d = b.op("SiluGrad", b.op("Mul", dy, up), gate, domain=COMPOSITE)
    return [b.op("Mul", dy, act), d]


def gelu_bias_grad(b, dy, x):
    d = b.op("GeluGrad", dy, x, domain=COMPOSITE, approximate="none")
    return [d, b.op("ReduceSum", d, b.ints(list(range(len(x.shape) - 1))), keepdims=0)]


def masked_softmax(b, scores, mask, key, step):
    scaled = b.op("Add", b.op("Mul", scores, b.scalar(0.125, scores)), mask)
    y = b.op("Softmax", scaled, axis=-1)
    kept, _ = b.multi("Dropout", y, key, step, outputs=2, domain=COMPOSITE, node=3, ratio=0.25)
    return [kept, y]


def relative_bias(b, scores, bias, allowed):
    bias = b.op("Where", allowed, bias, b.const(-1e9, np.float32))
    y = b.op("Softmax", b.op("Add", scores, bias), axis=-1)
    empty = b.op("Equal", b.op("ReduceMax", scores, b.ints([-1]), keepdims=1), b.const(-np.inf, np.float32))
    return [b.op("Where", empty, b.const(0, np.float32), y)]


def add_norm(b, x, residual, scale, bias):
    total = b.op("Add", x, residual)
    y, mean, inverse = b.multi("LayerNormalization", total, scale, bias, outputs=3, axis=-1, epsilon=1e-5)
    for v in (mean, inverse):
        v.dtype, v.shape = F32, ir.Shape([*list(x.shape)[:-1], 1])
    return [total, y, mean, inverse]


def norm_grad(b, dy, more, x, mean, inverse, scale):
    g = b.op("Add", dy, more)
    made = b.multi("LayerNormGrad", g, x, mean, inverse, scale, outputs=3, domain=COMPOSITE, axis=-1)
    return list(made)


def log_softmax_grad(b, dy, y):
    return [b.op("Neg", b.op("LogSoftmaxGrad", dy, y, domain=COMPOSITE, axis=-1))]


def log_softmax(b, x):
    return [b.op("LogSoftmax", b.op("Mul", x, b.scalar(3.0, x)), axis=-1)]


def functions(b, x, y):
    """Every element-wise function once."""
    p = b.op("Add", b.op("Abs", x), b.scalar(0.1, x))
    made = [b.op(n, x) for n in ("Exp", "Erf", "Tanh", "Sigmoid", "Relu", "Floor", "Ceil", "Round", "Sign", "Softplus")]
    made += [b.op(n, p) for n in ("Log", "Sqrt", "Reciprocal")]
    total = made[0]
    for other in made[1:]:
        total = b.op("Add", total, other)
    extremes = b.op("Max", b.op("Min", x, y), b.op("Clip", x, b.scalar(-0.5, x), b.scalar(0.5, x)))
    powers = b.op("Add", b.op("Pow", p, b.scalar(0.5, x)), b.op("Pow", p, y))
    return [total, extremes, powers]


def choices(b, x, y, m):
    less = b.op("Less", x, y)
    both = b.op("And", less, b.op("Not", m))
    either = b.op("Or", both, b.op("GreaterOrEqual", x, b.scalar(0.3, x)))
    chosen = b.op("Where", either, x, b.op("Neg", y))
    return [chosen, either, b.op("Cast", either, to=F32)]


CASES = {
    "rms_norm": (rms_norm, lambda n, w: {"x": (n, 3, w), "scale": (w,)}),
    "rms_norm_grad": (
        rms_norm_grad,
        lambda n, w: {"dy": (n, 3, w), "x": (n, 3, w), "inverse": (n, 3, 1), "scale": (w,)},
    ),
    "rotary": (rotary, lambda n, w: {"x": (2, n, 5, 2 * w), "cos": (1, 1, 5, 2 * w), "sin": (1, 1, 5, 2 * w)}),
    "rotary_grad": (rotary_grad, lambda n, w: {"dy": (2, n, 5, 2 * w), "cos": (1, 1, 5, 2 * w), "sin": (1, 1, 5, 2 * w)}),
    "swiglu": (swiglu, lambda n, w: {"gate": (n, 3, w), "up": (n, 3, w)}),
    "swiglu_grad": (swiglu_grad, lambda n, w: {k: (n, 3, w) for k in ("dy", "gate", "up", "act")}),
    "gelu_bias_grad": (gelu_bias_grad, lambda n, w: {"dy": (n, 3, w), "x": (n, 3, w)}),
    "masked_softmax": (
        masked_softmax,
        lambda n, w: {"scores": (n, 2, 5, w), "mask": (n, 1, 1, w), "key": (I64, ()), "step": (I64, ())},
    ),
    "relative_bias": (
        relative_bias,
        lambda n, w: {"scores": (n, 2, 5, w), "bias": (1, 2, 5, w), "allowed": (BOOL, (n, 1, 5, w))},
    ),
    "add_norm": (add_norm, lambda n, w: {"x": (n, 3, w), "residual": (n, 3, w), "scale": (w,), "bias": (w,)}),
    "norm_grad": (
        norm_grad,
        lambda n, w: {
            "dy": (n, 3, w), "more": (n, 3, w), "x": (n, 3, w), "mean": (n, 3, 1), "inverse": (n, 3, 1), "scale": (w,)
        },
    ),
    "log_softmax": (log_softmax, lambda n, w: {"x": (n, w)}),
    "log_softmax_grad": (log_softmax_grad, lambda n, w: {"dy": (n, w), "y": (n, w)}),
    "functions": (functions, lambda n, w: {"x": (n, w), "y": (n, w)}),
    "choices": (choices, lambda n, w: {"x": (n, w), "y": (n, w), "m": (BOOL, (n, w))}),
}  # fmt: skip
SIZES = [(4, 17), (40, 64), (1, 9), (700, 33)]
_WIDE = 4100  # beyond the rows that lie on the stack


def make(fused, name, n, w):
    body, shapes = CASES[name]
    return fused(body, shapes(n, w))


@pytest.mark.parametrize("name", sorted(CASES))
def test_against_float64(fused, name):
    """Sizes with and without a rest after whole vectors, one row, more rows than one piece; equal bits for threads."""
    kernels = set()
    for n, w in SIZES:
        case = make(fused, name, n, w)
        case.check(tolerance=2e-5 if "norm" in name or name == "gelu_bias_grad" else 4e-6)
        kernels.add(case.node.op_type)
    # A leading dimension of 1 is another pattern; where columns move, or the width stands in a constant, it is baked in.
    assert len(kernels) <= (len(SIZES) if name.startswith("rotary") or name == "rms_norm_grad" else 2)


@pytest.mark.parametrize("name", ["masked_softmax", "add_norm", "rms_norm", "gelu_bias_grad"])
def test_long_rows(fused, name):
    make(fused, name, 2, _WIDE).check(tolerance=2e-5)


@pytest.mark.parametrize("name", sorted(CASES))
def test_empty(fused, name):
    """No rows: nothing is written but sums, which are zero."""
    case = make(fused, name, 0, 17)
    for got, want in zip(case.run(case.feeds()), case.graph.graph.outputs, strict=True):
        assert got.shape == tuple(want.shape) and not got.any()


@pytest.mark.parametrize(
    "name", ["swiglu", "add_norm", "masked_softmax", "log_softmax", "choices", "functions", "rms_norm"]
)
def test_not_finite(fused, name):
    case = make(fused, name, 3, 17)
    feeds = case.feeds()
    x = next(v for v in feeds.values() if v.dtype == np.float32 and v.size > 40)
    x.reshape(-1)[[3, 20, 37]] = [np.nan, np.inf, -np.inf]
    case.check(feeds=feeds)


@pytest.mark.parametrize("name", sorted(CASES))
def test_declared_pairs_by_brute_force(fused, name):
    case = make(fused, name, 40, 64)
    feeds, node = case.feeds(), case.node
    expected = case.run(feeds)
    shapes = {v.name: (v.dtype, tuple(v.shape)) for v in (*case.graph.graph.inputs, *case.graph.graph.outputs)}
    for i, o in spec_of(node).inplace:
        source, target = node.inputs[i].name, node.outputs[o].name
        if source not in feeds or target not in shapes or shapes[source] != shapes[target]:
            continue
        for got, want in zip(case.run(feeds, inplace=[(source, target)]), expected, strict=True):
            assert np.array_equal(got, want), (source, target)


def test_pairs_are_found(fused):
    """What a plan hopes for: the output of a chain over its input, dX over dY, a sum over its first operand."""
    for name, pair in (("swiglu", (0, 0)), ("gelu_bias_grad", (0, 0)), ("add_norm", (0, 0)), ("rms_norm", (0, 2))):
        assert pair in spec_of(make(fused, name, 40, 64).node).inplace, name
    assert spec_of(make(fused, "rotary", 40, 64).node).inplace == ()


def test_dropout_is_the_kernel_s(fused):
    """The same bits as the hand-written kernel's, forward and in the gradient, which draws the mask again."""
    from ortgraph.ops.random import reference_mask

    def body(b, x, dy, key, step):
        y, mask = b.multi("Dropout", b.op("Neg", x), key, step, outputs=2, domain=COMPOSITE, node=7, ratio=0.3)
        d = b.op("DropoutGrad", dy, mask, domain=COMPOSITE, ratio=0.3)
        return [y, b.op("Neg", d)]

    case = fused(body, {"x": (37, 45), "dy": (37, 45), "key": (I64, ()), "step": (I64, ())}, regions=None)
    feeds = case.feeds()
    y, dx = case.run(feeds)
    mask = reference_mask(int(feeds["key"]), int(feeds["step"]), 7, (37, 45), 0.3)
    scale = np.float32(1 / (1 - 0.3))
    assert np.array_equal(y, -feeds["x"] * mask * scale)
    assert np.array_equal(dx, -(feeds["dy"] * mask * scale))
    assert not any(v.dtype == BOOL for n in case.graph.graph for v in n.outputs)


@pytest.mark.parametrize("name", ["swiglu", "add_norm", "rms_norm_grad", "rotary", "gelu_bias_grad"])
def test_bfloat16_in_and_out(fused, name):
    """Values are widened when they are read, rounded once when they are written, float32 between."""
    body, shapes = CASES[name]
    wide = shapes(40, 33)
    tensors = [k for k, s in wide.items() if len(s) > 2 and s[-1] != 1]

    def low(b, *values):
        read = [b.op("Cast", v, to=F32) if v.name in tensors else v for v in values]
        return [b.op("Cast", v, to=B16) if len(v.shape) > 2 and v.shape[-1] != 1 else v for v in body(b, *read)]

    case = fused(low, {k: (B16 if k in tensors else F32, s) for k, s in wide.items()})
    feeds = case.feeds()
    want = fused(body, wide).run({k: v.astype(np.float32) for k, v in feeds.items()})
    for got, wanted in zip(case.run(feeds), want, strict=True):
        assert np.array_equal(np.asarray(got, np.float32), wanted.astype(got.dtype).astype(np.float32))


def test_sums_over_a_concatenation(fused):
    """The sum is wider than what is read."""

    def body(b, x, y):
        joined = b.op("Concat", x, y, axis=-1)
        return [joined, b.op("ReduceSum", joined, b.ints([0]), keepdims=0)]

    fused(body, {"x": (50, 7), "y": (50, 40)}).check()


def test_a_number_per_row_written_along_the_row(fused):
    def body(b, x):
        total = b.op("ReduceSum", b.op("Exp", x), b.ints([-1]), keepdims=1)
        return [b.op("Expand", total, b.ints(list(x.shape))), total]

    fused(body, {"x": (9, 21)}).check()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("repeated", [(5, 1, 50, 4), (1, 50, 4), (5, 6, 50, 4), (5, 6, 50, 1)])
@pytest.mark.parametrize("name", ["ReduceSum", "ReduceMax"])
def test_a_number_per_row_without_a_dimension_for_it(fused, name, repeated, beside):
    """Its last dimension counts rows, and is none of columns."""

    def body(b, x, y):
        product = b.op("Mul", b.op("Exp", x), y)
        found = b.op(name, product, b.ints([-1]), keepdims=0)
        return [found, product] if beside else [found]

    fused(body, {"x": (5, 6, 50, 4), "y": repeated}).check()
