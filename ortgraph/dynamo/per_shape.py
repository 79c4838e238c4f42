"""Graphs with symbolic sizes: compiled anew for each set of sizes that comes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)
MAX_SHAPES = 8  # functions that are kept; the one unused for longest goes first


def is_symbolic(inputs: Sequence[Any]) -> bool:
    """Whether an input is a symbolic number, or a tensor with a symbolic size."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    sizes = [s for x in inputs if isinstance(x, torch.Tensor) for s in (*x.shape, *x.stride())]
    return any(isinstance(x, numbers) for x in (*inputs, *sizes))


class PerShape:
    """A function of a graph with symbolic sizes.

    A memory plan needs numbers, and so do most choices of kernels; PyTorch's dynamic shapes save the guards only.

    Args:
        make: Compiles the graph for given arguments.
    """

    def __init__(self, make: Callable[[Sequence[Any]], Callable[..., Any]]) -> None:
        self._make = make
        self._functions: OrderedDict[tuple[Any, ...], Callable[..., Any]] = OrderedDict()

    def __call__(self, *args: Any) -> Any:
        """Run on arguments of any sizes."""
        key = tuple(_layout(a) for a in args)
        found = self._functions.get(key)
        if found is None:
            logger.info("compiling for sizes %s", key)
            found = self._functions[key] = self._make(args)
            if len(self._functions) > MAX_SHAPES:
                self._functions.popitem(last=False)
        self._functions.move_to_end(key)
        return found(*args)


def _layout(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    return tuple(argument.shape), argument.stride(), argument.requires_grad
