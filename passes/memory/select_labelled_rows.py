"""SelectLabelledRows: the head of a language model runs over the labelled rows alone."""

from __future__ import annotations

import dataclasses
import logging
from typing import ClassVar

import onnx_ir as ir

from ortgraph.analysis.bind_shapes import is_dynamic
from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.manager.rewrite import op_key
from ortgraph.ops.leading_rows import LeadingRows
from ortgraph.ops.loss import DEFAULT_IGNORE
from ortgraph.ops.shapes import attribute, given
from ortgraph.ops.spec import COMPOSITE
from ortgraph.passes.memory.label_source import label_source, needed_for
from ortgraph.passes.memory.labelled_head import Plan, Rewrite, find_plans, only_for_outputs
from ortgraph.passes.memory.loss_head import NotAHead
from ortgraph.passes.memory.sliced_loss import find_sliced, take_whole
from ortgraph.runtime.labelled_rows import LabelNote, keep_form

logger = logging.getLogger(__name__)
_LOSS = f"{COMPOSITE}.CrossEntropy"
_GRADIENT = f"{COMPOSITE}.CrossEntropyGrad"
_PRODUCTS = frozenset({"MatMul", "Gemm", "Product"})


@dataclasses.dataclass(frozen=True)
class SelectLabelledRows(GraphPass):
    """loss(f(X), labels) = loss(f(X[kept]), labels[kept]) and its gradient, kept: the rows with a label that counts.

    Rows whose label is ignore_index add nothing to the loss and nothing to any gradient. What is computed row by row
    between the last operator that mixes rows (attention) and the loss, forward and backward, needs the other rows only:
    decoder product, softmax and loss, the transform before them, the feed-forward block of the last layer.

    With ``rows`` the graph is rewritten for a buffer of that many rows: the labelled ones in order, then as many
    others as there is room for, which are ignored as before. A batch with more labelled rows than that gives a loss and
    gradients of NaN, never wrong ones. Model outputs (logits) are still computed whole by the programs that ask for
    them. Without ``rows``, as in the presets, the graph stays as it is, and its form before lowering is kept
    with it: a session counts the labels of each batch and derives programs for buffers of a few sizes.

    A value outside the labelled rows no longer takes part: where the full computation would multiply a zero gradient by
    an infinite activation of an ignored row and give NaN, this one does not.

    Refuses when:
        there is no single cross-entropy with its gradient, or its labels do not come from one data input by views,
        slices, pads with ignore_index and masks;
        the loss has one entry per row;
        rows or classes are symbolic and ``rows`` is given, or there are fewer rows than ``least_rows``;
        log-probabilities are read by anything but the gradient and model outputs;
        no matrix product would get smaller.

    Attributes:
        rows: Rows of the buffer; 0 keeps the form for a session.
        least_rows: Fewer rows than this are left alone.
    """

    name: ClassVar[str] = "select-labelled-rows"
    stages: ClassVar[tuple[str, ...]] = ("captured", "optimized", "cast", "stepped")

    rows: int = 0
    least_rows: int = 64

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        losses = [n for n in graph.graph if op_key(n) == _LOSS]
        if not losses:
            return changes
        try:
            if len(losses) > 1:
                raise NotAHead("the graph has several cross-entropies")
            counts = self._kept(graph, losses[0]) if not self.rows else self._cut(graph, losses[0], self.rows)
        except NotAHead as found:
            changes.refusals.append(Refusal(losses[0].name or "", str(found)))
            return changes
        changes.counts.update(counts)
        if not self.rows:
            reason = "left to sessions, which choose rows by the labels of each batch"
            changes.refusals.append(Refusal(losses[0].name or "", reason))
        return changes

    def _kept(self, graph: TrainingGraph, loss: ir.Node) -> dict[str, int]:
        """Keep the form. Where sizes are symbolic a session finds out for each of them what gets smaller."""
        gradient, ignore = _gradient(loss), attribute(loss, "ignore_index", DEFAULT_IGNORE)
        source = label_source(loss.inputs[1], ignore, graph)
        if not is_dynamic(graph):
            self._tried(graph, loss, gradient)
        keep_form(graph, LabelNote(source.name or "", ignore))
        return {}

    def _tried(self, graph: TrainingGraph, loss: ir.Node, gradient: ir.Node) -> None:
        """Raise the reason when a session's programs could not be made."""
        if find_sliced(loss, gradient) is None:
            self._plans(graph, loss, gradient)
            return
        trial = graph.clone()
        if "narrowed" not in self._cut(trial, next(n for n in trial.graph if op_key(n) == _LOSS), rows=1):
            raise NotAHead("no matrix product would get smaller")

    def _cut(self, graph: TrainingGraph, loss: ir.Node, rows: int) -> dict[str, int]:
        """Rewrite the graph for a buffer of ``rows`` rows."""
        gradient, ignore = _gradient(loss), attribute(loss, "ignore_index", DEFAULT_IGNORE)
        label_source(loss.inputs[1], ignore, graph)
        sliced = find_sliced(loss, gradient)
        everything, plans = self._plans(graph, loss, gradient) if sliced is None else (None, {})
        if rows >= self._rows(loss):
            raise NotAHead(f"a buffer of {rows} rows is no smaller than all {self._rows(loss)}")
        if sliced is not None:
            loss, gradient = take_whole(graph.graph, self.name, loss, gradient, sliced)
        if everything is None:
            try:
                everything, plans = self._plans(graph, loss, gradient)
            except NotAHead as found:
                logger.info("%s: %s", self.name, found)
                return {"unsliced": 1}
        labels = needed_for(loss.inputs[1])
        Rewrite(graph, self.name, everything, rows, loss, gradient, plans, labels).run()
        return {"narrowed": len(plans), "products": _products(plans), "unsliced": int(sliced is not None)}

    def _plans(self, graph: TrainingGraph, loss: ir.Node, gradient: ir.Node) -> tuple[LeadingRows, dict[ir.Node, Plan]]:
        """All rows, and what needs labelled ones only."""
        rows = LeadingRows(self._rows(loss))
        plans = find_plans(graph, loss, gradient, rows, needed_for(loss.inputs[1]))
        _check(graph, loss, gradient, plans)
        return rows, plans

    def _rows(self, loss: ir.Node) -> int:
        shape = static_shape(loss.inputs[0]) if loss.inputs[0] is not None else None
        target = static_shape(loss.inputs[1]) if loss.inputs[1] is not None else None
        if shape is None or target is None:
            raise NotAHead("rows and classes are not known: bind the symbolic dimensions first")
        if len(shape) != 2 or target != shape[:1]:
            raise NotAHead("the scores are not [rows, classes]")
        if shape[0] < self.least_rows:
            raise NotAHead(f"{shape[0]} rows, least_rows is {self.least_rows}")
        return shape[0]


def _gradient(loss: ir.Node) -> ir.Node:
    """The gradient of the loss, which reads the same labels."""
    log_prob = loss.outputs[1] if len(loss.outputs) > 1 else None
    found = [] if log_prob is None else [u.node for u in log_prob.uses() if op_key(u.node) == _GRADIENT]
    if len(found) != 1:
        raise NotAHead("the loss has no gradient" if not found else "the loss has more than one gradient")
    (node,) = found
    if attribute(loss, "reduction", "mean") in ("none", b"none"):
        raise NotAHead("the loss has one entry per row")
    same = ("reduction", "mean"), ("ignore_index", DEFAULT_IGNORE)
    if any(attribute(node, k, d) != attribute(loss, k, d) for k, d in same):
        raise NotAHead("the loss and its gradient are of different kinds")
    if node.inputs[2] is not loss.inputs[1] or given(node, 3) is not given(loss, 2):
        raise NotAHead("the loss and its gradient read different labels or weights")
    return node


def _check(graph: TrainingGraph, loss: ir.Node, gradient: ir.Node, plans: dict[ir.Node, Plan]) -> None:
    harmless = only_for_outputs(graph)
    log_prob = loss.outputs[1]
    if log_prob.is_graph_output() and log_prob.name not in graph.signature.outputs:
        raise NotAHead(f"the log-probabilities are graph output %{log_prob.name}")
    other = next((u.node for u in log_prob.uses() if u.node is not gradient and u.node not in harmless), None)
    if other is not None:
        raise NotAHead(f"the log-probabilities are also read by {other.op_type} {other.name!r}")
    if not _products(plans):
        raise NotAHead("no matrix product would get smaller")


def _products(plans: dict[ir.Node, Plan]) -> int:
    return sum(1 for n in plans if n.op_type in _PRODUCTS)
