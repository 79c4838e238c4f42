"""Forward and backward in one run, at the forward call: what a caller gets who goes backward from the loss and no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ortgraph.dynamo.arena_pool import arenas
from ortgraph.dynamo.by_rows import GraphsByRows
from ortgraph.dynamo.compiled_graph import CompiledGraph, Result, random_key
from ortgraph.dynamo.joint_graph import JointGraph
from ortgraph.errors import UnsupportedError

_OUTSTANDING = 2  # forward calls that may wait for their backward with gradients at hand
_LENT = 4  # arenas in use, with gradients in them, before gradients get memory of their own
_LEAST = 2.0**-16  # loss gradient of a run, in size
_TOKEN = 32  # bytes: random key and step, loss gradient, whether draws were over packed rows; an arena has more


def whole(joint: JointGraph) -> JointGraph:
    """The graph without a cut: the loss gradient is an argument behind the others, gradients are results."""
    seed = joint.graph.signature.loss_gradient
    assert seed is not None and set(joint.tangents) == {seed}
    gradients = [g for g in joint.gradients if g is not None]
    return dataclasses.replace(
        joint, primals=(*joint.primals, seed), tangents=(), outputs=(*joint.outputs, *gradients), gradients=(),
        in_arena=frozenset(gradients),
    )  # fmt: skip


class OneRun:
    """A graph whose gradients are computed with the loss, and handed out when PyTorch asks for them.

    Gradients are linear in the gradient of the loss. The run takes the one that the last backward call had, 1 at first;
    where another one comes, gradients are multiplied by the ratio. Two things need the halves, which are compiled when they
    are met: a gradient for another result (the forward half runs again, on saved arguments and the same random key), and
    forward calls without backward. A caller that needed them once for another result gets them from then on.

    Gradients lie where the plan puts them, in the arena of the run, in which activations lay before; it is lent until the last
    gradient is gone.

    ``forward`` and ``backward`` are as those of ``CompiledGraph``; what is saved is a token (or an arena), then
    arguments, results and gradients; what a call does not save is an empty tensor.

    Args:
        graphs: Compiled without a cut.
        make_halves: Compiles the halves.
        joint: Of the halves.
        seed: Position of the loss gradient among the tangents.
    """

    def __init__(
        self, graphs: GraphsByRows, make_halves: Callable[[], CompiledGraph], joint: JointGraph, seed: int
    ) -> None:
        self._graphs, self._make_halves, self._seed = graphs, make_halves, seed
        self._halves: CompiledGraph | None = None
        self._count = len(joint.outputs)
        self._has = [g is not None for g in joint.gradients]
        self._others = [i for i in range(len(joint.tangents)) if i != seed]
        self._draws = joint.random is not None
        self.saved_args = [i for i, name in enumerate(joint.primals) if name is not None]
        self.saved_results = [i for i, o in enumerate(joint.outputs) if isinstance(o, str)]
        self._empty = torch.empty(0)
        self._outstanding = 0
        self._only_halves = False
        self._factor = 1.0

    def __deepcopy__(self, memo: Any) -> OneRun:
        return self

    @property
    def token_bytes(self) -> int:
        """Bytes of the tensor that stands for a call."""
        return _TOKEN

    @property
    def saved_types(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what is saved behind the results."""
        return [(r.shape, r.dtype) for r in self._graphs.whole.results[self._count :] if isinstance(r, Result)]

    @property
    def halves(self) -> CompiledGraph:
        """Forward and backward as two programs, compiled at first use."""
        if self._halves is None:
            self._halves = self._make_halves()
        return self._halves

    def forward(self, args: list[Any]) -> list[Any]:
        """Results and what is saved. See ``CompiledGraph.forward``."""
        if self._only_halves or self._outstanding >= _OUTSTANDING:
            return self._forward_half(args)
        self._outstanding += 1
        key = random_key() if self._draws else None
        graph, chosen = self._graphs.of(args)
        made = graph.forward([*args, torch.tensor(self._factor)], key)[: len(graph.results)]
        token = torch.empty(_TOKEN, dtype=torch.uint8)
        if key is not None:
            token[:16].view(torch.int64).copy_(key)
        token[16:].view(torch.float64)[0], token[24:].view(torch.int64)[0] = self._factor, chosen.packed
        gradients = made[self._count :]
        if arenas.lent > _LENT:  # why: whoever keeps one gradient of each step keeps the memory of all
            gradients = [g.clone() for g in gradients]
        kept = [args[i] if self._others else self._empty for i in self.saved_args]
        nothing = [self._empty] * len(self.saved_results)
        return [*made[: self._count], token, *kept, *nothing, *gradients]

    def backward(self, args: list[Any]) -> list[Any]:
        """Gradients by argument. See ``CompiledGraph.backward``."""
        at = [1, len(self.saved_args), len(self.saved_results), sum(self._has)]
        (token,), saved, results, gradients, tangents = _split(args, at)
        self._outstanding = 0
        if token.numel() != _TOKEN:
            return self._backward_half(token, saved, results, tangents)
        if any(torch.count_nonzero(tangents[i]) for i in self._others):
            return self._run_again(token, saved, tangents)
        if torch._C._autograd._get_current_graph_task_keep_graph():
            gradients = [g.clone() for g in gradients]
        given, used = float(tangents[self._seed]), float(token[16:].view(torch.float64)[0])
        if given != used:
            torch._foreach_mul_(gradients, given / used)
        # why not above 1: what a loss scaler tries must not overflow in a run that a smaller scale is for; why not far
        # below: small gradients of that run would be lost for a later call that has a larger one
        self._factor = given if _LEAST <= abs(given) <= 1 else 1.0
        found = iter(gradients)
        return [next(found) if has else None for has in self._has]

    def _forward_half(self, args: list[Any]) -> list[Any]:
        halves = self.halves
        made = halves.forward(args)
        results, (arena, *saved) = made[: self._count], made[self._count :]
        kept = dict(zip(halves.saved_results, saved[len(halves.saved_args) :], strict=True))
        return [
            *results,
            arena,
            *(args[i] if i in halves.saved_args else self._empty for i in self.saved_args),
            *(kept.get(i, self._empty) for i in self.saved_results),
            *([self._empty] * sum(self._has)),
        ]

    def _backward_half(
        self, arena: torch.Tensor, saved: Sequence[Any], results: Sequence[Any], tangents: Sequence[Any]
    ) -> list[Any]:
        halves = self.halves
        args = dict(zip(self.saved_args, saved, strict=True))
        kept = dict(zip(self.saved_results, results, strict=True))
        wanted = [*(args[i] for i in halves.saved_args), *(kept[i] for i in halves.saved_results)]
        return halves.backward([arena, *wanted, *tangents])

    def _run_again(self, token: torch.Tensor, saved: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Gradients by the halves, of the same arguments and the same draws."""
        self._only_halves = True
        if self._draws and int(token[24:].view(torch.int64)):
            raise UnsupportedError(
                "a gradient came for another result than the loss, of a call that drew its dropout without padding",
                "leave remove_padding out, or go backward from the loss alone (the next call computes all rows)",
            )
        args: list[Any] = [None] * (1 + max(self.saved_args))
        for i, tensor in zip(self.saved_args, saved, strict=True):
            args[i] = tensor
        made = self.halves.forward(args, token[:16].view(torch.int64))
        return self.halves.backward([*made[self._count :], *tangents])


def _split(items: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Parts of the given lengths, and the rest."""
    parts, start = [], 0
    for length in (*lengths, len(items)):
        parts.append(list(items[start : start + length]))
        start += length
    return parts
