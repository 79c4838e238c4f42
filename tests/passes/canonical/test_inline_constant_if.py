from __future__ import annotations

import numpy as np
import pytest

from ortgraph.passes.canonical.inline_constant_if import InlineConstantIf

X = {"x": np.array([1, -2], np.float32)}
IF = """If (c) <then_branch = t () => (float[2] p) { p = Abs(a) }, else_branch = e () => (float[2] q)
        { k = Exp(a) q = Neg(k) }>"""


@pytest.mark.parametrize("value, ops", [(1, ["Neg", "Abs", "Exp"]), (0, ["Neg", "Exp", "Neg", "Exp"])])
def test_takes_the_right_branch(run, value, ops):
    text = f"g (float[2] x) => (float[2] y) <bool c = {{{value}}}> {{ a = Neg(x) b = {IF} y = Exp(b) }}"
    ran = run(text, InlineConstantIf(), X)
    assert ran.ops == ops and ran.counts == {"inlined": 1}


def test_output_keeps_its_name_and_equal_inner_names_do_not_clash(run):
    text = f"g (float[2] x) => (float[2] y, float[2] z) <bool c = {{0}}> {{ a = Neg(x) y = {IF} z = {IF} }}"
    ran = run(text, InlineConstantIf(), X)
    assert ran.ops == ["Neg", "Exp", "Neg", "Exp", "Neg"]
    names = [o.name for n in ran.graph.graph for o in n.outputs]
    assert len(set(names)) == len(names)


def test_nested(run):
    text = """g (float[2] x) => (float[2] y) <bool c = {1}> { a = Neg(x)
        y = If (c) <then_branch = t () => (float[2] p) {
              p = If (c) <then_branch = t2 () => (float[2] p2) { p2 = Abs(a) }, else_branch = e2 () =>
        (float[2] q2) { q2 = Exp(a) }> },
            else_branch = e () => (float[2] q) { q = Exp(a) }> }"""
    ran = run(text, InlineConstantIf(), X)
    assert ran.ops == ["Neg", "Abs"] and ran.counts == {"inlined": 2}


def test_branch_with_a_constant_of_its_own(run, parse_model):
    text = """g (float[2] x) => (float[2] y) <bool c = {1}> {
        y = If (c) <then_branch = t () => (float[2] p) <float[2] k = {3, 4}> { p = Add(x, k) },
            else_branch = e () => (float[2] q) { q = Exp(x) }> }"""
    ran = run(text, InlineConstantIf(), X)
    assert ran.ops == ["Add"] and len(ran.graph.graph.initializers) == 2


@pytest.mark.parametrize("inputs, computed", [("float[2] x, bool c", ""), ("float[2] x, bool d", "c = Not(d)")])
def test_dynamic_conditions_stay(run, inputs, computed):
    text = f"g ({inputs}) => (float[2] y) {{ a = Neg(x) {computed} y = {IF} }}"
    assert run(text, InlineConstantIf()).counts == {}


def test_branch_that_returns_an_outer_value_by_name_is_refused(parse_model):
    text = """g (float[2] x) => (float[2] y) <bool c = {1}> { a = Neg(x)
        y = If (c) <then_branch = t () => (float[2] a) {}, else_branch = e () => (float[2] q) { q = Exp(a) }> }"""
    outcome = InlineConstantIf()(parse_model(text, infer=False))
    assert not outcome.modified and "by name" in outcome.refusals[0].reason
