from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from ortgraph.ops import spec
from ortgraph.passes.canonical.eliminate_dead_code import EliminateDeadCode

X = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}


def test_removes_a_dead_chain_and_keeps_inputs(run):
    ran = run("g (float[2,3] x, float[3] unused) => (float[2,3] y) { a = Neg(x) b = Exp(a) c = Abs(b) y = Neg(x) }",
              EliminateDeadCode(), X | {"unused": np.zeros(3, np.float32)})  # fmt: skip
    assert ran.ops == ["Neg"] and ran.counts == {"removed": 3}
    assert [v.name for v in ran.graph.graph.inputs] == ["x", "unused"]


def test_removes_dead_code_in_any_order(run, parse_model):
    model = parse_model("g (float[2] x) => (float[2] y) { a = Neg(x) b = Exp(a) y = Abs(x) }")
    a, b, y = model.graph
    model.graph.remove(a)
    model.graph.append(a)  # a graph out of order still loses all dead nodes at once
    ran = run(model, EliminateDeadCode())
    assert ran.ops == ["Abs"]


def test_removes_unused_initializers_uncounted(run):
    ran = run("g (float[2] x) => (float[2] y) <float[2] used = {1,2}, float[2] dead = {3,4}> { y = Add(x, used) }",
              EliminateDeadCode())  # fmt: skip
    assert list(ran.graph.graph.initializers) == ["used"] and ran.counts == {}


def test_keeps_values_that_only_a_branch_reads(run):
    text = """g (float[2] x, bool c) => (float[2] y) {
        kept = Neg(x)
        dead = Exp(x)
        y = If (c) <then_branch = t () => (float[2] p) { p = Abs(kept) },
                    else_branch = e () => (float[2] q) { q = Identity(x) }>
    }"""
    ran = run(text, EliminateDeadCode(), {"x": np.ones(2, np.float32), "c": np.array(True)})
    assert ran.ops == ["Neg", "If"]


def test_keeps_values_that_a_branch_returns_by_name(parse_model):
    text = """g (float[2] x, bool c) => (float[2] y) {
        kept = Neg(x)
        y = If (c) <then_branch = t () => (float[2] kept) {},
                    else_branch = e () => (float[2] q) { q = Identity(x) }>
    }"""
    model = parse_model(text, infer=False)
    assert not EliminateDeadCode()(model).modified


def test_removes_a_dead_if_with_what_only_its_branches_read(run):
    text = """g (float[2] x, bool c) => (float[2] y) {
        inside = Neg(x)
        z = If (c) <then_branch = t () => (float[2] p) { p = Abs(inside) },
                    else_branch = e () => (float[2] q) { q = Identity(inside) }>
        y = Abs(x)
    }"""
    ran = run(text, EliminateDeadCode(), {"x": np.ones(2, np.float32), "c": np.array(True)})
    assert ran.ops == ["Abs"] and ran.counts == {"removed": 2}


def test_trims_unread_optional_outputs_at_the_end(run):
    text = """g (float[2,3] x, float[3] s) => (float[2,3] y, float[2,1] m) {
        y, m, inv = LayerNormalization(x, s)
    }"""
    ran = run(text, EliminateDeadCode())
    assert ran.counts == {"trimmed": 1} and len(ran.node("LayerNormalization").outputs) == 2


def test_keeps_an_unread_optional_output_before_a_read_one(run):
    text = "g (float[2,3] x, float[3] s) => (float[2,3] y, float[2,1] i) { y, m, i = LayerNormalization(x, s) }"
    assert run(text, EliminateDeadCode()).counts == {}


def test_keeps_training_outputs_of_batch_norm(run):
    text = """g (float[2,3] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2,3] y) {
        y, rm, rv = BatchNormalization <training_mode=1> (x, s, b, m, v)
    }"""
    assert run(text, EliminateDeadCode()).counts == {}


def test_keeps_required_outputs(run):
    text = "g (float[4] x) => (float[2] a) { a, b = Split <num_outputs=2> (x) }"
    assert run(text, EliminateDeadCode()).counts == {}


def test_removes_unread_random_nodes(run):
    text = "g (float[2] x) => (float[2] y) { r = RandomNormalLike(x) d, m = Dropout(x) y = Neg(x) }"
    assert run(text, EliminateDeadCode()).ops == ["Neg"]


def test_keeps_unknown_operators_outside_the_standard(run, parse_model):
    text = """<ir_version: 9, opset_import: ["" : 18, "acme" : 1]>
    g (float[2] x) => (float[2] y) { z = acme.Accumulate(x) y = Neg(x) }"""
    ran = run(text, EliminateDeadCode())
    assert ran.ops == ["Accumulate", "Neg"]
    assert "acme.Accumulate is unknown" in ran.reasons


def test_keeps_operators_with_effects(run, monkeypatch):
    known = spec.OpSpec("acme", "Accumulate", effects=True)
    monkeypatch.setitem(spec._TABLE, ("acme", "Accumulate"), known)
    text = """<ir_version: 9, opset_import: ["" : 18, "acme" : 1]>
    g (float[2] x) => (float[2] y) { z = acme.Accumulate(x) y = Neg(x) }"""
    ran = run(text, EliminateDeadCode())
    assert "Accumulate" in ran.ops and "writes over an input" in ran.reasons
    monkeypatch.setitem(spec._TABLE, ("acme", "Accumulate"), dataclasses.replace(known, effects=False))
    assert run(text, EliminateDeadCode()).ops == ["Neg"]


def test_keeps_nodes_without_outputs(run, parse_model):
    model = parse_model("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    model.graph.append(ir.Node("", "Neg", [model.graph.inputs[0]], outputs=[]))
    outcome = EliminateDeadCode()(model)
    assert not outcome.modified and "works by an effect" in outcome.refusals[0].reason


def test_trims_listed_outputs_of_composites(run, monkeypatch):
    known = spec.lookup("ortgraph", "LayerNormGrad")
    monkeypatch.setitem(spec._TABLE, ("ortgraph", "LayerNormGrad"), dataclasses.replace(known, optional_outputs=(1, 2)))
    text = """<ir_version: 9, opset_import: ["" : 18, "ortgraph" : 1]>
    g (float[2,3] dy, float[2,3] x, float[2,1] m, float[2,1] i, float[3] s) => (float[2,3] dx) {
        dx, ds, db = ortgraph.LayerNormGrad <axis=-1> (dy, x, m, i, s)
    }"""
    assert run(text, EliminateDeadCode()).counts == {"trimmed": 2}


def test_empty_graph(run):
    assert run("g (float[2] x) => (float[2] x) {}", EliminateDeadCode()).counts == {}
