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
from ortgraph.ops.precision import FP32, PRECISIONS, range_of

if TYPE_CHECKING:
    from ortgraph.runtime.session import TrainingSession

__all__ = [
    "Comparison",
    "Tolerance",
    "compare",
    "example_batch",
    "reference_form",
    "relative_errors",
    "require_equal",
    "tolerance_of",
]

# Rewrites re-associate float32 sums; 1e-4 is the design's bound where a float64 reference is too dear.
GRADIENT_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5
_LOW_GRADIENT, _LOW_LOSS = 16, 4  # roundings to the low type that a gradient and a loss may be off by
_NOISE = 10  # rounding happens at every operator, the noise is measured for that of the weights alone
_PERTURBATIONS = 2
_RATE = 0.1  # large enough that an update is no rounding error of the weight
_UPDATE_FLOOR = 1e-3  # updates are measured against at least this part of the weight's norm


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Relative differences that count as equal.

    Attributes:
        loss: Of the loss.
        gradient: Norm-wise, of gradients and further values.
        noise: One rounding of the precision, in float32 roundings.
    """

    loss: float = LOSS_TOLERANCE
    gradient: float = GRADIENT_TOLERANCE
    noise: float = 1.0


def tolerance_of(precision: str) -> Tolerance:
    """Tolerances for a graph in ``fp32``, ``bf16`` (loss 1.6 %, gradients 6 %) or ``fp16`` (0.2 %, 0.8 %).

    Every value of a low type is off by half a unit in its last place; norm-wise errors of gradients stay within a few
    of these, under PyTorch's autocast as well.
    """
    unit = range_of(PRECISIONS[precision]).unit
    if precision == FP32:
        return Tolerance()
    return Tolerance(_LOW_LOSS * unit, _LOW_GRADIENT * unit, unit / range_of(PRECISIONS[FP32]).unit)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences between two graphs.

    Attributes:
        loss: |difference| / max(|loss|, 1e-6).
        gradients: Norm-wise relative difference per parameter, against max(its norm, 1e-2 of the median norm): of a
            gradient that is zero in exact arithmetic 1e-6 of the median is tolerated.
        values: Norm-wise relative difference of every further output that both graphs have: the model's outputs, and
            new values of buffers, states and parameters (of the change, for parameters).
        precision: The lower precision of the two graphs, which sets the tolerance.
    """

    loss: float
    gradients: Mapping[str, float]
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    precision: str = FP32

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.precision)

    @property
    def worst_gradient(self) -> tuple[str, float]:
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def worst_value(self) -> tuple[str, float]:
        return max(self.values.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def equal(self) -> bool:
        within = max(self.worst_gradient[1], self.worst_value[1]) <= self.tolerance.gradient
        return self.loss <= self.tolerance.loss and within

    @property
    def text(self) -> str:
        """What moved most."""
        (name, error), (value, by) = self.worst_gradient, self.worst_value
        text = f"loss by {self.loss:.1e}, gradient of %{name} by {error:.1e}"
        text = f"{text}, %{value} by {by:.1e}" if by > self.tolerance.gradient else text
        return text if self.precision == FP32 else f"{text} (tolerances of {self.precision})"


def relative_errors(
    got: Mapping[str, np.ndarray],
    want: Mapping[str, np.ndarray],
    noise: Mapping[str, float] | None = None,
    tolerance: Tolerance = Tolerance(),
) -> dict[str, float]:
    """Norm-wise relative error per name. A gradient far below the median norm is measured against the median.

    NaN and infinite elements count as equal where both have them.

    Args:
        noise: Rounding error in the norm of each reference, where it is known: a gradient that is nothing but that
            (a bias before batch normalization) is not measured against itself.
        tolerance: What the error will be held against.
    """
    norms = {k: _norm(np.where(np.isfinite(v), v, 0)) for k, v in want.items()}
    floor = 1e-2 * float(np.median(list(norms.values()))) if norms else 0.0
    errors = {}
    for name, reference in want.items():
        if name not in got:
            raise VerificationError(f"gradient of %{name} is missing", "check the signature")
        rounding = _NOISE * tolerance.noise * _finite((noise or {}).get(name, 0.0)) / tolerance.gradient
        errors[name] = _error(got[name], reference, max(norms[name], floor, rounding))
    return errors


@dataclasses.dataclass(frozen=True)
class _Run:
    """What one graph makes of a batch."""

    loss: float
    gradients: dict[str, np.ndarray]
    values: dict[str, np.ndarray]

    @staticmethod
    def of(session: TrainingSession, batch: Mapping[str, np.ndarray]) -> _Run:
        return _Run(float(session.loss(batch)), session.gradients(batch), session.results(batch))


@dataclasses.dataclass(frozen=True)
class _Noise:
    """How far rounding carries each result of the reference: its change when every weight moves by one unit in the
    last place. Where this is large (a variance near zero), two right ways to compute differ as much."""

    loss: float
    gradients: dict[str, float]
    values: dict[str, float]

    @staticmethod
    def of(session: TrainingSession, batch: Mapping[str, np.ndarray], run: _Run) -> _Noise:
        loss, gradients, values = 0.0, dict.fromkeys(run.gradients, 0.0), dict.fromkeys(run.values, 0.0)
        before, rng = session.state_dict(), np.random.default_rng(0)
        for _ in range(_PERTURBATIONS):
            session.load_state_dict(_moved(session, before, rng))
            other = _Run.of(session, batch)
            loss = max(loss, _distance(np.array(other.loss), np.array(run.loss)))
            gradients = {k: max(n, _distance(other.gradients[k], run.gradients[k])) for k, n in gradients.items()}
            values = {k: max(n, _distance(other.values[k], run.values[k])) for k, n in values.items()}
        session.load_state_dict(before)
        return _Noise(loss, gradients, values)


def _moved(
    session: TrainingSession, state: Mapping[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Every float parameter moved to a neighbouring number; tied names alike."""
    moved = dict(state)
    for p in session.signature.parameters:
        value = state[p.name]
        if value.dtype not in (np.float32, np.float64):
            continue
        towards = np.where(rng.random(value.shape) < 0.5, -np.inf, np.inf).astype(value.dtype)
        new = np.asarray(np.where(value == 0, value, np.nextafter(value, towards)), value.dtype)
        moved |= dict.fromkeys((p.name, *p.tied), new)
    return moved


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(array, np.float64)))


def _distance(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want|; infinite where only one of them is finite."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    distance = 0.0 if same.all() else _norm(np.where(same, 0, a - np.where(same, 0, b)))
    return distance if np.isfinite(distance) else float("inf")


def _error(got: np.ndarray, want: np.ndarray, size: float) -> float:
    """|got - want| / size."""
    if np.shape(got) != np.shape(want):
        return float("inf")
    return _distance(got, want) / max(size, 1e-30)


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
    gradient; parameters that are all zeros or all ones start a little above, since a pass that took them for
    constants would not show.
    """
    from ortgraph.runtime.session import TrainingSession

    sessions = []
    for g in (reference_form(_with_optimizer(reference, graph)), graph):
        session = TrainingSession(g, threads=threads, check_finite=False)
        _fill_states(session)
        _fill_parameters(session)
        sessions.append(session)
    theirs, mine = sessions
    want = _Run.of(theirs, batch)
    noise = _Noise.of(theirs, batch, want)
    got = _Run.of(mine, batch)
    precision = lower_precision(reference, graph)
    tolerance = tolerance_of(precision)
    gradients = relative_errors(got.gradients, want.gradients, noise.gradients, tolerance)
    size = max(abs(want.loss), 1e-6, _NOISE * tolerance.noise * _finite(noise.loss) / tolerance.loss)
    loss = _error(np.array(got.loss), np.array(want.loss), size)
    return Comparison(loss, gradients, _compare_values(want, noise, got, mine, batch, tolerance), precision)


def lower_precision(*graphs: TrainingGraph) -> str:
    """The coarsest precision among graphs."""
    found = [g.signature.metadata.get("precision", FP32) for g in graphs]
    return max(found, key=lambda p: range_of(PRECISIONS[p]).unit)


def _finite(noise: float) -> float:
    return noise if np.isfinite(noise) else 0.0


def _with_optimizer(reference: TrainingGraph, graph: TrainingGraph) -> TrainingGraph:
    mine, theirs = graph.signature.metadata, reference.signature.metadata
    if "optimizer" not in mine or "optimizer" in theirs:
        return reference
    from ortgraph.optim import parse
    from ortgraph.optim.attach import BEFORE, attach

    if reference.stage not in BEFORE:
        return reference
    stepped = reference.clone()
    attach(stepped, parse(mine["optimizer"]), int(mine.get("accumulation_steps", "1")))
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


def _fill_parameters(session: TrainingSession) -> None:
    """Move parameters that are all zeros or all ones (a fresh bias, a norm's scale), equally in every session."""
    state = session.state_dict()
    rng = np.random.default_rng(1)
    for p in sorted(session.signature.parameters, key=lambda p: p.name):
        old = state[p.name]
        if old.dtype not in (np.float32, np.float64) or not old.size or not ((old == 0).all() or (old == 1).all()):
            continue
        new = np.asarray(old + rng.uniform(0.05, 0.1, old.shape), old.dtype)
        state |= dict.fromkeys((p.name, *p.tied), new)
    session.load_state_dict(state)


def _compare_values(
    want: _Run,
    noise: _Noise,
    got: _Run,
    mine: TrainingSession,
    batch: Mapping[str, np.ndarray],
    tolerance: Tolerance,
) -> dict[str, float]:
    """Differences of model outputs and new values; what a step of ``mine`` leaves behind is compared, too."""
    signature = mine.signature
    skip = {signature.loss, *signature.gradients.values()}
    weights = {p.update: p.name for p in signature.parameters if p.update is not None}
    old = mine.state_dict()
    names = [n for n in want.values if n in got.values and n not in skip]
    sizes = {
        n: max(
            _size(want.values[n], old.get(weights.get(n, ""))),
            _NOISE * tolerance.noise * _finite(noise.values[n]) / tolerance.gradient,
        )
        for n in names
    }
    errors = {n: _error(got.values[n], want.values[n], sizes[n]) for n in names}
    if not mine.has_optimizer:
        return errors
    stored = {s.output: s.name for s in signature.states if s.output is not None and s.kind != "accumulator"}
    stored |= weights | {b.update: b.name for b in signature.buffers if b.update is not None}
    mine.step(batch)
    now = {**mine.optimizer_state_dict(), **mine.state_dict()}
    for name in names:
        if name in stored:
            errors[name] = max(errors[name], _error(now[stored[name]], want.values[name], sizes[name]))
    return errors


def _size(want: np.ndarray, old: np.ndarray | None) -> float:
    """Norm of a value, for a parameter that of its change."""
    finite = np.where(np.isfinite(want), want, 0)
    if old is None:
        return _norm(finite)
    return max(_norm(np.where(np.isfinite(want), finite - old, 0)), _UPDATE_FLOOR * _norm(old))


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
