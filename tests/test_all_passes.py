"""What holds for every registered pass: empty graph, idempotent, truthful, signature kept, spec round trip, doc, test."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import onnx_ir as ir
import pytest

from ortgraph.graph import Parameter, Signature, TrainingGraph
from ortgraph.graph.text import text_hash
from ortgraph.manager import GraphPass, PassManager, parse_pipeline, registry

ROOT = pathlib.Path(__file__).parent.parent
NAMES = sorted(registry.TABLE)
NEEDS_OPTIONS = {
    "bind-shapes": "bind-shapes{sizes=batch:2}",
    "select-recompute": "select-recompute{budget=1GB}",
}


def make(name: str) -> GraphPass:
    return parse_pipeline(NEEDS_OPTIONS.get(name, name))[0]


def at_stage(graph: TrainingGraph, p: GraphPass) -> TrainingGraph:
    """The graph as the pass wants it: lowered where it needs lowered operators."""
    if graph.stage not in p.stages:
        graph.signature = graph.signature.replace(stage=p.stages[0])
    return graph


def empty_graph() -> TrainingGraph:
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[])
    w = ir.val("w", dtype=ir.DataType.FLOAT, shape=[])
    w_grad = ir.node("Identity", [x], name="n")
    w_grad.outputs[0].name, w_grad.outputs[0].dtype, w_grad.outputs[0].shape = "w.grad", ir.DataType.FLOAT, ir.Shape([])
    loss = ir.node("Mul", [x, w], name="m")
    loss.outputs[0].name, loss.outputs[0].dtype, loss.outputs[0].shape = "loss", ir.DataType.FLOAT, ir.Shape([])
    graph = ir.Graph(
        [x, w], [loss.outputs[0], w_grad.outputs[0]], nodes=[w_grad, loss], opset_imports={"": 18}, name="tiny"
    )
    signature = Signature(loss="loss", inputs=("x",), parameters=(Parameter("w", gradient="w.grad"),))
    return TrainingGraph(ir.Model(graph, ir_version=10), signature)


@pytest.mark.parametrize("name", NAMES)
def test_class_is_as_promised(name):
    cls = registry.get(name)
    assert cls.name == name
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
    assert issubclass(cls, ir.passes.InPlacePass)
    assert (cls.__doc__ or "").strip() and not cls.__doc__.startswith(f"{cls.__name__}(")


@pytest.mark.parametrize("name", NAMES)
def test_text_round_trip(name):
    p = make(name)
    assert parse_pipeline(str(p)) == (p,)


@pytest.mark.parametrize("name", NAMES)
def test_one_pass_one_file_one_test(name):
    cls = registry.get(name)
    assert re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower() == name
    module = cls.__module__.removeprefix("ortgraph.").split(".")
    source = ROOT.joinpath(*module).with_suffix(".py")
    assert source.is_file()
    test = ROOT.joinpath("tests", *module[:-1], f"test_{module[-1]}.py")
    assert test.is_file(), f"{name} has no {test.relative_to(ROOT)}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", ["tiny", "linear"])
def test_idempotent_truthful_and_keeps_the_signature(name, source, linear_graph):
    p = make(name)
    graph = at_stage(empty_graph() if source == "tiny" else linear_graph, p)
    PassManager([p], verify="signature").run(graph)  # the manager holds modified and the signature to the truth
    if p.sets_stage is not None and p.sets_stage not in p.stages:
        return  # moves the graph where it may not run again
    digest = text_hash(graph)
    second = PassManager([p]).run(graph)
    if p.sets_stage is None:
        assert not second.passes[0].modified
    assert text_hash(graph) == digest
