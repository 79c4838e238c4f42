"""Programs without the rows of padding: which rows a batch needs, and the graph for a buffer of them."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from ortgraph.analysis.bind_shapes import bind_shapes, infer_unknown, is_dynamic
from ortgraph.errors import PlanError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.verify import verify
from ortgraph.runtime.labelled_rows import PADDING_KEY, kept_form, later_passes, stored_note
from ortgraph.runtime.prepare import FOLD, prepare, recorded_passes, run_passes

logger = logging.getLogger(__name__)
PASS = "remove-padding"
KEY = "rows without padding"  # stands beside the names of dimensions in the key of a program
# Sizes of buffers, in parts of all rows: on the average a sixteenth of the rows is computed in vain. Batches of shuffled
# texts vary by little, so that a training needs two or three.
PARTS = 8


@dataclasses.dataclass(frozen=True)
class PaddingNote:
    """Which rows are computed.

    Attributes:
        mask: The data input [batch, length] that is 1 for tokens and 0 for padding; "" while sizes are not known.
        positions: Positions that are read in every sequence, whatever its mask says.
        empty: Whether a sequence that is padding entirely is computed whole.
        labels: Data inputs with labels, and the label that does not count: a row with one that does is computed.
    """

    mask: str
    positions: tuple[int, ...] = ()
    empty: bool = False
    labels: tuple[tuple[str, int], ...] = ()

    def needed(self, arrays: Mapping[str, np.ndarray]) -> int | None:
        """How many rows a batch needs; None when its mask is none of zeros and ones."""
        mask = arrays[self.mask]
        on = mask == 1
        if not np.all(on | (mask == 0)):
            return None
        read = np.zeros(on.shape, np.bool_)
        read[:, list(self.positions)] = True
        for name, ignore in self.labels:
            read |= (arrays[name] != ignore).reshape(on.shape)
        whole = (read & ~on).any(axis=1)
        if self.empty:
            whole |= ~on.any(axis=1)
        return int(np.count_nonzero(on | whole[:, None]))

    def rows(self, arrays: Mapping[str, np.ndarray]) -> int:
        """Rows of the smallest buffer that holds a batch; 0 where the whole graph serves."""
        count, needed = arrays[self.mask].size, self.needed(arrays)
        part = -(-count // PARTS)
        fitting = (n * part for n in range(1, PARTS) if needed is not None and needed <= n * part < count)
        return next(fitting, 0)


class PaddingRows:
    """What a session asks about its graph's form for ``remove-padding``.

    Args:
        graph: As its pipeline left it, with a form.
        note: That was stored with it.
    """

    def __init__(self, graph: TrainingGraph, note: PaddingNote) -> None:
        self.graph = graph
        self._note = note
        self._notes: dict[tuple[tuple[str, int], ...], PaddingNote | None] = {}

    @staticmethod
    def of(graph: TrainingGraph) -> PaddingRows | None:
        """None when the graph has no form, or was changed since."""
        read = stored_note(graph, PADDING_KEY, PASS)
        return None if read is None else PaddingRows(graph, _note(read))

    def rows(self, arrays: Mapping[str, np.ndarray], dims: Mapping[str, int]) -> int:
        """Rows of the buffer for a batch; 0 where the whole graph serves."""
        note = self._note if self._note.mask else self._for_sizes(dims)
        return 0 if note is None else note.rows(arrays)

    def _for_sizes(self, dims: Mapping[str, int]) -> PaddingNote | None:
        """The note of a graph with symbolic sizes, which is known when they are."""
        key = tuple(sorted(dims.items()))
        if key not in self._notes:
            form = _bound(self.graph, dims)
            run_passes(form, str(_recorded(self.graph)))
            stored = form.model.metadata_props.get(PADDING_KEY)
            self._notes[key] = None if stored is None else _note(json.loads(stored))
        return self._notes[key]

    def prepare(self, rows: int, labelled: int, dims: Mapping[str, int], target: str) -> TrainingGraph | None:
        """The form with a buffer of ``rows`` rows, taken through what the graph's own pipeline did after it was kept.

        Args:
            rows: Rows of the buffer.
            labelled: Rows of the buffer for labelled rows among them, 0: all.
            dims: Size by name of every symbolic dimension.
            target: ``onnxruntime-training`` or ``onnxruntime``.

        Returns:
            A lowered graph with static shapes; None when the whole graph serves.
        """
        form = _bound(self.graph, dims)
        run_passes(form, str(dataclasses.replace(_recorded(self.graph), rows=rows)))
        try:
            run_passes(form, ",".join(later_passes(self.graph, target, PASS, labelled)))
        except PlanError as error:
            logger.info("rows without padding: the whole graph serves: %s", error)
            return None
        verify(form, "signature", by=PASS)
        return prepare(form, {}, target)


def _bound(graph: TrainingGraph, dims: Mapping[str, int]) -> TrainingGraph:
    form = kept_form(graph, PADDING_KEY)
    if is_dynamic(form):
        bind_shapes(form, dims)
        run_passes(form, FOLD)
        infer_unknown(form)
    return form


def _recorded(graph: TrainingGraph) -> Any:
    return next(p for p in recorded_passes(graph) if p.name == PASS)


def _note(read: Mapping[str, Any]) -> PaddingNote:
    labels = tuple((name, ignore) for name, ignore in read["labels"])
    return PaddingNote(read["mask"], tuple(read["positions"]), read["empty"], labels)
