"""PyTorch's side: loss, gradients and five AdamW steps, in float32 at a number of threads and in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from bench.coverage.registry import Built, Case
from bench.coverage.replay import Draws, Replay

STEPS = 5
LEARNING_RATE = 1e-3
_TARGETS = ("target", "targets", "label", "labels")


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a few steps gave.

    Attributes:
        loss: Before the first step.
        gradients: At the first step, by every name of each parameter that has one.
        state: Parameters and buffers after the last step, by name.
    """

    loss: float
    gradients: Mapping[str, np.ndarray]
    state: Mapping[str, np.ndarray]


def trained(case: Case, draws: Draws, threads: int, *, double: bool = False) -> Trained:
    """Train the model of a case with ``torch.optim.AdamW``; random numbers are those of ``draws``."""
    built = case.build()
    if double and built.exact:
        built.exact(built.module)
    with _settings(threads, torch.float64 if double else torch.float32):
        module = built.module.double() if double else built.module
        batch = _double(built.batch) if double else built.batch
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=LEARNING_RATE)
        first: tuple[float, dict[str, np.ndarray]] | None = None
        for step in range(STEPS):
            optimizer.zero_grad()
            with Replay(draws, step, double=double):
                loss = loss_of(built, module, batch)
            loss.backward()
            if first is None:
                first = (loss.item(), _gradients(module))
            optimizer.step()
    assert first is not None
    state = {n: t.detach().numpy().copy() for n, t in module.state_dict().items()}
    return Trained(*first, state)


def _gradients(module: torch.nn.Module) -> dict[str, np.ndarray]:
    named = module.named_parameters(remove_duplicate=False)
    return {n: p.grad.numpy().copy() for n, p in named if p.grad is not None}


def loss_of(built: Built, module: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a step, computed without any code of ortgraph."""
    if built.loss is None:
        outputs = module(**batch) if isinstance(batch, Mapping) else module(*batch)
        if isinstance(outputs, torch.Tensor):
            return outputs
        return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    if isinstance(built.loss, torch.nn.Module):
        if not isinstance(batch, Mapping):
            return built.loss(module(*batch[:-1]), batch[-1])
        name = next(n for n in batch if n in _TARGETS)
        outputs = module(**{n: v for n, v in batch.items() if n != name})
        return built.loss(outputs if isinstance(outputs, torch.Tensor) else outputs[0], batch[name])
    taken = inspect.signature(module.forward).parameters
    outputs = module(**{n: v for n, v in batch.items() if n in taken})
    return built.loss(outputs, batch) if len(inspect.signature(built.loss).parameters) > 1 else built.loss(outputs)


def _double(batch: Any) -> Any:
    def convert(item: Any) -> Any:
        return item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    return pytree.tree_map(convert, batch)


@contextlib.contextmanager
def _settings(threads: int, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_default_dtype(before[1])
