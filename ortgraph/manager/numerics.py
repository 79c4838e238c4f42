"""Numerical comparison of two graphs of the same model: loss and every gradient on one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ortgraph.errors import VerificationError
from ortgraph.graph import TrainingGraph

# Rewrites re-associate float32 sums; 1e-4 is the design's bound where a float64 reference is too dear.
GRADIENT_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences between two graphs.

    Attributes:
        loss: |difference| / max(|loss|, 1e-6).
        gradients: Norm-wise relative difference per parameter, against max(its norm, 1e-6 of the median norm).
    """

    loss: float
    gradients: Mapping[str, float]

    @property
    def worst_gradient(self) -> tuple[str, float]:
        return max(self.gradients.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def equal(self) -> bool:
        return self.loss <= LOSS_TOLERANCE and self.worst_gradient[1] <= GRADIENT_TOLERANCE


def relative_errors(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Norm-wise relative error per name. A gradient far below the median norm is measured against the median."""
    norms = {k: float(np.linalg.norm(np.asarray(v, np.float64))) for k, v in want.items()}
    floor = 1e-2 * float(np.median(list(norms.values()))) if norms else 0.0
    errors = {}
    for name, reference in want.items():
        if name not in got:
            raise VerificationError(f"gradient of %{name} is missing", "check the signature")
        difference = float(np.linalg.norm(np.asarray(got[name], np.float64) - np.asarray(reference, np.float64)))
        error = difference / max(norms[name], floor, 1e-30)
        errors[name] = error if np.isfinite(error) else float("inf")
    return errors


def example_batch(graph: TrainingGraph, sizes: Mapping[str, int] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of the graph's input types: what was recorded at capture is not known, so integers are small.

    Args:
        sizes: Value per symbolic dimension; 2 when absent.
    """
    rng = np.random.default_rng(seed)
    sizes = sizes or {}
    batch = {}
    by_name = {v.name: v for v in graph.graph.inputs}
    for name in graph.signature.inputs:
        value = by_name[name]
        assert value.shape is not None and value.dtype is not None
        shape = tuple(d if isinstance(d, int) else sizes.get(str(d), 2) for d in value.shape)
        dtype = value.dtype.numpy()
        if dtype.kind in "iub":
            batch[name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            batch[name] = rng.standard_normal(shape).astype(dtype)
    return batch


def compare(
    reference: TrainingGraph, graph: TrainingGraph, batch: Mapping[str, np.ndarray], threads: int | None = None
) -> Comparison:
    """Run both graphs on one batch and compare loss and gradients. Neither commits anything."""
    from ortgraph.runtime.session import TrainingSession

    results = []
    for g in (reference, graph):
        session = TrainingSession(g, threads=threads)
        results.append((float(session.loss(batch)), session.gradients(batch)))
    (want_loss, want), (loss, got) = results
    difference = abs(loss - want_loss) / max(abs(want_loss), 1e-6)
    return Comparison(difference if np.isfinite(difference) else float("inf"), relative_errors(got, want))


def require_equal(
    reference: TrainingGraph, graph: TrainingGraph, batch: Mapping[str, np.ndarray], by: str, threads: int | None = None
) -> Comparison:
    """Raise VerificationError when loss or a gradient moved beyond the tolerances."""
    result = compare(reference, graph, batch, threads)
    if not result.equal:
        name, error = result.worst_gradient
        raise VerificationError(
            f"numbers changed after {by}: loss by {result.loss:.1e}, gradient of %{name} by {error:.1e}",
            "find the pass and the nodes with --bisect",
        )
    return result
