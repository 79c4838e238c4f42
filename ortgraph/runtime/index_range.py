"""Indices in a batch that PyTorch would refuse and ONNX would count from the end, refused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ortgraph.errors import BatchError
from ortgraph.graph.index_note import IndexNote

_HINTS = {
    "embedding": "token ids count from 0 and end below the size of the table: look at the tokenizer and the padding",
    "nll_loss": "class indices count from 0; give ignored places the loss's ignore_index",
}


def check_indices(note: IndexNote, array: np.ndarray, dims: Mapping[str, int], called: str) -> None:
    """Raise BatchError unless every index is in the range that the captured module accepts.

    Args:
        note: What the input is used for.
        array: The input.
        dims: Sizes of the named dimensions.
        called: The user's name of the input.
    """
    used = note.indices(array)
    if not used.size:
        return
    rows = note.rows if isinstance(note.rows, int) else ir.SymbolicDim(note.rows).evaluate(dims)
    if not isinstance(rows, int):
        return
    low = -rows if note.wraps else 0
    if note.ignored is None and used.min() >= low and used.max() < rows:
        return
    wrong = (used < low) | (used >= rows)
    if note.ignored is not None:
        wrong &= used != note.ignored
    if not wrong.any():
        return
    at = int(np.flatnonzero(wrong)[0])
    raise BatchError(_message(note, array, int(note.places(array).flat[at]), rows, called), _hint(note))


def _message(note: IndexNote, array: np.ndarray, place: int, rows: int, called: str) -> str:
    low = -rows if note.wraps else 0
    besides = f" or {note.ignored} (ignored)" if note.ignored is not None else ""
    legal = f"{note.reader} takes {low} to {rows - 1}{besides}"
    if place < 0:
        return f"input {called!r}: the module's own padding is no legal index: {legal}"
    where = [int(i) for i in np.unravel_index(place, array.shape)]
    return f"input {called!r} has {array[tuple(where)]} at {where}: {legal}"


def _hint(note: IndexNote) -> str:
    return _HINTS.get(note.reader.removesuffix("2d"), "correct the index; PyTorch refuses it too")
