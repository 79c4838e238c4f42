"""Padding of batches to few sizes: which dimensions, to which sizes, with which values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.errors import BatchError, InputError
from ortgraph.graph import TrainingGraph

POWERS = "powers of two"
Sizes = Sequence[int] | str


class Buckets:
    """Pads data inputs at the end of named dimensions, and cuts what comes back.

    Args:
        graph: With symbolic dimensions.
        buckets: Sizes by dimension: a list, or ``"powers of two"``.
        padding: The value to pad with, for each data input that has one of the dimensions.

    Raises:
        InputError: An unknown dimension or input, sizes that are none, a pad value that is missing or does not fit the
            input's dtype, or an input of which a bucketed dimension is only a part (``2*batch``).
    """

    def __init__(self, graph: TrainingGraph, buckets: Mapping[str, Sizes], padding: Mapping[str, Any]) -> None:
        values = {v.name: v for v in graph.graph.inputs}
        inputs = {n: values[n] for n in graph.signature.inputs}
        known = {d.value for v in inputs.values() for d in v.shape or () if isinstance(d, ir.SymbolicDim)}
        for name, sizes in buckets.items():
            if name not in known:
                named = ", ".join(sorted(str(k) for k in known)) or "none: capture with dynamic="
                raise InputError(
                    f"buckets= names the dimension {name!r}", f"the graph's symbolic dimensions are {named}"
                )
            _check_sizes(name, sizes)
        self._limits = size_limits(graph)
        self._sizes = {n: s if isinstance(s, str) else tuple(sorted(int(b) for b in s)) for n, s in buckets.items()}
        self._inputs = {n: v for n, v in inputs.items() if self._axes(n, v)}
        unknown = sorted(set(padding) - set(inputs))
        if unknown:
            raise InputError(f"padding= names {unknown[0]!r}", f"the graph's inputs are {', '.join(inputs)}")
        self._values = {n: _pad_value(n, v, padding) for n, v in self._inputs.items()}

    @property
    def dimensions(self) -> tuple[str, ...]:
        return tuple(self._sizes)

    def sizes(self, dims: Mapping[str, int]) -> dict[str, int]:
        """Sizes of a batch's dimensions after padding.

        Raises:
            BatchError: A size is above the largest bucket.
        """
        return {n: self._next(n, size) if n in self._sizes else size for n, size in dims.items()}

    def pad(self, arrays: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """The batch with its bucketed dimensions filled up to ``sizes``."""
        padded = dict(arrays)
        for name, value in self._inputs.items():
            array = arrays[name]
            shape = list(array.shape)
            for axis, dim in self._axes(name, value):
                shape[axis] = sizes[dim]
            if tuple(shape) == array.shape:
                continue
            padded[name] = np.full(shape, self._values[name], value.dtype.numpy())  # type: ignore[union-attr]
            padded[name][tuple(slice(n) for n in array.shape)] = array
        return padded

    def head(self, arrays: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """The first rows of a batch."""
        cut = dict(arrays)
        for name, value in self._inputs.items():
            for axis, dim in self._axes(name, value):
                cut[name] = cut[name][(slice(None),) * axis + (slice(sizes[dim]),)]
        return cut

    def rows(self) -> set[str]:
        """The bucketed dimensions that are the first axis wherever they are."""
        axes = [(dim, axis) for name, value in self._inputs.items() for axis, dim in self._axes(name, value)]
        return {dim for dim, _ in axes if all(axis == 0 for d, axis in axes if d == dim)}

    def limit(self, name: str) -> int | None:
        """The largest size that the module takes."""
        return self._limits.get(name)

    def cut(self, name: str, value: ir.Value, result: np.ndarray, dims: Mapping[str, int]) -> np.ndarray:
        """What belongs to the batch, of a result that was computed on the padded one.

        Args:
            name: For messages.
            value: The graph output, with symbolic dimensions.
            result: Its value.
            dims: The batch's sizes before padding.

        Raises:
            BatchError: Padding is spread all over a dimension (``batch*sequence``).
        """
        index = []
        for dim in value.shape or ():
            if isinstance(dim, int) or not {str(s) for s in dim.free_symbols()} & set(self._sizes):
                index.append(slice(None))
                continue
            if dim.value is None or dim.value not in dims:
                raise BatchError(
                    f"output {name!r} has the dimension {dim}, of which padding cannot be cut off",
                    "give batches whose sizes are in buckets=, or a session without buckets, when outputs are read",
                )
            index.append(slice(dims[dim.value]))
        return result[tuple(index)]

    def _axes(self, name: str, value: ir.Value) -> list[tuple[int, str]]:
        found = []
        for axis, dim in enumerate(value.shape or ()):
            if not isinstance(dim, ir.SymbolicDim):
                continue
            if dim.value in self._sizes:
                found.append((axis, str(dim.value)))
            elif {str(s) for s in dim.free_symbols()} & set(self._sizes):
                raise InputError(
                    f"input {name!r} has the dimension {dim}: where padding belongs is not known",
                    "leave its parts out of buckets=",
                )
        return found

    def _next(self, name: str, size: int) -> int:
        sizes, limit = self._sizes[name], self._limits.get(name)
        if isinstance(sizes, str):
            found = 1 << max(size - 1, 0).bit_length() if size else 0
            return found if limit is None or size > limit else min(found, limit)
        for bucket in sizes:
            if size <= bucket:
                return bucket
        raise BatchError(
            f"dimension {name!r} is {size}, the largest of buckets= is {sizes[-1]}", "add a bucket, or cut the batch"
        )


def size_limits(graph: TrainingGraph) -> dict[str, int]:
    """Largest size of each named dimension that the captured module takes; no entry: any."""
    try:
        return {str(n): int(s) for n, s in json.loads(graph.signature.metadata.get("limits", "{}")).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(f"the stored limits do not parse: {error}", "capture the graph again") from error


def _check_sizes(name: str, sizes: Sizes) -> None:
    if isinstance(sizes, str):
        fits = sizes == POWERS
    else:
        fits = bool(sizes) and all(isinstance(s, (int, np.integer)) and s > 0 for s in sizes)
    if not fits:
        raise InputError(f"buckets of {name!r} are {sizes!r}", f"a list of sizes, or {POWERS!r}")


def _pad_value(name: str, value: ir.Value, padding: Mapping[str, Any]) -> Any:
    """The pad value of one input, as its dtype."""
    if name not in padding:
        raise InputError(
            f"input {name!r} has a bucketed dimension and no pad value",
            f"padding={{{name!r}: ...}}: a token that the mask hides, 0 in a mask, the loss's ignore_index in labels",
        )
    assert value.dtype is not None
    dtype, given = value.dtype.numpy(), padding[name]
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            made = np.asarray(given).astype(dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"padding of input {name!r} is {given!r}: {error}", "give one number") from error
    if made.ndim or (dtype.kind in "iub" and made != given):
        raise InputError(f"padding of input {name!r} is {given!r}, the input's dtype {dtype}", "give one such number")
    return made
