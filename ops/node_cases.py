"""Operators whose run time ``ortgraph calibrate`` measures, for prices of nodes as the runtime runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ortgraph.ops.calibrate import Case, Shape
from ortgraph.ops.spec import CONTRIB, KERNELS

Shapes = Callable[[int], tuple[Shape | None, ...]]
SIZES = 4  # from a few elements (the fixed cost) to more than a cache holds
_ROWS: tuple[Shape, ...] = ((8, 16), (64, 256), (1024, 256), (2048, 1024))
_SCORES: tuple[Shape, ...] = ((1, 1, 8, 16), (2, 2, 64, 64), (4, 4, 128, 128), (16, 8, 128, 128))
_IMAGES: tuple[Shape, ...] = ((1, 2, 8, 8), (2, 8, 32, 32), (4, 64, 32, 32), (16, 128, 32, 32))
_HEADS: tuple[Shape, ...] = ((1, 8, 2, 8), (2, 32, 4, 64), (8, 128, 4, 64), (8, 256, 16, 64))


def same(count: int) -> Shapes:
    return lambda size: (_ROWS[size],) * count


def _of(family: tuple[Shape, ...], *parts: str | None) -> Shapes:
    """Shapes by a letter each: ``x`` whole, ``w`` last dimension, ``r`` rows, ``1`` rows with a 1, ``s`` scalar,
    ``c`` channels, ``h`` half the window in space, None left out."""

    def shapes(size: int) -> tuple[Shape | None, ...]:
        x = family[size]
        named: dict[str | None, Shape | None] = {
            "x": x, "w": x[-1:], "r": x[:-1], "1": (*x[:-1], 1), "s": (), "c": x[1:2], "n": x[:1], None: None,
            "h": (*x[:2], *(d // 2 for d in x[2:])), "4": (4,), "2": (len(x),),
        }  # fmt: skip
        return tuple(named[p] for p in parts)

    return shapes


def _case(op_type: str, shapes: Shapes, domain: str = "", outputs: int = 1, **options: Any) -> Case:
    return Case(op_type, shapes, outputs, domain=domain, **options)


def _elementwise() -> Iterator[Case]:
    rows = _ROWS
    yield _case("Add", same(2))
    yield _case("Add", _of(rows, "x", "w"))
    yield _case("Add", _of(rows, "x", "1"))
    yield _case("Mul", _of(rows, "x", "s"))
    yield _case("Div", same(2))
    yield from (
        _case(op, same(1))
        for op in ("Neg", "Relu", "Sqrt", "Reciprocal", "Exp", "Log", "Erf", "Tanh", "Sigmoid", "Sin")
    )
    yield _case("Pow", _of(rows, "x", "s"))
    yield from (_case(op, same(2)) for op in ("Greater", "Equal"))
    yield _case("Where", same(3), booleans=frozenset({0}))
    yield _case("Cast", same(1), attributes={"to": 1}, booleans=frozenset({0}))
    yield _case("Cast", same(1), attributes={"to": 9})
    yield _case("Not", same(1), booleans=frozenset({0}))
    yield from (_case(op, same(1), CONTRIB) for op in ("Gelu", "FastGelu", "QuickGelu"))
    for op in ("GeluGrad", "FastGeluGrad", "QuickGeluGrad", "TanhGrad", "SigmoidGrad", "ReluGrad"):
        yield _case(op, same(2), CONTRIB)
    for form in ("none", "tanh"):
        yield _case("Gelu", same(1), KERNELS, attributes={"approximate": form})
        yield _case("GeluGrad", same(2), KERNELS, attributes={"approximate": form})
    yield from (_case(op, same(1), KERNELS) for op in ("Silu", "Sigmoid", "Log", "Sqrt", "Erf", "Elu"))
    yield from (_case(op, same(2), KERNELS) for op in ("SiluGrad", "TanhGrad", "SigmoidGrad", "ReluGrad"))


def _reductions() -> Iterator[Case]:
    rows = _ROWS
    for op in ("ReduceSum", "ReduceMean", "ReduceMax"):
        for axis in (-1, 0):
            options: dict[str, Any] = {"attributes": {"keepdims": 1}, "constants": {1: [axis]}}
            yield _case(op, lambda size: (rows[size], (1,)), **options)
    yield _case("BiasGrad", same(1), KERNELS, attributes={"keepdims": 0})
    yield _case("SquaredNorm", same(1), KERNELS)


def _rows() -> Iterator[Case]:
    rows, scores, images = _ROWS, _SCORES, _IMAGES
    last: dict[str, Any] = {"attributes": {"axis": -1}}
    for op in ("Softmax", "LogSoftmax"):
        yield _case(op, _of(scores, "x"), **last)
    for op in ("SoftmaxGrad_13", "LogSoftmaxGrad_13"):
        yield _case(op, _of(scores, "x", "x"), CONTRIB, **last)
    for op in ("SoftmaxGrad", "LogSoftmaxGrad"):
        yield _case(op, _of(scores, "x", "x"), KERNELS, **last)
    yield _case("Softmax", _of(scores, "x"), KERNELS, **last)
    yield _case("ScaledMaskedSoftmax", _of(scores, "x"), KERNELS, attributes={"scale": 0.125})
    yield _case("ScaledSoftmaxGrad", _of(scores, "x", "x"), KERNELS, attributes={"scale": 0.125})
    loss: dict[str, Any] = {"attributes": {"reduction": "mean", "ignore_index": -100}}
    yield _case("CrossEntropy", _of(rows, "x", "r"), KERNELS, 3, integers={1: 9}, **loss)
    yield _case("CrossEntropyGrad", _of(rows, "s", "x", "r", None, "s"), KERNELS, 1, integers={2: 9}, **loss)
    yield _case("LayerNormalization", _of(rows, "x", "w", "w"), outputs=3, **last)
    yield _case("LayerNormalizationGrad", _of(rows, "x", "x", "w", "1", "1"), CONTRIB, 3, **last)
    yield _case("LayerNorm", _of(rows, "x", "w", "w"), KERNELS, 3, attributes={"axis": -1, "epsilon": 1e-5})
    yield _case("AddLayerNorm", _of(rows, "x", "x", "w", "w"), KERNELS, 4, attributes={"axis": -1, "epsilon": 1e-5})
    yield _case("LayerNormGrad", _of(rows, "x", "x", "1", "1", "w"), KERNELS, 3, **last)
    for op in ("LayerNormGradAdd", "AddLayerNormGrad"):
        yield _case(op, _of(rows, "x", "x", "1", "1", "w", "x"), KERNELS, 3, **last)
    yield _case(
        "BatchNormalizationGrad", _of(images, "x", "x", "c", "c", "c"), CONTRIB, 3, attributes={"epsilon": 1e-5}
    )
    yield _case("BatchNormalization", _of(images, "x", "c", "c", "c", "c"), outputs=3, attributes={"training_mode": 1})


def _movement() -> Iterator[Case]:
    rows, heads, images = _ROWS, _HEADS, _IMAGES
    turned, whole = (0, 2, 3, 1), (0, 2, 1, 3)
    for domain in ("", KERNELS):
        yield from (_case("Transpose", _of(heads, "x"), domain, attributes={"perm": list(p)}) for p in (turned, whole))
    yield _case("Concat", same(2), attributes={"axis": 0})
    yield _case("Concat", same(2), attributes={"axis": -1})
    yield _case("Split", same(1), outputs=2, attributes={"num_outputs": 2, "axis": -1})
    yield _case("Slice", _one_int(rows, 3), constants={1: [0], 2: [-1], 3: [1]})
    yield _case("Pad", _of(rows, "x", "4"), constants={1: [1, 0, 1, 0]})
    yield _case("Gather", lambda size: ((16384, rows[size][1]), rows[size][:1]), integers={1: 16384})
    yield _case("GatherElements", _of(rows, "x", "x"), integers={1: 8}, attributes={"axis": 0})
    yield _case("ScatterElements", _of(rows, "x", "x", "x"), integers={1: 8}, attributes={"axis": 0})
    yield _case("Expand", lambda size: ((1, 16, (1, 32, 512, 4096)[size]), (3,)), constants={1: [32, 1, 1]})
    table = {"rows": 8192, "padding_idx": -1}
    yield _case("EmbeddingGrad", _of(rows, "x", "r"), KERNELS, attributes=table, integers={1: 8192})
    yield _case("MaxPool", _of(images, "x"), outputs=2, attributes={"kernel_shape": [2, 2], "strides": [2, 2]})
    yield _case("AveragePool", _of(images, "x"), attributes={"kernel_shape": [2, 2], "strides": [2, 2]})
    yield _case("GlobalAveragePool", _of(images, "x"))


def _one_int(family: tuple[Shape, ...], count: int) -> Shapes:
    return lambda size: (family[size], *[(1,)] * count)


def _steps() -> Iterator[Case]:
    rows = _ROWS
    adam = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}
    yield _case("AdamW", _of(rows, "s", "s", "x", "x", "x", "x"), KERNELS, 3, attributes=adam, integers={1: 9})
    draw = {"ratio": 0.1, "node": 3}
    yield _case("Dropout", _of(rows, "x", "s", "s"), KERNELS, 2, attributes=draw, integers={1: 9, 2: 9})
    yield _case("DropoutGrad", same(2), KERNELS, attributes={"ratio": 0.1}, booleans=frozenset({1}))


NODE_CASES: tuple[Case, ...] = (*_elementwise(), *_reductions(), *_rows(), *_movement(), *_steps())

# M, N, K and batch of matrix products, and in which of four forms: plain, either operand transposed.
PRODUCTS: tuple[tuple[int, int, int, int], ...] = (
    (8, 8, 8, 1), (32, 32, 32, 1), (128, 128, 64, 1), (1024, 256, 256, 1), (1024, 1024, 256, 1), (1024, 256, 1024, 1),
    (256, 1024, 1024, 1), (512, 512, 512, 1), (4096, 64, 64, 1), (64, 64, 4096, 1), (256, 8192, 64, 1),
    (8, 1024, 256, 1), (8, 256, 1024, 1), (1, 1024, 1024, 1),
    (32, 32, 32, 64), (64, 64, 64, 32), (128, 128, 64, 32), (128, 64, 128, 32), (512, 512, 64, 8), (512, 64, 512, 8),
    (1, 128, 64, 32),
)  # fmt: skip
# Batch, channels, filters, pixels, kernel, stride, group
CONVOLUTIONS: tuple[tuple[int, int, int, int, int, int, int], ...] = (
    (1, 4, 4, 8, 3, 1, 1), (4, 16, 16, 32, 3, 1, 1), (8, 32, 32, 28, 3, 1, 1), (8, 64, 128, 28, 3, 2, 1),
    (8, 64, 64, 28, 1, 1, 1), (8, 128, 256, 14, 1, 1, 1), (4, 256, 256, 7, 3, 1, 1), (4, 3, 32, 64, 7, 2, 1),
    (8, 64, 64, 56, 3, 1, 1), (2, 16, 300, 16, 3, 1, 1),
    (4, 64, 64, 28, 3, 1, 64), (8, 128, 128, 14, 3, 1, 128), (2, 8, 8, 16, 3, 1, 8), (4, 32, 32, 56, 3, 2, 32),
    (4, 64, 64, 28, 3, 1, 4), (8, 128, 128, 14, 3, 1, 8), (2, 32, 32, 14, 5, 1, 2),
)  # fmt: skip
