"""Numbers that depend on no input, where a rounding more or less gives another result: PyTorch computes them.

A logarithm that differs in its last bit moves a word into another bucket of relative positions when it is rounded to an
integer afterwards (DeBERTa, T5, MPNet). Such tables are constants of the model: they are taken from PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

_MAX_ELEMENTS = 2**20
_STEPS = frozenset({"ceil", "floor", "round", "trunc", "sign", "floor_divide", "remainder", "fmod"})
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def steps_of_constants(graph: Graph, constants: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
    """Results of steps (roundings, comparisons and integer casts of floats) that no input reaches.

    Args:
        graph: The traced graph.
        constants: Placeholders with a known value.
    """
    known: dict[Node, torch.Tensor] = dict(constants)
    found: dict[Node, torch.Tensor] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if not _is_evaluated(node, known):
                continue
            result = node.target(*_given(node.args, known), **_given(node.kwargs, known))
            known[node] = result
            if _is_step(node):
                found[node] = result
    return found


def _is_evaluated(node: Node, known: Mapping[Node, torch.Tensor]) -> bool:
    fake = node.meta.get("val")
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not isinstance(fake, torch.Tensor) or not all(isinstance(size, int) for size in fake.shape):
        return False
    if fake.numel() > _MAX_ELEMENTS or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    return all(source in known for source in node.all_input_nodes)


def _is_step(node: Node) -> bool:
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    if name not in _STEPS | _COMPARISONS and name != "_to_copy":
        return False
    if not any(_is_float(source) for source in node.all_input_nodes):
        return False
    return name != "_to_copy" or not _is_float(node)


def _is_float(node: Node) -> bool:
    fake = node.meta.get("val")
    return isinstance(fake, torch.Tensor) and fake.is_floating_point()


def _given(arguments: Any, known: Mapping[Node, torch.Tensor]) -> Any:
    return torch.fx.node.map_arg(arguments, lambda node: known[node])
