"""The framework is tested with passes that misbehave."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir
import pytest

from ortgraph.errors import PassError, VerificationError
from ortgraph.graph import TrainingGraph
from ortgraph.manager import Changes, GraphPass, PassManager
from ortgraph.manager.instruments import Reproducer, TextDump
from ortgraph.ops.builder import Builder


def node_of(graph: TrainingGraph, op_type: str) -> ir.Node:
    return next(n for n in graph.graph if n.op_type == op_type)


@dataclasses.dataclass(frozen=True)
class Misbehave(GraphPass):
    name: ClassVar[str] = "misbehave"
    how: str = ""

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        getattr(self, "_" + self.how)(graph, changes)
        return changes

    def _lie_about_change(self, graph, changes):
        node_of(graph, "Mul").replace_input_with(0, graph.graph.inputs[0])

    def _claim_change(self, graph, changes):
        changes.counts["fused"] = 3

    def _drop_gradient(self, graph, changes):
        del graph.graph.outputs[1]
        changes.counts["dropped"] = 1

    def _rename_output(self, graph, changes):
        graph.graph.outputs[1].name = "renamed"
        changes.counts["renamed"] = 1

    def _break_order(self, graph, changes):
        node = node_of(graph, "MatMul")
        last = list(graph.graph)[-1]
        graph.graph.remove(node)
        graph.graph.insert_after(last, node)
        changes.counts["moved"] = 1

    def _raise(self, graph, changes):
        raise KeyError("oops")

    def _bake_parameter(self, graph, changes):
        node = node_of(graph, "Add")
        build = Builder(graph.graph, self.name, before=node)
        node.replace_input_with(1, build.const([0.0, 0.0], ir.DataType.FLOAT))
        changes.counts["baked"] = 1

    def _merge_parameters(self, graph, changes):
        # The same effect as merging equal initializers: b is read nowhere any more.
        node = node_of(graph, "Add")
        node.replace_input_with(1, node.inputs[0])
        changes.counts["merged"] = 1

    def _make_constant(self, graph, changes):
        value = next(v for v in graph.graph.inputs if v.name == "b")
        graph.graph.inputs.remove(value)
        value.const_value = ir.tensor([0.0, 0.0], dtype=ir.DataType.FLOAT, name="b")
        graph.graph.register_initializer(value)
        changes.counts["constants"] = 1

    def _forget_signature(self, graph, changes):
        graph.model.metadata_props.clear()
        changes.counts["cleared"] = 1

    def _change_signature(self, graph, changes):
        graph.signature = graph.signature.replace(metadata={"x": "y"})


CASES = {
    "lie_about_change": (PassError, "says that it did not"),
    "claim_change": (PassError, "did not"),
    "drop_gradient": (VerificationError, "w.grad of the signature is missing"),
    "rename_output": (VerificationError, "w.grad of the signature is missing"),
    "break_order": (VerificationError, "read before it is defined"),
    "raise": (PassError, "raised KeyError"),
    "bake_parameter": (VerificationError, "%b no longer reaches any output"),
    "merge_parameters": (VerificationError, "%b no longer reaches any output"),
    "make_constant": (VerificationError, "%b"),
    "forget_signature": (PassError, "removed the signature"),
    "change_signature": (VerificationError, "signature-is-kept"),
}


@pytest.mark.parametrize("how", sorted(CASES))
def test_misbehaving_pass_is_caught_by_name(linear_graph, how):
    error, words = CASES[how]
    with pytest.raises(error) as caught:
        PassManager([Misbehave(how=how)]).run(linear_graph)
    assert words in str(caught.value)
    assert "misbehave" in str(caught.value)


def test_error_shows_few_lines_of_the_place(linear_graph):
    with pytest.raises(VerificationError) as caught:
        PassManager([Misbehave(how="break_order")]).run(linear_graph)
    lines = str(caught.value).splitlines()
    assert any(line.startswith("> ") for line in lines)
    assert len(lines) <= 11


@dataclasses.dataclass(frozen=True)
class SwapMul(GraphPass):
    """Swaps operands of the first Mul that has different ones."""

    name: ClassVar[str] = "swap-mul"
    stages: ClassVar[tuple[str, ...]] = ("captured",)

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        for node in graph.graph:
            if node.op_type == "Mul" and node.inputs[0] is not node.inputs[1]:
                a, b = node.inputs
                node.replace_input_with(0, b)
                node.replace_input_with(1, a)
                changes.counts["swapped"] += 1
                break
        return changes


def test_records_tell_the_truth(linear_graph):
    report = PassManager([SwapMul()]).run(linear_graph)
    record = report.passes[0]
    assert record.modified and record.counts == {"swapped": 1} and record.seconds > 0
    assert report.nodes_before == report.nodes_after == linear_graph.node_count()


def test_wrong_stage(linear_graph):
    linear_graph.signature = linear_graph.signature.replace(stage="lowered")
    with pytest.raises(PassError, match="runs at stage captured, the graph is lowered"):
        PassManager([SwapMul()]).run(linear_graph)


def test_passes_after_stage(linear_graph):
    report = PassManager([], passes_after={"captured": [SwapMul()]}).run(linear_graph)
    assert [p.name for p in report.passes] == ["swap-mul"]
    with pytest.raises(PassError, match="unknown stage"):
        PassManager([], passes_after={"nowhere": [SwapMul()]}).run(linear_graph)


def test_foreign_pass_runs_and_is_held_to_the_truth(linear_graph):
    import onnx_ir.passes.common as common

    report = PassManager([common.TopologicalSortPass(), common.RemoveUnusedNodesPass()]).run(linear_graph)
    assert [p.modified for p in report.passes] == [False, False]


class MergeInputs(ir.passes.InPlacePass):
    """A foreign pass that lets every reader of one parameter read another."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        w = next(v for v in model.graph.inputs if v.name == "w")
        b = next(v for v in model.graph.inputs if v.name == "b")
        for use in tuple(b.uses()):
            use.node.replace_input_with(use.idx, w)
        return ir.passes.PassResult(model, True)


class MergeDropouts(ir.passes.InPlacePass):
    """A foreign CSE that is blind to randomness."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        first, second = [n for n in model.graph if n.op_type == "Dropout"]
        for use in tuple(second.outputs[0].uses()):
            use.node.replace_input_with(use.idx, first.outputs[0])
        model.graph.remove(second, safe=True)
        return ir.passes.PassResult(model, True)


def test_foreign_pass_that_merges_parameters_is_caught(linear_graph):
    with pytest.raises(VerificationError, match="inputs-keep-their-effect.*MergeInputs.*%b"):
        PassManager([MergeInputs()]).run(linear_graph)


@pytest.mark.parametrize(
    ("domain", "stage"),
    [("", "captured"), ("ortgraph", "captured"), ("ortgraph.kernels", "lowered"), ("ortgraph.kernels", "planned")],
)
def test_foreign_pass_that_merges_dropouts_is_caught(linear_graph, domain, stage):
    linear_graph.signature = linear_graph.signature.replace(stage=stage)
    g = linear_graph.graph
    add = node_of(linear_graph, "Add")
    build = Builder(g, "capture", before=add)
    x = add.inputs[0]
    if domain:
        key = build.const(1, ir.DataType.INT64)
        drops = [build.multi("Dropout", x, key, key, outputs=2, domain=domain, ratio=0.5, node=i)[0] for i in (0, 1)]
    else:
        ratio, training = build.const(0.5, ir.DataType.FLOAT), build.const(True, ir.DataType.BOOL)
        drops = [build.multi("Dropout", x, ratio, training, outputs=2)[0] for _ in (0, 1)]
    both = build.op("Add", *drops)
    add.replace_input_with(0, both)
    both.shape = x.shape
    with pytest.raises(VerificationError, match="random-nodes-are-kept.*MergeDropouts"):
        PassManager([MergeDropouts()]).run(linear_graph)


def test_reproducer_and_dump(linear_graph, tmp_path):
    with pytest.raises(VerificationError):
        PassManager(
            [SwapMul(), Misbehave(how="drop_gradient")],
            instruments=[Reproducer(tmp_path / "r"), TextDump(tmp_path / "d")],
        ).run(linear_graph)
    assert (tmp_path / "r" / "before.onnx").is_file()
    assert "misbehave{how=drop_gradient}" in (tmp_path / "r" / "reproduce.txt").read_text()
    assert [p.name for p in sorted((tmp_path / "d").iterdir())] == ["01-swap-mul.txt"]


def test_garbage_collector_is_left_as_it_was(linear_graph):
    import gc

    assert gc.isenabled()
    with pytest.raises(PassError):
        PassManager([Misbehave(how="raise")]).run(linear_graph)
    assert gc.isenabled()
