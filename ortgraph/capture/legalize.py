"""Legalising: from any valid forward model to one that ONNX Runtime's gradient builder differentiates rightly.

``normalize`` brings the model into the runtime's window without changing what it computes; ``legalize`` then rewrites
what lies on the data path. Some operators are shown to the builder as stand-ins; ``Legal.finish`` puts the final
operators in their place on the joint graph.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from ortgraph.capture import legalize_batch_norm, legalize_saved
from ortgraph.capture.data_path import (
    ZERO_GRADIENT,
    check_differentiable,
    data_path,
    reached_parameters,
    refuse_lost_gradients,
)
from ortgraph.capture.legalize_control import CONTROL_FLOW, inline_constant_ifs, inline_functions, refuse_control_flow
from ortgraph.capture.legalize_decompose import decompose
from ortgraph.capture.legalize_draws import uniform_draws
from ortgraph.capture.legalize_embedding import finish_embeddings
from ortgraph.capture.legalize_fused import expand_fused
from ortgraph.capture.legalize_outputs import refuse_read_statistics, slice_partial_splits
from ortgraph.capture.legalize_scatter import add_apart
from ortgraph.capture.legalize_sequences import split_directly
from ortgraph.capture.legalize_unary import stand_in
from ortgraph.capture.legalize_versions import convert_opset
from ortgraph.capture.onnx_joint import Joint
from ortgraph.capture.onnx_read import infer_forward, name_dimensions, name_nodes, read_weights_directly
from ortgraph.capture.onnx_roles import Roles
from ortgraph.capture.onnx_shapes import record_symbolic_shapes
from ortgraph.graph import Names, State

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Legal:
    """What legalising leaves for the steps after it.

    Attributes:
        loss: The loss, which a decomposition may have made anew.
        reaching: Trainable weights with a path to the loss.
        cut: Values through which no gradient flows.
        finishers: Run on the joint graph, in order: each puts final operators in the place of stand-ins.
        states: Random key and counter, when the model draws.
        buffer_updates: Per running statistic the output that updates it.
    """

    loss: ir.Value
    reaching: set[str]
    cut: list[ir.Value] = dataclasses.field(default_factory=list)
    finishers: list[Callable[[Joint], None]] = dataclasses.field(default_factory=list)
    states: list[State] = dataclasses.field(default_factory=list)
    buffer_updates: dict[str, str] = dataclasses.field(default_factory=dict)

    def finish(self, joint: Joint) -> None:
        for finisher in self.finishers:
            finisher(joint)


def normalize(
    model: ir.Model, opset: int | None, shapes: Mapping[str, Sequence[int | str]]
) -> tuple[ir.Model, set[str]]:
    """Inline functions and constant Ifs, pass over Identities of weights, convert the opset, name dimensions and nodes,
    take fused operators and sequences of parts apart.

    Returns:
        The model, and the names of the initializers that it came with (weights are among these).
    """
    inline_functions(model)
    name_dimensions(model.graph, shapes)
    infer_forward(model)
    inline_constant_ifs(model)
    read_weights_directly(model.graph)
    originals = set(model.graph.initializers)
    model = convert_opset(model, opset)
    infer_forward(model)
    name_nodes(model.graph)
    names = Names(model.graph)
    split_directly(model.graph, names)
    expand_fused(model.graph, names)
    infer_forward(model)
    record_symbolic_shapes(model)
    return model, originals


def legalize(model: ir.Model, loss: ir.Value, roles: Roles, names: Names, train_batch_norm: bool) -> Legal:
    """Rewrite the forward graph in place until every operator on the data path has a right gradient.

    Raises:
        UnsupportedError: Names the first operator that has none, with the reason.
    """
    graph = model.graph
    position = list(graph.outputs).index(loss)
    drawing = legalize_saved.training_dropouts(graph, names)
    uniform = uniform_draws(graph, names)
    if train_batch_norm:
        updates, finish_norms = legalize_batch_norm.train_statistics(graph, names)
    else:
        legalize_batch_norm.freeze_statistics(graph, names)
        updates, finish_norms = {}, lambda joint: None
    loss = graph.outputs[position]
    states, finish_dropouts = legalize_saved.finish_dropouts(graph, drawing, uniform, names)
    path = data_path(graph, loss, roles.trainable)
    refuse_control_flow(path)
    refuse_lost_gradients(graph, loss, roles.trainable)
    slice_partial_splits(path, loss, names)
    loss = graph.outputs[position]
    decompose([node for node in path if node.graph is graph], names)
    loss = graph.outputs[position]
    path = data_path(graph, loss, roles.trainable)
    if slice_partial_splits(path, loss, names):  # a first step of zeros does not read the forget gate
        loss = graph.outputs[position]
        path = data_path(graph, loss, roles.trainable)
    refuse_read_statistics(path)
    legalize_saved.complete_norms(path, names)
    legalize_saved.explicit_pads(path)
    legalize_saved.row_major_indices(path)
    if legalize_saved.separate_repeated_inputs(path, names):
        path = data_path(graph, loss, roles.trainable)
    finish_scatter = add_apart(path, names)
    path = data_path(graph, graph.outputs[position], roles.trainable)
    finish_unary = stand_in(path, names)
    legalize_saved.add_saved_outputs(graph, path, names)
    infer_forward(model)
    record_symbolic_shapes(model)
    check_differentiable(path)
    return Legal(
        loss=loss,
        reaching=reached_parameters(path, roles.trainable),
        cut=_cut(graph),
        finishers=[finish_scatter, finish_unary, finish_norms, finish_dropouts, finish_embeddings(graph, names)],
        states=states,
        buffer_updates=updates,
    )


def _cut(graph: ir.Graph) -> list[ir.Value]:
    """Outputs of operators with derivative zero, and of control flow off the data path."""
    hidden = ZERO_GRADIENT | CONTROL_FLOW
    return [o for node in graph if node.op_type in hidden and node.domain in ("", "ai.onnx") for o in node.outputs]
