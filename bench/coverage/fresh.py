"""Saved graphs in a process of their own: ``python -m bench.coverage.fresh FOLDER``.

For every ``NAME.onnx`` in the folder: loss and gradients of the batch in ``batch.npz`` and, with an optimizer, the state
after some steps, written to ``NAME.npz``.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping

import numpy as np

STEPS = 5


def run(graph: object, batch: Mapping[str, np.ndarray], threads: int) -> dict[str, np.ndarray]:
    """``loss``, ``gradient/<name>`` and, with an optimizer, ``state/<name>`` after ``STEPS`` steps.

    Raises:
        AssertionError: Gradients repeated within the session have other bits.
    """
    import ortgraph

    assert isinstance(graph, ortgraph.TrainingGraph)
    session = ortgraph.TrainingSession(graph, threads=threads)
    found = {f"gradient/{n}": g for n, g in session.gradients(batch).items()}
    for name, again in session.gradients(batch).items():
        assert again.tobytes() == found[f"gradient/{name}"].tobytes(), (
            f"repeated, the gradient of {name} has other bits"
        )
    if not any(p.update for p in graph.signature.parameters):
        return {**found, "loss": np.asarray(session.loss(batch))}
    found["loss"] = np.asarray([session.step(batch) for _ in range(STEPS)][0])
    return {**found, **{f"state/{n}": v for n, v in session.state_dict().items()}}


def main() -> None:
    import ortgraph

    folder = pathlib.Path(sys.argv[1])
    with np.load(folder / "batch.npz") as stored:
        batch = dict(stored)
    for path in sorted(folder.glob("*.onnx")):
        np.savez(path.with_suffix(".npz"), **run(ortgraph.load(path), batch, threads=2))


if __name__ == "__main__":
    main()
