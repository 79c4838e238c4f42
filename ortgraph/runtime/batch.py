"""What a user feeds: a dict or tuple of numpy arrays or torch tensors, checked against the graph's data inputs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ortgraph.errors import BatchError

Batch = Mapping[str, Any] | Sequence[Any]
# Casts that lose nothing. Anything else changes values or meaning without being asked.
_WIDENING = {
    ("i", "i"), ("u", "u"), ("u", "i"), ("b", "b"), ("f", "f"),
}  # fmt: skip


def to_numpy(name: str, item: Any) -> np.ndarray:
    """A numpy array (shared where possible) of an array, a torch tensor, a list or a number.

    Raises:
        BatchError: The item is none of these.
    """
    if isinstance(item, np.ndarray):
        return item
    if hasattr(item, "detach") and hasattr(item, "cpu"):
        item = item.detach().cpu()
        try:
            if str(item.dtype) == "torch.bfloat16":  # NumPy knows it by its bits only
                return item.view(importlib.import_module("torch").int16).numpy().view(ml_dtypes.bfloat16)
            return item.numpy()
        except (TypeError, RuntimeError) as error:
            raise BatchError(
                f"input {name!r}: the tensor has no numpy form ({error})", "pass float32, int64 or bool"
            ) from error
    array = np.asarray(item)
    if array.dtype == object:
        raise BatchError(
            f"input {name!r} is {type(item).__name__}, not a tensor", "pass a numpy array or a torch tensor"
        )
    return array


def named(batch: Batch, names: Sequence[str], given: Mapping[str, str] | None = None) -> dict[str, np.ndarray]:
    """The batch by input name. A tuple is taken in the order of the graph's inputs.

    Containers inside the batch are taken apart as at capture (``mask.0``); items that are None are left out.

    Args:
        names: The graph's data inputs.
        given: The user's name of an input that is called otherwise in the graph, by name in the graph.

    Raises:
        BatchError: Inputs are missing or unknown, or an item is no tensor.
    """
    given = {n: (given or {}).get(n, n) for n in names}
    asked = list(given.values())
    if not isinstance(batch, Mapping):
        items = list(batch) if isinstance(batch, (tuple, list)) else [batch]
        if len(items) != len(names):
            items = [leaf for _, leaf in _leaves("", items, ())]
        if len(items) != len(names):
            raise BatchError(
                f"the batch has {len(items)} items, the graph has {len(names)} inputs", f"give {_listed(asked)}"
            )
        batch = dict(zip(asked, items, strict=True))
    flat = dict(leaf for key, item in batch.items() for leaf in _leaves(str(key), item, asked))
    missing = [n for n in asked if n not in flat]
    extra = [n for n in flat if n not in asked]
    if missing or extra:
        parts = [f"no {_listed(missing)}"] * bool(missing) + [f"unknown {_listed(extra)}"] * bool(extra)
        raise BatchError(f"the batch does not fit the graph's inputs: {'; '.join(parts)}", f"give {_listed(asked)}")
    return {n: to_numpy(user, flat[user]) for n, user in given.items()}


def _leaves(name: str, item: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(name, item) of what a container holds, names joined by dots; None is no item."""
    if name in names or not isinstance(item, (Mapping, list, tuple)):
        if item is not None or name in names:
            yield name, item
        return
    for key, inner in item.items() if isinstance(item, Mapping) else enumerate(item):
        yield from _leaves(f"{name}.{key}" if name else str(key), inner, names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(n) for n in names)


def check_dtype(name: str, array: np.ndarray, want: np.dtype) -> None:
    """Raise BatchError unless the array has the dtype or one that converts to it without loss.

    int32 for an int64 input, float16 for float32 and the like are converted while they are copied. float64 for
    float32, int64 for int32, integers for floats and the reverse are errors.
    """
    have = array.dtype
    if have == want:
        return
    widening = (have.kind, want.kind) in _WIDENING and np.can_cast(have, want, casting="safe")
    if not widening:
        raise BatchError(
            f"input {name!r} has dtype {have}, the graph wants {want}",
            f"convert it yourself: .astype('{want}') of an array, .to(torch.{want}) of a tensor",
        )


def bind_dims(name: str, array: np.ndarray, value: ir.Value, dims: dict[str, int]) -> None:
    """Check the array's shape against the input's and add the sizes of its named dimensions to ``dims``.

    Raises:
        BatchError: The rank or a size differs, or a named dimension has two sizes.
    """
    shape = value.shape
    if shape is None:
        return
    if array.ndim != len(shape):
        raise BatchError(
            f"input {name!r} has shape {list(array.shape)}, the graph wants {_text(shape)}", "add or drop dimensions"
        )
    for axis, (have, want) in enumerate(zip(array.shape, shape, strict=True)):
        if isinstance(want, int):
            if have != want:
                raise BatchError(
                    f"input {name!r} has shape {list(array.shape)}, the graph wants {_text(shape)}",
                    "feed that shape, or name the dimension when the model is captured (dynamic=) or exported to ONNX",
                )
        elif want.value is not None and want.value.isidentifier() and dims.setdefault(want.value, have) != have:
            raise BatchError(
                f"dimension {want.value!r} is {have} in input {name!r} (axis {axis}) and {dims[want.value]} in another",
                "give inputs of one batch the same size",
            )


def check_bound(name: str, array: np.ndarray, value: ir.Value, dims: Mapping[str, int]) -> None:
    """Check the dimensions that are expressions (``2*batch``) once the named ones are known."""
    for have, want in zip(array.shape, value.shape or (), strict=False):
        size = want if isinstance(want, int) else want.evaluate(dims)
        if not isinstance(size, int):
            raise BatchError(
                f"input {name!r}: dimension {want} of {_text(value.shape)} cannot be told from the batch's shapes",
                "name the dimension (capture with dynamic=), or set its size with the pass bind-shapes",
            )
        if size != have:
            raise BatchError(
                f"input {name!r} has shape {list(array.shape)}, the graph wants {_text(value.shape)} with {dict(dims)}",
                "feed that shape",
            )


def check_limits(dims: Mapping[str, int], limits: Mapping[str, int]) -> None:
    """Raise BatchError for a dimension beyond what the captured module takes (its table of positions, for example)."""
    for name, limit in limits.items():
        if dims.get(name, 0) > limit:
            raise BatchError(
                f"dimension {name!r} is {dims[name]}, the module takes up to {limit}", "cut the batch along it"
            )


def _text(shape: ir.Shape | None) -> str:
    return "[" + ", ".join(str(d) for d in shape or ()) + "]"
