from __future__ import annotations

import itertools

import numpy as np
import pytest

from ortgraph.passes.canonical.simplify_transposes import SimplifyTransposes

X = {"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}
PERMS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("first, second", list(itertools.product(PERMS, PERMS)))
def test_every_pair_of_permutations(run, first, second):
    text = f"""g (float[A,B,C] x) => (float[D,E,F] y) {{ n = Neg(x) a = Transpose <perm={list(first)}> (n)
        b = Transpose <perm={list(second)}> (a) y = Exp(b) }}"""
    ran = run(text, SimplifyTransposes(), X)
    cancels = tuple(first[i] for i in second) == (0, 1, 2)
    assert ran.ops == (["Neg", "Exp"] if cancels else ["Neg", "Transpose", "Exp"])
    assert ran.counts == ({"cancelled": 1} if cancels else {"merged": 1})


def test_chain_of_three_and_default_order(run):
    text = (
        "g (float[A,B,C] x) => (float[D,E,F] y) { a = Transpose(x) b = Transpose <perm=[1,0,2]> (a) y = Transpose(b) }"
    )
    assert run(text, SimplifyTransposes(), X).ops == ["Transpose"]


def test_unknown_rank_without_perm_is_refused(parse_model):
    model = parse_model(
        "g (float[A,B] x) => (float[A,B] y) { n = Neg(x) a = Transpose(n) b = Transpose(a) y = Neg(b) }"
    )
    for node in model.graph:
        node.outputs[0].shape = None
    outcome = SimplifyTransposes()(model)
    assert not outcome.modified and "rank is unknown" in outcome.refusals[0].reason


def test_first_transpose_stays_for_its_other_readers(run):
    text = """g (float[2,3,4] x) => (float[4,3,2] z, float[2,3,4] y) { n = Neg(x) a = Transpose(n) z = Exp(a)
        b = Transpose(a) y = Exp(b) }"""
    assert run(text, SimplifyTransposes(), X).ops == ["Neg", "Transpose", "Exp", "Exp"]


def test_inner_value_that_is_an_output_stays(run):
    text = "g (float[2,3,4] x) => (float[4,3,2] a, float[2,3,4] y) { n = Neg(x) a = Transpose(n) y = Transpose(a) }"
    ran = run(text, SimplifyTransposes(), X)
    assert ran.ops == ["Neg", "Transpose"]


def test_output_that_equals_an_input_keeps_its_name(run):
    text = "g (float[2,3,4] x) => (float[2,3,4] y) { a = Transpose(x) y = Transpose(a) }"
    ran = run(text, SimplifyTransposes(), X)
    assert ran.counts == {} and "keeps its own name" in ran.reasons


def test_value_read_only_inside_a_branch(run):
    text = """g (float[2,3,4] x, bool c) => (float[2,3,4] y) {
        n = Neg(x) a = Transpose(n) b = Transpose(a)
        y = If (c) <then_branch = t () => (float[2,3,4] p) { p = Neg(b) }, else_branch = e () => (float[2,3,4]
        q) { q = Abs(b) }>
    }"""
    assert run(text, SimplifyTransposes(), X | {"c": np.array(True)}).ops == ["Neg", "If"]
