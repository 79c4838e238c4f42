"""The example batch: which tensors go in under which names, and how to call the module with them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ortgraph.errors import InputError

TARGETS = ("target", "targets", "label", "labels")


@dataclasses.dataclass(frozen=True)
class Batch:
    """An example batch taken apart.

    Attributes:
        names: Name of each tensor, in the order of the batch.
        tensors: The example tensors.
        criterion: Whether one item is the target of a ``loss(output, target)`` and is kept from the module.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    criterion: bool
    _spec: Any
    _leaves: tuple[Any, ...]  # non-tensors; _TENSOR where a tensor goes
    _as_mapping: bool
    _withheld: tuple[Any, ...]  # keys or positions that the module does not get
    _target: Any

    def restore(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The batch with other tensors in it, in the structure that the user gave."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in self._leaves], self._spec)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Positional arguments, keyword arguments and target of the call."""
        batch = self.restore(tensors)
        target = None if self._target is None else batch[self._target]
        if self._as_mapping:
            return (), {k: v for k, v in batch.items() if k not in self._withheld}, target
        return tuple(v for i, v in enumerate(batch) if i not in self._withheld), {}, target


class _Tensor:
    """Stands in a flattened batch where a tensor goes."""


_TENSOR = _Tensor()


def read_batch(module: torch.nn.Module, batch: Any, criterion: bool, has_loss: bool) -> Batch:
    """Take an example batch apart.

    Args:
        module: Its ``forward`` names positional inputs.
        batch: A mapping (keyword arguments), a tuple or list (positional arguments) or one tensor. Values may be
            nested containers, NumPy arrays, numbers and None; tensors and arrays become graph inputs, others are fixed.
        criterion: The last item (of a mapping: ``target``, ``targets``, ``label`` or ``labels``) is the loss's target.
        has_loss: Items that ``forward`` does not take are kept for the loss.

    Raises:
        InputError: No tensor in the batch, an item that ``forward`` does not take, or no target.
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        batch = (batch,)
    mapping = isinstance(batch, Mapping)
    if not mapping and not isinstance(batch, (tuple, list)):
        raise InputError(f"example_batch is {type(batch).__name__}", "give a dict, a tuple or a tensor")
    items: Any = {str(k): _tensors(v) for k, v in batch.items()} if mapping else [_tensors(v) for v in batch]
    target = _target_of(items, mapping) if criterion else None
    parameters = inspect.signature(module.forward).parameters
    if mapping:
        withheld, labels = _keyword(module, items, parameters, target, has_loss)
    else:
        withheld, labels = _positional(module, items, parameters, target, has_loss)
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    leaves: list[Any] = []
    flat, spec = pytree.tree_flatten_with_path(items)
    for path, leaf in flat:
        if not isinstance(leaf, torch.Tensor):
            leaves.append(leaf)
            continue
        leaves.append(_TENSOR)
        tensors.append(leaf)
        names.append(_name(path, labels))
    if not tensors:
        raise InputError("the example batch holds no tensor", "give the tensors of one training step")
    return Batch(tuple(names), tuple(tensors), criterion, spec, tuple(leaves), mapping, withheld, target)


def _tensors(item: Any) -> Any:
    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return torch.from_numpy(np.ascontiguousarray(leaf))
        return leaf

    return pytree.tree_map(convert, item)


def _target_of(items: Any, mapping: bool) -> Any:
    if not mapping:
        if len(items) < 2:
            raise InputError("loss(output, target) needs a target, the batch has one item", "give (input, target)")
        return len(items) - 1
    found = [k for k in items if k in TARGETS]
    if len(found) != 1:
        raise InputError(
            f"loss(output, target) needs one target in the batch; it has {list(items)}",
            f"call it one of {', '.join(TARGETS)}",
        )
    return found[0]


def _keyword(
    module: torch.nn.Module,
    items: dict[str, Any],
    parameters: Mapping[str, inspect.Parameter],
    target: Any,
    has_loss: bool,
) -> tuple[tuple[Any, ...], dict[Any, str]]:
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    foreign = [k for k in items if k != target and k not in parameters and not anything]
    if foreign and not has_loss:
        raise InputError(
            f"{type(module).__name__}.forward() takes no {', '.join(foreign)}; it takes {', '.join(parameters)}",
            "leave it out of the batch, or give a loss that uses it",
        )
    withheld = (*foreign, *(() if target is None else (target,)))
    return withheld, {k: k for k in items}


def _positional(
    module: torch.nn.Module, items: list[Any], parameters: Mapping[str, inspect.Parameter], target: Any, has_loss: bool
) -> tuple[tuple[Any, ...], dict[Any, str]]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters.values() if p.kind in kinds]
    rest = next((p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    given = [i for i in range(len(items)) if i != target]
    labels: dict[Any, str] = {} if target is None else {target: "target"}
    withheld: list[Any] = [] if target is None else [target]
    for position, i in enumerate(given):
        if position < len(names):
            labels[i] = names[position]
        elif rest is not None:
            labels[i] = f"{rest}_{position - len(names)}"
        elif has_loss:
            labels[i] = f"batch_{i}"
            withheld.append(i)
        else:
            kind = type(module).__name__
            raise InputError(
                f"{kind}.forward() takes {len(names)} positional arguments, the batch gives {len(given)}",
                "leave some out, or give a loss that uses them, such as loss=torch.nn.CrossEntropyLoss()",
            )
    return tuple(withheld), labels


def _name(path: Sequence[Any], labels: Mapping[Any, str]) -> str:
    keys = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in path]
    return ".".join([labels[keys[0]], *map(str, keys[1:])])


def read_dynamic(batch: Batch, dynamic: Mapping[str, Any] | None) -> tuple[dict[int, str], ...]:
    """Per tensor of the batch the names of its symbolic dimensions.

    Raises:
        InputError: An unknown input, a dimension that it does not have, or a name that is no identifier.
    """
    if dynamic is not None and not isinstance(dynamic, Mapping):
        raise InputError(
            f"dynamic is {type(dynamic).__name__}, not a dict by input name",
            f"dynamic={{{batch.names[0]!r}: {{0: 'batch'}}}}",
        )
    found: list[dict[int, str]] = [{} for _ in batch.names]
    for name, axes in (dynamic or {}).items():
        if name not in batch.names:
            raise InputError(f"dynamic names {name!r}; the inputs are {', '.join(batch.names)}", "name one of these")
        i = batch.names.index(name)
        rank = batch.tensors[i].dim()
        pairs = axes.items() if isinstance(axes, Mapping) else enumerate(axes or ())
        for axis, dim in pairs:
            if dim is None:
                continue
            if not isinstance(axis, int) or not -rank <= axis < rank:
                raise InputError(f"dynamic[{name!r}] names dimension {axis}; the input has {rank}", "count from 0")
            if not isinstance(dim, str) or not dim.isidentifier():
                raise InputError(f"dynamic[{name!r}][{axis}] is {dim!r}", "give a name such as 'batch'")
            size = batch.tensors[i].shape[axis]
            if size < 2:
                raise InputError(
                    f"dynamic[{name!r}][{axis}] = {dim!r}, but the example has size {size} there",
                    "give an example batch of size 2 or more: PyTorch treats sizes 0 and 1 as constants",
                )
            found[i][axis % rank] = dim
    return tuple(found)
