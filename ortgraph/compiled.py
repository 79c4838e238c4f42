"""compile: capture, optimize and run a module's training step lazily, per batch shape."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from ortgraph.capture import capture
from ortgraph.errors import BatchError
from ortgraph.graph import TrainingGraph
from ortgraph.manager.graph_cache import cached, text_of
from ortgraph.manager.optimize import optimize
from ortgraph.runtime.batch import Batch
from ortgraph.runtime.buckets import Sizes
from ortgraph.runtime.session import MAX_SHAPES, TrainingSession

logger = logging.getLogger(__name__)
MAX_SESSIONS = 4  # shapes whose session is kept; the one unused for longest goes first


class CompiledStep:
    """A training step of a PyTorch module that is captured at the first batch, and again for each new batch shape.

    Parameters, buffers and optimizer states live in the session; ``update_module`` copies them back. With
    ``dynamic`` one capture serves all sizes of the named dimensions; without it every new shape costs a capture and,
    when shapes alternate, a copy of all states.

    Args:
        module: Trained as it stands (its ``train()`` mode is respected).
        optimizer: ``ortgraph.optim.AdamW(...)``; None gives losses and gradients only.
        loss: As in ``ortgraph.capture``.
        dynamic: As in ``ortgraph.capture``.
        pipeline, target, precision, memory_budget: As in ``ortgraph.optimize``.
        threads, max_shapes, buckets, padding: As in ``TrainingSession``.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Any = None,
        *,
        loss: Any = None,
        dynamic: Mapping[str, Mapping[int, str]] | None = None,
        pipeline: str = "O2",
        target: str = "onnxruntime-training",
        precision: str = "fp32",
        memory_budget: str | int | None = None,
        threads: int | None = None,
        max_shapes: int = MAX_SHAPES,
        buckets: Mapping[str, Sizes] | None = None,
        padding: Mapping[str, Any] | None = None,
    ) -> None:
        self.module, self._optimizer, self._loss, self._dynamic = module, optimizer, loss, dynamic
        self._pipeline, self._target = pipeline, target
        self._precision, self._memory_budget = precision, memory_budget
        self._options: dict[str, Any] = {
            "threads": threads, "max_shapes": max_shapes, "buckets": buckets, "padding": padding
        }  # fmt: skip
        self._sessions: OrderedDict[tuple, TrainingSession] = OrderedDict()
        self._current: TrainingSession | None = None

    def __call__(self, batch: Batch, learning_rate: float | None = None) -> float:
        """One step (forward, backward, update). Returns the loss before the update."""
        return self.session(batch).step(batch, learning_rate=learning_rate)

    def gradients(self, batch: Batch) -> dict[str, np.ndarray]:
        """Gradients by parameter name; commits nothing."""
        return self.session(batch).gradients(batch)

    def session(self, batch: Batch) -> TrainingSession:
        """The session for batches of this shape, holding the current parameters and states."""
        key = () if self._dynamic else _shapes(batch)
        session = self._sessions.get(key)
        if session is None:
            session = self._make(batch)
            self._sessions[key] = session
        self._sessions.move_to_end(key)
        if self._current is not None and session is not self._current:
            session.load_state_dict(self._current.state_dict())
            if self._optimizer is not None:
                session.load_optimizer_state_dict(self._current.optimizer_state_dict())
        self._current = session
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def update_module(self) -> None:
        """Copy parameters and buffers back into the module. Does nothing before the first batch."""
        import torch

        if self._current is not None:
            state = {k: torch.from_numpy(np.asarray(v)) for k, v in self._current.state_dict().items()}
            self.module.load_state_dict(state)

    def _make(self, batch: Batch) -> TrainingSession:
        logger.info("capturing for batch shapes %s", _shapes(batch))
        graph = capture(self.module, batch, dynamic=self._dynamic, loss=self._loss)
        optimizer = None if self._optimizer is None else str(self._optimizer)
        facts = text_of("compile", self._pipeline, optimizer, self._target, self._precision, self._memory_budget)
        optimized = self._optimize(graph) if facts is None else cached(graph, facts, lambda: self._optimize(graph))
        return TrainingSession(optimized, **self._options)

    def _optimize(self, graph: TrainingGraph) -> TrainingGraph:
        return optimize(
            graph, self._pipeline, optimizer=self._optimizer, target=self._target, precision=self._precision,
            memory_budget=self._memory_budget,
        ).graph  # fmt: skip


def compile(module: Any, optimizer: Any = None, **options: Any) -> CompiledStep:
    """A callable training step for a module: captured, optimized and bound at the first batch. See CompiledStep."""
    return CompiledStep(module, optimizer, **options)


def _shapes(batch: Batch) -> tuple:
    """Names, shapes and dtypes of a batch."""
    if hasattr(batch, "shape"):
        batch = (batch,)
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    try:
        return tuple((name, tuple(value.shape), str(value.dtype)) for name, value in items if value is not None)
    except AttributeError as error:
        raise BatchError(
            f"the batch holds something that is no tensor ({error})", "numpy arrays or torch tensors"
        ) from error
