"""RemovePadding: what works token by token runs over the tokens that are no padding."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ortgraph.analysis.bind_shapes import is_dynamic
from ortgraph.graph import TrainingGraph
from ortgraph.manager.base import Changes, GraphPass, Refusal
from ortgraph.passes.memory.loss_head import NotAHead
from ortgraph.passes.memory.pack_rows import PackRows
from ortgraph.passes.memory.padded_rows import Padding, find_padding
from ortgraph.runtime.labelled_rows import PADDING_KEY, REFUSED_KEY, keep_form, without_outputs
from ortgraph.runtime.padded_rows import PaddingNote


@dataclasses.dataclass(frozen=True)
class RemovePadding(GraphPass):
    """f(X)[tokens] = f(X[tokens]) and its gradient, tokens: the rows of [batch, sequence] where the mask is 1.

    Linear layers, norms, activations, dropout, residuals and embeddings run over packed rows, forward and backward.
    Attention stays whole: queries, keys and values are put back among zeros before it, and its result is packed again.

    It rests on what the graph says. The bias of attention scores is evaluated for both values of each element of the mask:
    keys where it is 0 must get at most half of float32's least number, and where it is 1 about nothing. Then their
    probability is exactly 0, and so is the gradient of these keys and values. Gradients of the other rows of padding must be
    zero where they begin: labels that a loss ignores, slices of fixed positions (the first token), products with the mask.
    A sequence in which a row of padding is read all the same (by a label, at such a position) is kept whole.

    With ``rows`` the graph is rewritten for a buffer of that many rows: tokens in order, then as much padding as there is
    room for. A batch with more, or with a mask of other numbers than 0 and 1, gives a loss and gradients of NaN, never
    wrong ones. Without ``rows`` the graph stays as it is, and its form before lowering is kept with it: a session counts the
    tokens of each batch and derives programs for buffers of a few sizes.

    A packed ``Dropout`` draws with its own number for the rows of the buffer: the same key, step and batch give the same
    masks, which are others than those of the whole graph. Attention drops out what it drops out there.

    A row of padding no longer takes part: where the full computation would multiply a zero by an infinite value of such a
    row and give NaN, this one does not.

    Refuses when:
        no attention is masked by a data input [batch, sequence] of integers or booleans as said above;
        no matrix product can leave out rows: what reads them is named (a mean without the mask, shifted labels). A model
        output that shows padding keeps the forward half whole, not the backward half; a session's programs have none;
        there are fewer rows than ``least_rows``, or sizes are symbolic and ``rows`` is given;
        the backward half starts from more than the loss.

    Attributes:
        rows: Rows of the buffer; 0 keeps the form for a session.
        mask: The data input that is 1 for tokens; empty: the one that masks most attentions.
        least_rows: Fewer rows than this are left alone.
    """

    name: ClassVar[str] = "remove-padding"
    stages: ClassVar[tuple[str, ...]] = ("captured", "optimized", "cast", "stepped")

    rows: int = 0
    mask: str = ""
    least_rows: int = 64

    def run(self, graph: TrainingGraph) -> Changes:
        changes = Changes()
        try:
            if self.rows:
                changes.counts.update(self._packed(graph))
            else:
                self._keep(graph)
                changes.refusals.append(Refusal("", "left to sessions, which choose rows by the mask of each batch"))
        except NotAHead as found:
            changes.refusals.append(Refusal("", str(found)))
            graph.model.metadata_props[REFUSED_KEY] = str(found)
        return changes

    def _keep(self, graph: TrainingGraph) -> None:
        """Keep the form. Where sizes are symbolic a session finds out for each of them what can be left out."""
        if is_dynamic(graph):
            keep_form(graph, PaddingNote(""), PADDING_KEY)
            return
        padding = self._found(without_outputs(graph))  # as a session's programs
        labels = tuple(sorted({(x.source.name or "", x.ignore) for x in padding.labels.values()}))
        note = PaddingNote(padding.mask.name or "", tuple(sorted(padding.positions)), padding.empty, labels)
        keep_form(graph, note, PADDING_KEY)

    def _packed(self, graph: TrainingGraph) -> dict[str, int]:
        if is_dynamic(graph):
            raise NotAHead("sizes are not known: bind the symbolic dimensions first")
        padding = self._found(graph)
        if self.rows >= padding.rows.count:
            raise NotAHead(f"a buffer of {self.rows} rows is no smaller than all {padding.rows.count}")
        PackRows(graph, self.name, padding, self.rows).run()
        return {"packed": len(padding.plans), "products": padding.products}

    def _found(self, graph: TrainingGraph) -> Padding:
        padding = find_padding(graph, self.mask)
        if padding.rows.count < self.least_rows:
            raise NotAHead(f"{padding.rows.count} rows, least_rows is {self.least_rows}")
        return padding
