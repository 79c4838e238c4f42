"""Graphs with symbolic sizes or numbers: compiled anew for each set of them that comes."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

logger = logging.getLogger(__name__)
MAX_SHAPES = 8  # functions that are kept; the one unused for longest goes first


def is_symbolic(inputs: Sequence[Any]) -> bool:
    """Whether an input is a symbolic number, or a tensor with a symbolic size."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    sizes = [s for x in inputs if isinstance(x, torch.Tensor) for s in (*x.shape, *x.stride())]
    return any(isinstance(x, numbers) for x in (*inputs, *sizes))


def numbers_in(graph_module: torch.fx.GraphModule) -> tuple[int, ...]:
    """Inputs that stand for a Python number, which Dynamo passes as a tensor when it has seen several values."""
    inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    return tuple(i for i, n in enumerate(inputs) if any(_reads_number(u) for u in n.users))


def with_numbers(graph_module: torch.fx.GraphModule, args: Sequence[Any], at: Sequence[int]) -> torch.fx.GraphModule:
    """The graph with the numbers that some inputs stand for written into it."""
    if not at:
        return graph_module
    graph = copy.deepcopy(graph_module.graph)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    for i in at:
        value = args[i].item()
        for reader in [u for u in inputs[i].users if _reads_number(u)]:
            for user in list(reader.users):
                user.args, user.kwargs = (_replaced(x, reader, value) for x in (user.args, user.kwargs))
            graph.erase_node(reader)
    made = torch.fx.GraphModule(graph_module, graph)
    made.meta.update(graph_module.meta)
    return made


def _replaced(arguments: Any, node: torch.fx.Node, value: float) -> Any:
    return torch.fx.map_arg(arguments, lambda n: value if n is node else n)


def _reads_number(node: torch.fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


class PerShape:
    """A function of a graph with symbolic sizes.

    A memory plan needs numbers, and so do most choices of kernels; PyTorch's dynamic shapes save the guards only.

    Args:
        make: Compiles the graph for given arguments.
        numbers: Which arguments are tensors that stand for numbers.
    """

    def __init__(self, make: Callable[[Sequence[Any]], Callable[..., Any]], numbers: Sequence[int] = ()) -> None:
        self._make = make
        self._numbers = tuple(numbers)
        self._warned = False
        self._functions: OrderedDict[tuple[Any, ...], Callable[..., Any]] = OrderedDict()

    def __call__(self, *args: Any) -> Any:
        """Run on arguments of any sizes."""
        key = (*(_layout(a) for a in args), *(args[i].item() for i in self._numbers))
        found = self._functions.get(key)
        if found is None:
            logger.info("compiling for sizes %s", key)
            found = self._functions[key] = self._make(args)
            if len(self._functions) > MAX_SHAPES:
                self._functions.popitem(last=False)
                self._warn()
        self._functions.move_to_end(key)
        return found(*args)

    def _warn(self) -> None:
        """Say once that compiled graphs are thrown away."""
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"a graph was compiled for more than {MAX_SHAPES} sets of sizes and numbers, the oldest are dropped\n  try: pad "
            "batches to few sizes; give a number that changes from step to step as a tensor",
            stacklevel=3,
        )


def _layout(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    return tuple(argument.shape), argument.stride(), argument.requires_grad
