from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import pytest

from ortgraph.passes.canonical.eliminate_cast_pairs import EliminateCastPairs, widens

TYPES = {"float": 1, "uint8": 2, "int8": 3, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "double": 11}


@pytest.mark.parametrize(
    "start, middle",
    [
        ("float16", "float"),
        ("float", "double"),
        ("int8", "int32"),
        ("int32", "double"),
        ("bool", "float"),
        ("uint8", "float16"),
    ],
)
def test_widening_and_back_is_removed(run, start, middle):
    text = f"""g ({start}[3] x) => ({start}[3] y) {{ a = Identity(x) w = Cast <to={TYPES[middle]}> (a)
        b = Cast <to={TYPES[start]}> (w) y = Identity(b) }}"""
    values = np.array([0, 1, 1]).astype(ir.DataType(TYPES[start]).numpy())
    ran = run(text, EliminateCastPairs(), {"x": values})
    assert ran.ops == ["Identity", "Identity"] and ran.counts == {"removed": 1}


@pytest.mark.parametrize(
    "start, middle",
    [("float", "float16"), ("int64", "float"), ("int32", "float"), ("float", "int32"), ("int64", "int32"),
     ("int8", "uint8"), ("float", "bool"), ("int16", "float16"), ("int64", "double")],
)  # fmt: skip
def test_lossy_pairs_stay(run, start, middle):
    text = (
        f"g ({start}[3] x) => ({start}[3] y) {{ w = Cast <to={TYPES[middle]}> (x) y = Cast <to={TYPES[start]}> (w) }}"
    )
    ran = run(text, EliminateCastPairs())
    assert ran.ops == ["Cast", "Cast"] and "is not exact" in ran.reasons


def test_widening_before_another_cast_is_skipped(run):
    text = "g (float16[3] x) => (int32[3] y) { w = Cast <to=1> (x) y = Cast <to=6> (w) }"
    ran = run(text, EliminateCastPairs(), {"x": np.array([1.5, -2.5, 700], np.float16)})
    assert ran.ops == ["Cast"] and ran.counts == {"shortened": 1}


def test_long_chain_in_one_run(run):
    text = """g (float16[3] x) => (float16[3] y) { a = Neg(x) b = Cast <to=1> (a) c = Cast <to=11> (b)
        d = Cast <to=1> (c)
        e = Cast <to=10> (d) y = Neg(e) }"""
    assert run(text, EliminateCastPairs(), {"x": np.ones(3, np.float16)}).ops == ["Neg", "Neg"]


def test_first_cast_stays_for_its_other_readers(run):
    text = """g (float16[3] x) => (float[3] z, float16[3] y) { w = Cast <to=1> (x) z = Exp(w) b = Cast <to=10>
        (w) y = Neg(b) }"""
    ran = run(text, EliminateCastPairs(), {"x": np.ones(3, np.float16)})
    assert ran.ops == ["Cast", "Exp", "Neg"]


def test_inner_cast_that_is_an_output_stays(run):
    text = "g (float16[3] x) => (float[3] w, float16[3] y) { w = Cast <to=1> (x) b = Cast <to=10> (w) y = Neg(b) }"
    assert run(text, EliminateCastPairs(), {"x": np.ones(3, np.float16)}).ops == ["Cast", "Neg"]


def test_output_that_equals_an_input_keeps_its_name(run):
    text = "g (float16[3] x) => (float16[3] y) { w = Cast <to=1> (x) y = Cast <to=10> (w) }"
    ran = run(text, EliminateCastPairs(), {"x": np.ones(3, np.float16)})
    assert ran.ops == ["Cast"] and ran.counts == {"shortened": 1}


def test_value_read_only_inside_a_branch(run):
    text = """g (float16[2] x, bool c) => (float16[2] y) {
        w = Cast <to=1> (x) b = Cast <to=10> (w)
        y = If (c) <then_branch = t () => (float16[2] p) { p = Neg(b) }, else_branch = e () => (float16[2] q)
        { q = Abs(b) }>
    }"""
    ran = run(text, EliminateCastPairs(), {"x": np.ones(2, np.float16), "c": np.array(True)})
    assert ran.ops == ["If"]


def test_unknown_dtype_is_refused(parse_model):
    model = parse_model(
        "g (float16[3] x) => (float16[3] y) { a = Neg(x) w = Cast <to=1> (a) b = Cast <to=10> (w) y = Neg(b) }"
    )
    model.graph[0].outputs[0].type = None
    assert "is not known" in EliminateCastPairs()(model).refusals[0].reason


EDGES = {
    kind: np.array(sorted({np.iinfo(kind).min, np.iinfo(kind).max, 0, 1, np.iinfo(kind).max - 1}), kind)
    for kind in ("uint8", "int8", "int16", "int32", "int64")
} | {
    "bool": np.array([False, True]),
    "float16": np.array([0.0, -0.0, 6e-8, 65504, 1.0009765625], np.float16),
    "float": np.array([0.0, 1e-45, 3.4e38, 16777217, 1.00000012], np.float32),
    "double": np.array([0.0, 5e-324, 1.7e308, 2.0**53 + 2, 1.0000000000000002]),
}


@pytest.mark.parametrize("start, middle", list(itertools.product(TYPES, TYPES)))
def test_widens_means_every_edge_value_survives(start, middle):
    source, target = ir.DataType(TYPES[start]), ir.DataType(TYPES[middle])
    with np.errstate(all="ignore"):
        there = EDGES[start].astype(target.numpy())
        back = there.astype(source.numpy())
    survives = np.array_equal(back, EDGES[start]) and (there.astype(object) == EDGES[start].astype(object)).all()
    assert widens(source, target) == survives
