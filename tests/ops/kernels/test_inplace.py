"""Every kernel: declared in-place pairs by brute force, repeated runs, thread counts, table against specification."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ortgraph.ops.kernels import KERNELS
from ortgraph.ops.spec import lookup

_RNG = np.random.default_rng(5)


def _f(*shape):
    return _RNG.standard_normal(shape).astype(np.float32)


def _indices(high, *shape):
    return _RNG.integers(0, high, shape)


_ROWS, _WIDTH, _TABLE = 300, 67, 1900  # odd sizes, several pieces, a rest after whole vectors
_LR, _STEP, _KEY = np.float32(1e-2), np.int64(3), np.int64(-77)


def _moments(*shape):
    return [_f(*shape), _f(*shape) ** 2]


def _adam():
    return [_LR, _STEP, _f(_ROWS, _WIDTH), _f(_ROWS, _WIDTH), *_moments(_ROWS, _WIDTH), np.float32(0.5)]


def _norm(extra=()):
    x = _f(_ROWS, _WIDTH)
    mean = x.mean(1, keepdims=True)
    inv = 1 / np.sqrt(x.var(1, keepdims=True) + np.float32(1e-5))
    return [_f(_ROWS, _WIDTH), x, mean, inv.astype(np.float32), _f(_WIDTH), *extra]


def _heads(count):
    return [_f(2, 4, 150, 24) for _ in range(count)]


def _multi(states=2):
    result = [_LR, _STEP, None, None]
    for shape in ((40000,), (3, 5), (70001,)):
        result += [_f(*shape), _f(*shape), *_moments(*shape)[2 - states :]]
    return result


def _softmax():
    e = np.exp(_f(_ROWS, _WIDTH))
    return [_f(_ROWS, _WIDTH), (e / e.sum(1, keepdims=True)).astype(np.float32)]


_PAIR = [_f(_ROWS, _WIDTH), _f(_ROWS, _WIDTH)]
_SCORES, _TARGET = _f(_ROWS, _WIDTH), _indices(_WIDTH, _ROWS)
_TARGET[::7] = -100

# name -> (inputs, number of outputs, attributes)
CASES = {
    "AdamW": (_adam(), 3, {}),
    "LAMB": (_adam(), 3, {}),
    "SGD": ([*_adam()[:5], np.float32(0.5)], 2, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "MultiAdamW": (_multi(), 9, {}),
    "MultiLAMB": (_multi(), 9, {"max_trust": 2.0}),
    "MultiSGD": (_multi(1), 6, {"momentum": 0.9, "nesterov": 1}),
    "EmbeddingAdamW": (
        [_LR, _STEP, _f(_TABLE, _WIDTH), _f(_ROWS, _WIDTH), _indices(50, _ROWS), *_moments(_TABLE, _WIDTH)], 3,
        {"padding_idx": 4},
    ),
    "EmbeddingGrad": ([_f(_ROWS, _WIDTH), _indices(50, _ROWS)], 1, {"rows": _TABLE}),
    "EmbeddingGradAdd": ([_f(_ROWS, _WIDTH), _indices(50, _ROWS), _f(_TABLE, _WIDTH)], 1, {"padding_idx": 4}),
    "BiasGelu": ([_f(_ROWS, _WIDTH), _f(_WIDTH)], 1, {}),
    "BiasGeluGrad": ([*_PAIR, _f(_WIDTH)], 2, {}),
    "Attention": (_heads(3), 2, {"scale": 0.3}),
    "AttentionGrad": ([*_heads(5), _f(2, 4, 150) + 5], 3, {"scale": 0.3}),
    "Gelu": (_PAIR[:1], 1, {"approximate": "tanh"}),
    **{name: (_PAIR[:1], 1, {}) for name in ("Silu", "Sigmoid", "Erf")},
    **{name: ([np.abs(_PAIR[0])], 1, {}) for name in ("Log", "Sqrt")},
    "Elu": (_PAIR[:1], 1, {"alpha": 1.5}),
    "LayerNorm": ([_f(_ROWS, _WIDTH), _f(_WIDTH), _f(_WIDTH)], 3, {}),
    "AddLayerNorm": ([*_PAIR, _f(_WIDTH), _f(_WIDTH), _f(_WIDTH)], 4, {}),
    "LayerNormGrad": (_norm(), 3, {}),
    "AddLayerNormGrad": (_norm([_f(_ROWS, _WIDTH)]), 3, {}),
    "LayerNormGradAdd": (_norm([_f(_ROWS, _WIDTH)]), 3, {}),
    "Softmax": (_PAIR[:1], 1, {}),
    "ScaledMaskedSoftmax": ([_f(3, 10, 10, _WIDTH), _f(3, 1, 1, _WIDTH)], 1, {"scale": 0.3}),
    "SoftmaxGrad": (_softmax(), 1, {}),
    "ScaledSoftmaxGrad": (_softmax(), 1, {"scale": 0.3}),
    "CrossEntropy": ([_SCORES, _TARGET], 3, {}),
    "CrossEntropyGrad": ([np.float32(2), _SCORES - 5, _TARGET, None, np.float32(9)], 1, {}),
    "CrossEntropyAndGrad": ([np.float32(2), _SCORES, _TARGET], 2, {}),
    "LogSumExp": ([_SCORES], 1, {}),
    "CrossEntropyStatisticsGrad": (
        [np.float32(2), _SCORES, _TARGET, None, np.float32(9), _f(_ROWS, 1) + 5], 1, {},
    ),
    "SquaredNorm": ([_f(70001), _f(3, 5), _f(_ROWS, _WIDTH)], 1, {}),
    "Product": ([_f(_ROWS, 1100), _f(1100, _WIDTH), _f(_WIDTH), _f(_ROWS, _WIDTH)], 2, {"precision": "bf16"}),
    "Transpose": ([_f(5, _ROWS, _WIDTH)], 1, {"perm": [2, 0, 1]}),
    "BiasGrad": ([_f(_ROWS, _WIDTH)], 1, {}),
    "Dropout": ([_f(_ROWS, _WIDTH), _KEY, _STEP], 2, {"ratio": 0.3, "node": 5}),
    "DropoutGrad": ([_f(_ROWS, _WIDTH), _f(_ROWS, _WIDTH) > 0], 1, {"ratio": 0.3}),
    "RandomUniform": ([_KEY, _STEP], 1, {"node": 5, "shape": [_ROWS, _WIDTH]}),
}  # fmt: skip
_IMAGES, _FILTERS, _CHANNELS = _f(5, 19, 13, 11), _f(21, 19, 3, 3), _f(19)
CASES |= {
    "Conv": ([_IMAGES, _FILTERS, _f(21)], 1, {"pads": [1, 1, 1, 1], "strides": [1, 2]}),
    "ConvGrad": ([_f(5, 21, 13, 6), _IMAGES, _FILTERS], 3, {"pads": [1, 1, 1, 1], "strides": [1, 2]}),
    "BatchNorm": ([_IMAGES, _f(19), _f(19), _f(19), _f(19) ** 2], 5, {}),
    "BatchNormGrad": ([_f(5, 19, 13, 11), _IMAGES, _f(19), _f(19), _f(19) ** 2], 3, {}),
    "MaxPool": ([_IMAGES], 2, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "MaxPoolGrad": (
        [_f(5, 19, 4, 3), _indices(143, 5, 19, 4, 3) + 143 * np.arange(95).reshape(5, 19, 1, 1), _IMAGES], 1, {},
    ),
    "AveragePoolGrad": ([_f(5, 19, 4, 3), _IMAGES], 1, {"kernel_shape": [3, 4], "strides": [3, 3]}),
}  # fmt: skip
for _name in ("GeluGrad", "SiluGrad", "ReluGrad", "TanhGrad", "SigmoidGrad", "LogSoftmaxGrad"):
    CASES[_name] = (_PAIR, 1, {})


def test_every_kernel_has_a_case():
    assert set(CASES) == set(KERNELS)


@pytest.mark.parametrize("name", sorted(CASES))
def test_same_bits_at_any_thread_count_and_every_time(kernel, name):
    inputs, outputs, attributes = CASES[name]
    first = kernel(name, inputs, outputs, threads=1, **attributes).run()
    assert all(np.isfinite(y).all() for y in first)
    runner = kernel(name, inputs, outputs, threads=2, **attributes)
    for _ in range(10):
        for a, b in zip(first, runner.run(), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("name", sorted(n for n, entry in KERNELS.items() if entry.inplace))
def test_declared_pairs(kernel, name):
    inputs, outputs, attributes = CASES[name]
    runner = kernel(name, inputs, outputs, **attributes)
    expected = runner.run()
    pairs = [(i, o) for i, o in KERNELS[name].inplace if i < len(inputs) and inputs[i] is not None]
    tried = 0
    for count in range(1, outputs + 1):
        for chosen in itertools.islice(itertools.combinations(pairs, count), 40):
            if len({i for i, _ in chosen}) < count or len({o for _, o in chosen}) < count:
                continue
            tried += 1
            for a, b in zip(expected, runner.run_inplace(chosen, expected), strict=True):
                assert np.array_equal(a, b), (name, chosen)
    assert tried


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_table_and_specification_agree(name):
    entry, spec = KERNELS[name], lookup("ortgraph.kernels", name)
    assert spec.known and spec.inplace == entry.inplace and not spec.alias
    if entry.implements is not None and entry.implements[0]:
        assert lookup(*entry.implements).known
