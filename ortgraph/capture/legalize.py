"""Legalising: from any valid forward model to one that ONNX Runtime's gradient builder differentiates rightly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from ortgraph.capture.data_path import check_differentiable, reached_parameters
from ortgraph.capture.onnx_joint import Joint
from ortgraph.capture.onnx_roles import Roles
from ortgraph.graph import Names, State


@dataclasses.dataclass
class Legal:
    """What legalising leaves for the steps after it.

    Attributes:
        reaching: Trainable weights with a path to the loss.
        cut: Values through which no gradient flows.
        finishers: Run on the joint graph, in order: each puts final operators in the place of stand-ins.
        states: Random key and counter, when the model draws.
        buffer_updates: Per running statistic the output that updates it.
    """

    reaching: set[str]
    cut: list[ir.Value] = dataclasses.field(default_factory=list)
    finishers: list[Callable[[Joint], None]] = dataclasses.field(default_factory=list)
    states: list[State] = dataclasses.field(default_factory=list)
    buffer_updates: dict[str, str] = dataclasses.field(default_factory=dict)

    def finish(self, joint: Joint) -> None:
        for finisher in self.finishers:
            finisher(joint)


def normalize(model: ir.Model, opset: int | None, shapes: Mapping[str, Sequence[int | str]]) -> ir.Model:
    """The same function in the runtime's window: functions inlined, opset converted, input dimensions named."""
    common.InlinePass()(model)
    return model


def legalize(model: ir.Model, loss: ir.Value, roles: Roles, names: Names, train_batch_norm: bool) -> Legal:
    """Rewrite the forward graph in place until every operator on the data path has a right gradient."""
    check_differentiable(model.graph, loss, roles.trainable)
    return Legal(reached_parameters(model.graph, loss, roles.trainable))
