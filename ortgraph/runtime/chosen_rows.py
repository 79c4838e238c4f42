"""Which rows the programs of a batch compute: those without its padding, and the labelled ones of a head among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ortgraph.graph import TrainingGraph
from ortgraph.runtime.labelled_rows import label_note, prepare_labelled
from ortgraph.runtime.padded_rows import PaddingRows


@dataclasses.dataclass(frozen=True, order=True)
class Buffers:
    """Sizes of the buffers that hold a batch.

    Attributes:
        packed: Rows of the buffer without padding; 0: all rows are computed.
        labelled: Rows of the head's buffer; 0: all of those.
    """

    packed: int = 0
    labelled: int = 0

    def __bool__(self) -> bool:
        return bool(self.packed or self.labelled)


class ChosenRows:
    """The forms that an optimized graph keeps for ``remove-padding`` and ``select-labelled-rows``, as one choice.

    Args:
        graph: As its pipeline left it; one that was changed since has no forms.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self._graph = graph
        self.labels = label_note(graph)
        self.padding = PaddingRows.of(graph)

    def of(self, arrays: Mapping[str, np.ndarray], dims: Mapping[str, int]) -> Buffers:
        """The buffers for a batch.

        Args:
            arrays: Data inputs by name.
            dims: Size by name of every symbolic dimension.
        """
        packed = 0 if self.padding is None else self.padding.rows(arrays, dims)
        labelled = 0 if self.labels is None else self.labels.rows(arrays[self.labels.input], packed)
        return Buffers(packed, labelled)

    def prepare(self, buffers: Buffers, dims: Mapping[str, int], target: str) -> TrainingGraph | None:
        """The lowered graph for buffers, not both 0; None when the whole graph serves, from then on for every batch."""
        if buffers.packed and self.padding is not None:
            cut = self.padding.prepare(buffers.packed, buffers.labelled, dims, target)
            self.padding = self.padding if cut is not None else None
            return cut
        cut = prepare_labelled(self._graph, buffers.labelled, dims, target)
        self.labels = self.labels if cut is not None else None
        return cut
