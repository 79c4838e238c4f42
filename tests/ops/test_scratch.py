"""Declared scratch against counted allocations of the installed ONNX Runtime."""

from __future__ import annotations

import shutil

import onnx_ir as ir
import pytest

from bench.scratch import OVERHEAD, compare, runnable
from ortgraph.ops.scratch import scratch_bytes
from ortgraph.ops.targets import STOCK, TRAINING

ort = pytest.importorskip("onnxruntime")
TARGET = TRAINING if hasattr(ort, "training") else STOCK
CHANGED = ("group=64",)  # counted differently by releases: two tiles or one


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_declared_is_what_is_allocated(threads):
    chosen = runnable(TARGET)
    assert len(chosen) > 25
    for name, declared, counted in compare(chosen, threads):
        assert counted <= declared + (4 * OVERHEAD if "Conv" in name else OVERHEAD), (name, declared, counted)
        if not any(word in name for word in CHANGED):
            assert counted >= declared, (name, declared, counted)


def value(name, *shape, dtype=ir.DataType.FLOAT):
    return ir.val(name, dtype=dtype, shape=list(shape))


def test_unknown_sizes_and_operators_count_nothing():
    x, condition = value("x", "n", 8), value("c", "n", 8, dtype=ir.DataType.BOOL)
    assert scratch_bytes(ir.node("Relu", [x])) == 0
    assert scratch_bytes(ir.node("Strange", [x], domain="elsewhere")) == 0
    assert scratch_bytes(ir.node("LayerNormGrad", [x, x, x, x], domain="ortgraph.kernels")) == 0
    assert scratch_bytes(ir.node("Softmax", [x], {"axis": 0})) == 0
    assert scratch_bytes(ir.node("Where", [condition, x, x])) == 0


def test_threads_count_where_a_rule_says_so():
    x, w = value("x", 4, 16, 32, 32), value("w", 16, 16, 3, 3)
    y = value("y", 4, 16, 32, 32)
    node = ir.Node("", "Conv", [x, w], attributes=[ir.AttrInt64s("pads", [1, 1, 1, 1])], outputs=[y])
    assert [scratch_bytes(node, n) for n in (1, 2, 64)] == [65536, 131072, 65536 * 37]
