"""Notes on the data inputs that PyTorch reads as indices, so that a batch can be refused as PyTorch refuses it.

Only what is read directly is noted: through views, slices, pads and casts. Indices that the module computes are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from ortgraph.capture.torch_dims import Dim
from ortgraph.capture.torch_translate import DTYPES, call_arguments
from ortgraph.graph.index_note import IndexNote, Step

# argument with the indices, argument with the rows, whether negative indices are legal
_READERS = {
    "embedding": ("indices", "weight", False),
    "index_select": ("index", "self", False),
    "gather": ("index", "self", False),
    "scatter_add": ("index", "self", False),
    "scatter": ("index", "self", False),
    "nll_loss_forward": ("target", "self", False),
    "nll_loss2d_forward": ("target", "self", False),
    "index": ("indices", "self", True),
    "_unsafe_index": ("indices", "self", True),
    "index_put": ("indices", "self", True),
}
_COPIES = {"clone", "alias", "detach", "lift_fresh_copy", "contiguous"}
_RESHAPES = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten"}
_LAYOUTS = {"t", "transpose", "permute"}


@dataclasses.dataclass(frozen=True)
class _Source:
    """A data input and the steps that made a value of it; ``loose`` when only its elements are known, not its layout."""

    input: str
    steps: tuple[Step, ...] = ()
    loose: bool = False

    def then(self, *step: Any) -> _Source:
        return dataclasses.replace(self, steps=(*self.steps, step))


def index_notes(nodes: Iterator[Node], inputs: Mapping[Node, str], dim_of: Callable[[Any], Dim]) -> Iterator[IndexNote]:
    """Notes of a traced graph.

    Args:
        nodes: All nodes, in order.
        inputs: The graph's name of each placeholder that holds a data input.
        dim_of: A size of the trace as a number or an expression of named dimensions.
    """
    sources = {node: _Source(name) for node, name in inputs.items()}
    for node in nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            continue
        name = str(target).removeprefix("aten.").split(".")[0]
        if name in _READERS:
            yield from _notes_of(node, name, sources, dim_of)
            continue
        first = node.args[0] if node.args else None
        made = _moved(node, name, sources[first]) if isinstance(first, Node) and first in sources else None
        if made is not None:
            sources[node] = made


def _notes_of(
    node: Node, name: str, sources: Mapping[Node, _Source], dim_of: Callable[[Any], Dim]
) -> Iterator[IndexNote]:
    argument, table, wraps = _READERS[name]
    given = call_arguments(node)
    if not isinstance(given.get("ignore_index"), int | None):
        return  # a symbolic size: what is legal differs from batch to batch
    shape = given[table].meta["val"].shape
    read = given[argument] if isinstance(given[argument], (list, tuple)) else [given[argument]]
    for axis, index in enumerate(read):
        if not isinstance(index, Node) or index not in sources or index.meta["val"].dtype == torch.bool:
            continue
        if name.startswith("nll_loss"):
            axis = min(1, len(shape) - 1)
        elif "dim" in given:
            axis = given["dim"]
        rows = dim_of(shape[axis]) if shape else 1
        source = sources[index]
        count = rows if isinstance(rows, int) else str(rows)
        reader = name.removesuffix("_forward").removeprefix("_unsafe_")
        yield IndexNote(source.input, reader, count, wraps, given.get("ignore_index"), source.steps)


def _moved(node: Node, name: str, source: _Source) -> _Source | None:
    """The source of what a data movement or a cast makes; None for other operators."""
    if name in _COPIES:
        return source
    if name == "_to_copy":
        return _cast(node, source)
    if name == "expand":
        return dataclasses.replace(source.then("reshape", None), loose=True)
    if name in _RESHAPES:
        sizes = [s if isinstance(s, int) else -1 for s in node.meta["val"].shape]
        known = sizes.count(-1) <= 1 and not source.loose and (0 not in sizes or -1 not in sizes)
        return dataclasses.replace(source.then("reshape", sizes if known else None), loose=not known)
    if source.loose:
        return source if name in _LAYOUTS else None
    return _picked(node, name, source)


def _cast(node: Node, source: _Source) -> _Source | None:
    dtype = node.meta["val"].dtype
    before = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
    if dtype == before:
        return source
    if dtype not in DTYPES or dtype == torch.bfloat16:
        return None
    return source.then("cast", str(dtype).removeprefix("torch."))


def _picked(node: Node, name: str, source: _Source) -> _Source | None:
    """Transposes, slices, single places and pads, where their numbers are static."""
    given = call_arguments(node)
    rank = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
    if name in _LAYOUTS:
        return source.then("transpose", _order(name, given, rank))
    if name == "slice":
        bounds = (given["start"], given["end"], given["step"])
        fixed = all(b is None or isinstance(b, int) for b in bounds)
        return source.then("slice", given["dim"] % rank, *bounds) if fixed else None
    if name == "select":
        return source.then("select", given["dim"] % rank, given["index"]) if isinstance(given["index"], int) else None
    if name == "constant_pad_nd":
        flat = given["pad"]
        if not all(isinstance(p, int) and p >= 0 for p in flat) or int(given["value"]) != given["value"]:
            return None
        pairs = [flat[i : i + 2] for i in range(0, len(flat), 2)]
        widths = [[0, 0]] * (rank - len(pairs)) + [list(p) for p in reversed(pairs)]
        return source.then("pad", widths, int(given["value"]))
    return None


def _order(name: str, given: Mapping[str, Any], rank: int) -> list[int]:
    if name == "permute":
        return [d % rank for d in given["dims"]]
    order = list(range(rank))
    if rank >= 2:
        a, b = (0, 1) if name == "t" else (given["dim0"] % rank, given["dim1"] % rank)
        order[a], order[b] = order[b], order[a]
    return order
