"""PyTorch draws what a training graph draws: its dropout masks and random numbers, in the order of the calls.

Random operators of a graph are functions of (key, step, number), and the numbers count the calls of the module. So a
module that runs under ``Replay`` sees the masks of the graph, and losses, gradients and updates compare with dropout on.

Many models ask for float32 by name (softmax, norms, rotary positions): a module in float64 would count in float32 there,
and be no reference. ``Replay(double=True)`` gives float64 instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ortgraph.errors import UnsupportedError
from ortgraph.graph import TrainingGraph
from ortgraph.ops.random import reference_mask, reference_uniform


@dataclasses.dataclass(frozen=True)
class Draw:
    """One drawing node: its shape (None: symbolic), and the ratio of a dropout (None: uniform numbers)."""

    shape: tuple[int, ...] | None
    ratio: float | None


@dataclasses.dataclass(frozen=True)
class Draws:
    """The drawing nodes of a graph by number, its key and its first step."""

    nodes: Mapping[int, Draw]
    key: int
    step: int

    @staticmethod
    def of(graph: TrainingGraph) -> Draws:
        """Read a captured graph."""
        found: dict[int, Draw] = {}
        for node in graph.graph:
            if node.op_type == "Dropout" and node.domain == "ortgraph":
                found[node.attributes["node"].as_int()] = Draw(
                    _shape(node.inputs[0]), node.attributes["ratio"].as_float()
                )
            if node.op_type == "RandomUniform" and node.domain == "ortgraph":
                found[node.attributes["node"].as_int()] = Draw(_shape(node.outputs[0]), None)
        states = {s.kind: int(graph.values[s.input]) for s in graph.signature.states}
        return Draws(found, states.get("random_key", 0), states.get("random_step", 0))


def _shape(value: ir.Value | None) -> tuple[int, ...] | None:
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(d) for d in value.shape)  # type: ignore[arg-type]


class Replay(TorchDispatchMode):
    """Random operators give what the graph's nodes give at one step.

    Args:
        draws: The graph's drawing nodes.
        step: How many training steps came before.
        double: Whoever asks for float32 gets float64.

    Raises:
        UnsupportedError: A random operator, shape or ratio that the graph does not have at this place.
    """

    def __init__(self, draws: Draws, step: int = 0, *, double: bool = False) -> None:
        super().__init__()
        self._draws, self._step, self._double = draws, draws.step + step, double
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._double and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        handler = _HANDLERS.get(str(func).removeprefix("aten."))
        if handler is None:
            raise UnsupportedError(f"no replay of the random operator {func}", "add it to bench/coverage/replay.py")
        return handler(self, func, args, kwargs)

    def uniform(self, shape: tuple[int, ...]) -> np.ndarray:
        """Numbers of the next node, which draws uniform ones. Where the graph dropped the node any will do."""
        return reference_uniform(self._draws.key, self._step, self._next(shape, None), shape)

    def kept(self, shape: tuple[int, ...], keep: float) -> np.ndarray:
        """The mask of the next node."""
        node = self._draws.nodes.get(self._count)
        if node is not None and node.ratio is None:
            return self.uniform(shape) < np.float32(keep)
        return reference_mask(self._draws.key, self._step, self._next(shape, 1 - keep), shape, 1 - keep)

    def _next(self, shape: tuple[int, ...], ratio: float | None) -> int:
        number, node = self._count, self._draws.nodes.get(self._count)
        self._count += 1
        fits = node is None or (
            (node.shape is None or math.prod(node.shape) == math.prod(shape))
            and (node.ratio is None) == (ratio is None)
            and (ratio is None or math.isclose(node.ratio or 0, ratio, abs_tol=1e-6))
        )
        if not fits:
            raise UnsupportedError(
                f"call {number} draws {list(shape)} (ratio {ratio}), the graph draws {node} there",
                "the module draws in another order than its trace",
            )
        return number


def _fill(target: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return target.copy_(torch.from_numpy(np.array(values)).reshape(target.shape))


def _bernoulli_in_place(replay: Replay, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return _fill(args[0], replay.kept(tuple(args[0].shape), float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))))


def _bernoulli(replay: Replay, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    given = args[0]
    if len(args) > 1:
        return _fill(torch.empty_like(given), replay.kept(tuple(given.shape), float(args[1])))
    drawn = torch.from_numpy(replay.uniform(tuple(given.shape)))
    return (drawn < given.float()).to(given.dtype)


def _uniform(replay: Replay, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    made = func(*args, **kwargs)  # for shape and dtype
    low, high = (args[1], args[2]) if "uniform" in str(func) and len(args) > 2 else (0.0, 1.0)
    return _fill(made, replay.uniform(tuple(made.shape)) * (high - low) + low)


def _normal(replay: Replay, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    made = func(*args, **kwargs)
    u, v = replay.uniform(tuple(made.shape)), replay.uniform(tuple(made.shape))
    drawn = np.sqrt(-2 * np.log(1 - u)) * np.cos(np.float32(2 * np.pi) * v)
    mean, deviation = (*args[1:3], 0.0, 1.0)[:2] if "normal" in str(func) else (0.0, 1.0)
    return _fill(made, drawn * deviation + mean)


def _dropout(replay: Replay, func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given, ratio, train = args
    mask = torch.ones_like(given, dtype=torch.bool)
    if train is False or ratio == 0:
        return given.clone(), mask
    _fill(mask, replay.kept(tuple(given.shape), 1 - ratio))
    return given * mask / (1 - ratio), mask


def _attention(replay: Replay, func: Any, args: Any, kwargs: Any) -> Any:
    if args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0):
        raise UnsupportedError(f"no replay of {func} with dropout", "its masks are drawn inside")
    return func(*args, **kwargs)


_HANDLERS: dict[str, Callable[..., Any]] = {
    "bernoulli_.float": _bernoulli_in_place,
    "bernoulli.p": _bernoulli,
    "bernoulli.default": _bernoulli,
    "rand.default": _uniform,
    "rand_like.default": _uniform,
    "uniform_.default": _uniform,
    "randn.default": _normal,
    "randn_like.default": _normal,
    "normal_.default": _normal,
    "native_dropout.default": _dropout,
    "_scaled_dot_product_flash_attention_for_cpu.default": _attention,
}
