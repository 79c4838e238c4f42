"""The demo's measurement: PyTorch eager and ortgraph train one model on the same batches, step by step in turn."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ortgraph.cli.demo_data import DemoData
from ortgraph.cli.demo_model import Classifier
from ortgraph.manager.numerics import relative_errors
from ortgraph.ops.precision import FP32

Batch = Mapping[str, np.ndarray]
WARM_UP = 3  # steps left out of the timing: both sides allocate and tune in them
LEAST_TIMED = 5  # steps behind the warm-up from which a speed-up is told
_RAMP = 10  # steps over which the learning rate grows to its value
GRADIENTS = ("ortgraph to PyTorch", "ortgraph to unoptimized", "ortgraph to float64", "PyTorch to float64")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long and how large.

    Attributes:
        steps: Training steps.
        batch: Documents per step.
        held_out: Documents of the held-out part that are classified at the end.
        seconds: No step starts later than this after the first one; None: no limit.
        lr: Learning rate after the ramp.
        threads: Of both sides.
        precision: Of both sides: PyTorch runs under autocast when it is low.
    """

    steps: int
    batch: int
    held_out: int
    seconds: float | None
    lr: float
    threads: int
    precision: str = FP32


@dataclasses.dataclass
class Curves:
    """Losses and milliseconds per step of both sides."""

    loss_pytorch: list[float] = dataclasses.field(default_factory=list)
    loss_ortgraph: list[float] = dataclasses.field(default_factory=list)
    ms_pytorch: list[float] = dataclasses.field(default_factory=list)
    ms_ortgraph: list[float] = dataclasses.field(default_factory=list)

    @property
    def loss_max_difference(self) -> float:
        return max(abs(a - b) for a, b in zip(self.loss_pytorch, self.loss_ortgraph, strict=True))

    def timed(self) -> tuple[list[float], list[float]]:
        """Milliseconds per step of PyTorch and ortgraph, without the warm-up."""
        start = min(WARM_UP, len(self.ms_pytorch) - 1)
        return self.ms_pytorch[start:], self.ms_ortgraph[start:]

    @property
    def speedup(self) -> float | None:
        """Median over steps of PyTorch's time by ortgraph's for the same batch; None below LEAST_TIMED steps."""
        if len(self.ms_pytorch) - WARM_UP < LEAST_TIMED:
            return None
        return statistics.median(a / b for a, b in zip(*self.timed(), strict=True))


def autocast(precision: str) -> torch.autocast:
    """PyTorch's mixed precision on the processor; switched off for ``fp32``."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast("cpu", dtype=dtype, enabled=precision != FP32)


def gradient_errors(
    model: Classifier, optimized: Any, unoptimized: Any, batch: Batch, precision: str = FP32
) -> dict[str, dict[str, float]]:
    """Norm-wise relative differences per parameter, by GRADIENTS.

    Args:
        model: PyTorch's side, with float32 parameters.
        optimized: Session of the optimized graph.
        unoptimized: Session of the graph as captured, in standard operators.
        precision: Of PyTorch's side and of the optimized graph.
    """
    with autocast(precision):
        eager = torch_gradients(model, batch)
    exact = torch_gradients(copy.deepcopy(model).double(), batch)
    ours, plain = optimized.gradients(batch), unoptimized.gradients(batch)
    pairs = ((ours, eager), (ours, plain), (ours, exact), (eager, exact))
    return {name: relative_errors(got, want) for name, (got, want) in zip(GRADIENTS, pairs, strict=True)}


def torch_gradients(model: Classifier, batch: Batch) -> dict[str, np.ndarray]:
    """Gradients by parameter name; the model's own are cleared."""
    model.zero_grad(set_to_none=True)
    loss, _ = model(**_tensors(batch))
    loss.backward()
    found = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def train_both(
    model: Classifier, session: Any, batches: Sequence[Batch], plan: Plan, tell: Callable[..., None]
) -> Curves:
    """Train both sides in turn; who goes first changes at every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, weight_decay=0.01, fused=True)
    curves = Curves()

    def eager(batch: Batch, lr: float) -> float:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        with autocast(plan.precision):
            loss, _ = model(**_tensors(batch))
        loss.backward()
        optimizer.step()
        return loss.item()

    def ours(batch: Batch, lr: float) -> float:
        return session.step(batch, learning_rate=lr)

    sides = [(eager, curves.loss_pytorch, curves.ms_pytorch), (ours, curves.loss_ortgraph, curves.ms_ortgraph)]
    began = time.perf_counter()
    for step, batch in enumerate(batches):
        if plan.seconds is not None and step > WARM_UP and time.perf_counter() - began > plan.seconds:
            break
        lr = plan.lr * min(1.0, (step + 1) / _RAMP)
        for run, losses, milliseconds in sides if step % 2 == 0 else sides[::-1]:
            started = time.perf_counter()
            losses.append(run(batch, lr))
            milliseconds.append((time.perf_counter() - started) * 1e3)
        tell(f"loss {curves.loss_pytorch[-1]:.3f} / {curves.loss_ortgraph[-1]:.3f}", advance=1)
    return curves


def accuracies(model: Classifier, session: Any, data: DemoData, plan: Plan) -> tuple[float, float]:
    """Shares of held-out documents that PyTorch's and ortgraph's weights classify right."""
    count = min(plan.held_out, len(data.held_out))
    logits = session.signature.outputs[0]
    right = np.zeros(2, np.int64)
    for start in range(0, count, plan.batch):
        # The graph has one batch size: the last batch is filled with rows that do not count.
        rows = np.arange(start, start + plan.batch) % len(data.held_out)
        kept = min(plan.batch, count - start)
        batch = data.held_out.batch(rows)
        with torch.no_grad():
            eager = model(**_tensors(batch))[1].numpy()
        for side, scores in enumerate((eager, session.evaluate(batch)[logits])):
            right[side] += int((scores.argmax(axis=1) == batch["labels"])[:kept].sum())
    return float(right[0] / count), float(right[1] / count)
