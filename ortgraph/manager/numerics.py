"""Numerical comparison of two graphs of the same model on one batch: loss, gradients, outputs and new values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ortgraph.errors import VerificationError
from ortgraph.graph import TrainingGraph
from ortgraph.manager import registry
from ortgraph.manager.example_batch import example_batch
from ortgraph.manager.pipeline_text import parse_pipeline

if TYPE_CHECKING:
    from ortgraph.runtime.session import TrainingSession

__all__ = ["Comparison", "compare", "example_batch", "reference_form", "relative_errors", "require_equal"]

# Rewrites re-associate float32 sums; 1e-4 is the design's bound where a float64 reference is too dear.
GRADIENT_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5
_NOISE = 10  # two ways to round differ by a few times what one differs from itself
_RATE = 0.1  # large enough that an update is no rounding error of the weight
_UPDATE_FLOOR = 1e-3  # updates are measured against at least this part of the weight's norm


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences between two graphs.

    Attributes:
        loss: |difference| / max(|loss|, 1e-6).
        gradients: Norm-wise relative difference per parameter, against max(its norm, 1e-2 of the median norm): of a
            gradient that is zero in exact arithmetic 1e-6 of the median is tolerated.
        values: Norm-wise relative difference of every further output that both graphs have: the model's outputs, and
            new values of buffers, states and parameters (of the change, for parameters).
    """

    loss: float
    gradients: Mapping[str, float]
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def worst_gradient(self) -> tuple[str, float]:
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def worst_value(self) -> tuple[str, float]:
        return max(self.values.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def equal(self) -> bool:
        within = max(self.worst_gradient[1], self.worst_value[1]) <= GRADIENT_TOLERANCE
        return self.loss <= LOSS_TOLERANCE and within

    @property
    def text(self) -> str:
        """What moved most."""
        (name, error), (value, by) = self.worst_gradient, self.worst_value
        text = f"loss by {self.loss:.1e}, gradient of %{name} by {error:.1e}"
        return f"{text}, %{value} by {by:.1e}" if by > GRADIENT_TOLERANCE else text


def relative_errors(
    got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], noise: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Norm-wise relative error per name. A gradient far below the median norm is measured against the median.

    NaN and infinite elements count as equal where both have them.

    Args:
        noise: Rounding error in the norm of each reference, where it is known: a gradient that is nothing but that
            (a bias before batch normalization) is not measured against itself.
    """
    norms = {k: _norm(np.where(np.isfinite(v), v, 0)) for k, v in want.items()}
    floor = 1e-2 * float(np.median(list(norms.values()))) if norms else 0.0
    errors = {}
    for name, reference in want.items():
        if name not in got:
            raise VerificationError(f"gradient of %{name} is missing", "check the signature")
        rounding = _NOISE * (noise or {}).get(name, 0.0) / GRADIENT_TOLERANCE
        errors[name] = _error(got[name], reference, max(norms[name], floor, rounding))
    return errors


def _rounding(
    session: TrainingSession, batch: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Rounding error of each gradient: gradients are linear in the seed, their rounding is not."""
    noise = dict.fromkeys(want, 0.0)
    if session.signature.loss_gradient is None:
        return noise
    for seed in (3.0, 0.7):
        scaled = session.gradients(batch, loss_gradient=seed)
        for name, value in want.items():
            difference = scaled[name] / np.float32(seed) - value
            noise[name] = max(noise[name], _norm(np.where(np.isfinite(difference), difference, 0)))
    return noise


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(array, np.float64)))


def _error(got: np.ndarray, want: np.ndarray, size: float) -> float:
    """|got - want| / size; infinite where only one of them is finite."""
    if np.shape(got) != np.shape(want):
        return float("inf")
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    error = _norm(np.where(same, 0, a - np.where(same, 0, b))) if not same.all() else 0.0
    error = error / max(size, 1e-30)
    return error if np.isfinite(error) else float("inf")


def reference_form(graph: TrainingGraph) -> TrainingGraph:
    """The graph with every composite as its reference expansion, so that no kernel is compared with itself.

    A planned graph, and one that cannot be lowered so, is returned as it is.
    """
    if graph.stage not in registry.get("lower").stages:
        return graph
    made = graph.clone()
    for p in parse_pipeline("lower{prefer=expansion}"):
        p(made.model)
    made.signature = made.signature.replace(stage="lowered")
    return made


def compare(
    reference: TrainingGraph, graph: TrainingGraph, batch: Mapping[str, np.ndarray], threads: int | None = None
) -> Comparison:
    """Run both graphs on one batch and compare all that a training step makes. Neither graph is changed.

    The reference is run by its reference expansions. When only ``graph`` has an optimizer, the same one is attached
    to the reference. Optimizer states start at made-up values, since updates from zero do not depend on the size of a
    gradient.
    """
    from ortgraph.runtime.session import TrainingSession

    sessions = []
    for g in (reference_form(_with_optimizer(reference, graph)), graph):
        session = TrainingSession(g, threads=threads, check_finite=False)
        _fill_states(session)
        sessions.append(session)
    theirs, mine = sessions
    want_loss, loss = float(theirs.loss(batch)), float(mine.loss(batch))
    want = theirs.gradients(batch)
    gradients = relative_errors(mine.gradients(batch), want, _rounding(theirs, batch, want))
    values = _compare_values(theirs, mine, batch)
    return Comparison(_error(np.array(loss), np.array(want_loss), max(abs(want_loss), 1e-6)), gradients, values)


def _with_optimizer(reference: TrainingGraph, graph: TrainingGraph) -> TrainingGraph:
    mine, theirs = graph.signature.metadata, reference.signature.metadata
    if "optimizer" not in mine or "optimizer" in theirs:
        return reference
    from ortgraph.optim import AdamW
    from ortgraph.optim.attach import BEFORE, attach

    if reference.stage not in BEFORE:
        return reference
    stepped = reference.clone()
    attach(stepped, AdamW.parse(mine["optimizer"]), int(mine.get("accumulation_steps", "1")))
    stepped.signature = stepped.signature.replace(stage="stepped")
    return stepped


def _fill_states(session: TrainingSession) -> None:
    """Moments and accumulators that the next step depends on smoothly, equal in every session."""
    rng = np.random.default_rng(0)
    states = session.optimizer_state_dict()
    kinds = {s.name: s.kind for s in session.signature.states}
    for name in sorted(states):
        old = states[name]
        if kinds[name] == "moment2":
            states[name] = (1 + rng.random(old.shape)).astype(old.dtype)
        elif kinds[name] in ("moment1", "accumulator"):
            states[name] = rng.standard_normal(old.shape).astype(old.dtype)
        elif kinds[name] == "step":
            states[name] = np.full(old.shape, 9, old.dtype)
    session.load_optimizer_state_dict(states)
    if session.signature.scalars:
        session.learning_rate = _RATE


def _compare_values(
    theirs: TrainingSession, mine: TrainingSession, batch: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Differences of model outputs and new values; what a step of ``mine`` leaves behind is compared, too."""
    want, got = theirs.results(batch), mine.results(batch)
    signature = mine.signature
    skip = {theirs.signature.loss, *theirs.signature.gradients.values()}
    before = {p.update: p.name for p in signature.parameters if p.update is not None}
    old = {**mine.state_dict(), **mine.optimizer_state_dict()}
    errors = {}
    for name in want:
        if name in got and name not in skip:
            errors[name] = _value_error(got[name], want[name], old.get(before.get(name, "")))
    if not mine.has_optimizer:
        return errors
    states = {s.output: s.name for s in signature.states if s.output is not None and s.kind != "accumulator"}
    mine.step(batch)
    now = {**mine.optimizer_state_dict(), **mine.state_dict()}
    for name, stored in (*before.items(), *states.items(), *((b.update or "", b.name) for b in signature.buffers)):
        if name in want:
            left = _value_error(now[stored], want[name], old.get(before.get(name, "")))
            errors[name] = max(errors[name], left)
    return errors


def _value_error(got: np.ndarray, want: np.ndarray, old: np.ndarray | None) -> float:
    finite = np.where(np.isfinite(want), want, 0)
    if old is None or old.shape != np.shape(want):
        return _error(got, want, _norm(finite))
    return _error(got, want, max(_norm(np.where(finite == 0, 0, finite - old)), _UPDATE_FLOOR * _norm(old)))


def require_equal(
    reference: TrainingGraph, graph: TrainingGraph, batch: Mapping[str, np.ndarray], by: str, threads: int | None = None
) -> Comparison:
    """Raise VerificationError when loss, a gradient, an output or a new value moved beyond the tolerances."""
    result = compare(reference, graph, batch, threads)
    if not result.equal:
        raise VerificationError(
            f"numbers changed after {by}: {result.text}", "find the pass and the nodes with --bisect"
        )
    return result
