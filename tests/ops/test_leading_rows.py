"""Rules for sets of rows: what reads row by row, where zeros stay, and the near misses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.ops.builder import Builder
from ortgraph.ops.leading_rows import LeadingRows, kept_zero, read_by_rows, summed_by_rows

ROWS = LeadingRows(12)
F32 = ir.DataType.FLOAT


@pytest.fixture
def build() -> Builder:
    return Builder(ir.Graph([], [], nodes=[], opset_imports={"": 18, "ortgraph": 1}), "test")


def val(*shape, dtype=F32) -> ir.Value:
    return ir.val("x", dtype=dtype, shape=list(shape))


def test_rows_are_leading_dimensions():
    shapes = {(12, 5): 1, (3, 4, 5): 2, (3, 4): 2, (1, 12, 2): 2, (4, 3, 2): 2, (3, 5): None, (5, 12): None, (): None}
    assert {s: ROWS.axes(val(*s)) for s in shapes} == shapes
    assert ROWS.axes(val("n", 4)) is None
    assert ROWS.compact(val(3, 4, 5), 2) == (1, 2, 5)


BY_ROWS = {
    "sum with a row of numbers": (lambda b: b.op("Add", val(3, 4, 5), val(5)), {0}),
    "sum with all rows": (lambda b: b.op("Add", val(3, 4, 5), val(3, 4, 1)), {0, 1}),
    "sum with places": (lambda b: b.op("Add", val(3, 4, 5), val(4, 5)), None),
    "sum with a batch": (lambda b: b.op("Add", val(3, 4, 5), val(3, 1, 1)), None),
    "square matrix": (lambda b: b.op("Add", val(12, 12), val(12)), {0}),
    "view": (lambda b: b.op("Reshape", val(12, 10), b.ints([3, 4, 2, 5])), {0}),
    "view that cuts rows": (lambda b: b.op("Reshape", val(12, 10), b.ints([8, 15])), None),
    "transpose": (lambda b: b.op("Transpose", val(4, 3, 5), perm=[1, 0, 2]), None),
    "product": (lambda b: b.op("MatMul", val(3, 4, 5), val(5, 2)), {0}),
    "products of each batch": (lambda b: b.op("MatMul", val(3, 4, 4), val(3, 4, 5)), None),
    "gemm": (lambda b: b.op("Gemm", val(12, 5), val(5, 2), val(2)), {0}),
    "gemm with rows added": (lambda b: b.op("Gemm", val(12, 5), val(5, 2), val(12, 2)), {0, 2}),
    "gemm of the transpose": (lambda b: b.op("Gemm", val(5, 12), val(5, 2), transA=1), None),
    "softmax": (lambda b: b.op("Softmax", val(3, 4, 5), axis=-1), {0}),
    "softmax over places": (lambda b: b.op("Softmax", val(3, 4, 5), axis=1), None),
    "mean": (lambda b: b.op("ReduceMean", val(3, 4, 5), b.ints([-1])), {0}),
    "mean over places": (lambda b: b.op("ReduceMean", val(3, 4, 5), b.ints([1])), None),
    "mean of everything": (lambda b: b.op("ReduceMean", val(3, 4, 5)), None),
    "expand": (lambda b: b.op("Expand", val(3, 4, 1), b.ints([3, 4, 5])), {0}),
    "expand of places": (lambda b: b.op("Expand", val(1, 4, 5), b.ints([3, 4, 5])), None),
    "slice": (lambda b: b.op("Slice", val(3, 4, 5), b.ints([0]), b.ints([2]), b.ints([2])), {0}),
    "concat": (lambda b: b.op("Concat", val(3, 4, 5), val(3, 4, 2), axis=-1), {0, 1}),
    "concat of rows": (lambda b: b.op("Concat", val(1, 4, 5), val(2, 4, 5), axis=0), None),
    "running sum": (lambda b: b.op("CumSum", val(3, 4, 5), b.const(1, np.int64)), None),
    "draw": (lambda b: b.op("RandomNormalLike", val(3, 4, 5)), None),
}


@pytest.mark.parametrize("case", BY_ROWS)
def test_what_reads_row_by_row(case, build):
    make, wanted = BY_ROWS[case]
    found = read_by_rows(make(build).producer(), ROWS)
    assert (None if found is None else set(found)) == wanted


ZERO = {
    "factor": (lambda b, z: b.op("Mul", val(3, 4, 5), z), True),
    "sum of both": (lambda b, z: b.op("Add", z, z), True),
    "sum with another": (lambda b, z: b.op("Add", z, val(3, 4, 5)), False),
    "divisor": (lambda b, z: b.op("Div", val(3, 4, 5), z), False),
    "dividend": (lambda b, z: b.op("Div", z, val(5)), True),
    "exponential": (lambda b, z: b.op("Exp", z), False),
    "view": (lambda b, z: b.op("Reshape", z, b.ints([12, 5])), True),
    "transpose": (lambda b, z: b.op("Transpose", z, perm=[1, 0, 2]), False),
    "product": (lambda b, z: b.op("MatMul", z, val(5, 2)), True),
    "mean over places": (lambda b, z: b.op("ReduceMean", z, b.ints([1])), False),
    "gradient": (lambda b, z: b.op("GeluGrad", z, val(3, 4, 5), domain="ortgraph"), True),
    "forward input of a gradient": (lambda b, z: b.op("GeluGrad", val(3, 4, 5), z, domain="ortgraph"), False),
}


@pytest.mark.parametrize("case", ZERO)
def test_where_zeros_stay(case, build):
    zero = val(3, 4, 5)
    make, wanted = ZERO[case]
    assert kept_zero(make(build, zero).producer(), lambda v: v is zero, ROWS) is wanted


def test_gemm_with_bias_is_not_zero(build):
    zero = val(12, 5)
    plain, biased = build.op("Gemm", zero, val(5, 2)), build.op("Gemm", zero, val(5, 2), val(2))
    assert kept_zero(plain.producer(), lambda v: v is zero, ROWS)
    assert not kept_zero(biased.producer(), lambda v: v is zero, ROWS)


SUMS = {
    "weight gradient": (lambda b, z: b.op("Gemm", z, val(12, 3), transA=1), {0, 1}),
    "weight gradient, swapped": (lambda b, z: b.op("Gemm", val(12, 3), z, transA=1), {0, 1}),
    "no gradient": (lambda b, z: b.op("Gemm", val(12, 3), val(12, 2), transA=1), None),
    "another product": (lambda b, z: b.op("Gemm", z, val(3, 12), transA=1, transB=1), None),
    "bias gradient": (lambda b, z: b.op("ReduceSum", z, b.ints([0]), keepdims=0), {0}),
    "sum of each row": (lambda b, z: b.op("ReduceSum", z, b.ints([1]), keepdims=0), None),
    "table": (
        lambda b, z: b.op("EmbeddingGrad", z, val(12, dtype=ir.DataType.INT64), domain="ortgraph", rows=7),
        {0, 1},
    ),
}


@pytest.mark.parametrize("case", SUMS)
def test_what_sums_over_rows(case, build):
    zero = val(12, 5)
    make, wanted = SUMS[case]
    found = summed_by_rows(make(build, zero).producer(), lambda v: v is zero, ROWS)
    assert (None if found is None else set(found)) == wanted


def test_part_of_the_row_dimensions_is_no_sum_over_rows(build):
    zero = val(3, 4, 5)
    sums = [build.op("ReduceSum", zero, build.ints(axes), keepdims=0) for axes in ([0], [1], [0, 1], [0, 1, 2])]
    assert [summed_by_rows(s.producer(), lambda v: v is zero, ROWS) is not None for s in sums] == [0, 0, 1, 1]
