"""Running one canonical pass under the checks that every pass must survive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from ortgraph.graph import TrainingGraph
from ortgraph.graph.text import text_hash
from ortgraph.manager.base import GraphPass, Outcome


@dataclasses.dataclass
class Ran:
    """A graph after one pass."""

    graph: TrainingGraph
    outcome: Outcome

    @property
    def ops(self) -> list[str]:
        return [n.op_type for n in self.graph.graph]

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.outcome.counts)

    @property
    def reasons(self) -> str:
        return "\n".join(r.reason for r in self.outcome.refusals)

    def node(self, op_type: str) -> ir.Node:
        return next(n for n in self.graph.graph if n.op_type == op_type)


def parse(text: str, opset: int = 18, infer: bool = True) -> ir.Model:
    """A model from ONNX text: a graph, or a whole model; shapes inferred."""
    if not text.lstrip().startswith("<"):
        text = f'<ir_version: 9, opset_import: ["" : {opset}]>\n{text}'
    proto = onnx.parser.parse_model(text)
    if infer:
        proto = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    return ir.from_proto(proto)


def evaluate(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return ReferenceEvaluator(ir.to_proto(model)).run(None, dict(feeds))


def run_pass(
    source: str | ir.Model, one: GraphPass, feeds: Mapping[str, np.ndarray] | None = None, opset: int = 18
) -> Ran:
    """Run ``one`` and check that it told the truth, is idempotent, kept names, order and (with ``feeds``) numbers."""
    model = parse(source, opset) if isinstance(source, str) else source
    graph = TrainingGraph(model)
    before = evaluate(model, feeds) if feeds is not None else None
    names = [v.name for v in model.graph.inputs], [v.name for v in model.graph.outputs]
    old = text_hash(graph)
    outcome = one(model)
    assert isinstance(outcome, Outcome)
    new = text_hash(graph)
    assert outcome.modified == (old != new), (outcome.counts, graph.text())
    again = one(model)
    assert not again.modified, (again.counts, graph.text())
    assert text_hash(graph) == new
    assert names == ([v.name for v in model.graph.inputs], [v.name for v in model.graph.outputs])
    if all(n.domain == "" for n in model.graph):
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
    if before is not None:
        for a, b in zip(before, evaluate(model, feeds), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    return Ran(graph, outcome)


@pytest.fixture
def run() -> Callable[..., Ran]:
    return run_pass


@pytest.fixture
def parse_model() -> Callable[..., ir.Model]:
    return parse
