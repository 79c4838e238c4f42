"""Which data inputs of a captured step are used as indices, and the range that PyTorch accepts there.

ONNX counts a negative index from the end, where PyTorch's embedding, gather and losses raise: a batch is checked
against these notes before it runs. They are kept in the signature's metadata under ``KEY``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ortgraph.errors import SignatureError

KEY = "index_inputs"
Step = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class IndexNote:
    """One use of a data input as indices.

    Attributes:
        input: The data input.
        reader: The operator that reads it (``embedding``), for messages.
        rows: Number of rows that it indexes: a number, or an expression in named dimensions.
        wraps: Whether negative indices down to -rows are legal, as in ``x[index]``.
        ignored: A value that is skipped whatever the range (``ignore_index``).
        steps: How the indices are made of the input, outermost last: ``("reshape", sizes)`` (sizes None: only the
            elements matter from here on), ``("transpose", order)``, ``("slice", axis, start, stop, step)``,
            ``("select", axis, index)``, ``("pad", widths, value)``, ``("cast", dtype)``.
    """

    input: str
    reader: str
    rows: int | str
    wraps: bool = False
    ignored: int | None = None
    steps: tuple[Step, ...] = ()

    def indices(self, array: np.ndarray) -> np.ndarray:
        """The elements of an input's array that serve as indices."""
        for kind, *details in self.steps:
            array = _STEPS[kind](array, *details)
        return array

    def places(self, array: np.ndarray) -> np.ndarray:
        """Where each element of ``indices`` stands in the flattened input; -1 for what a pad added."""
        place = np.arange(array.size).reshape(array.shape)
        for kind, *details in self.steps:
            if kind == "pad":
                place = np.pad(place, details[0], constant_values=-1)
            elif kind != "cast":
                place = _STEPS[kind](place, *details)
        return place


def _slice(array: np.ndarray, axis: int, start: int | None, stop: int | None, step: int) -> np.ndarray:
    return array[(slice(None),) * axis + (slice(start, stop, step),)]


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a NaN becomes the smallest integer, which is out of range
        return array.astype(dtype)


_STEPS: dict[str, Callable[..., np.ndarray]] = {
    "reshape": lambda array, sizes: array.reshape(-1 if sizes is None else sizes),
    "transpose": lambda array, order: array.transpose(order),
    "slice": _slice,
    "select": lambda array, axis, index: array.take(index, axis),
    "pad": lambda array, widths, value: np.pad(array, widths, constant_values=value),
    "cast": _cast,
}


def to_metadata(notes: Iterable[IndexNote]) -> dict[str, str]:
    """The metadata entry; none without notes."""
    rows = dict.fromkeys(json.dumps(dataclasses.asdict(n), separators=(",", ":")) for n in notes)
    return {KEY: f"[{','.join(rows)}]"} if rows else {}


def from_metadata(metadata: Mapping[str, str]) -> tuple[IndexNote, ...]:
    """Read the notes of a signature.

    Raises:
        SignatureError: The entry does not parse.
    """
    try:
        rows = json.loads(metadata.get(KEY, "[]"))
        return tuple(IndexNote(**{**row, "steps": tuple(tuple(s) for s in row["steps"])}) for row in rows)
    except (ValueError, TypeError, KeyError) as error:
        raise SignatureError(f"the stored {KEY} does not parse: {error}", "capture the graph again") from error
