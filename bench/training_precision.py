"""Does mixed precision train as float32 does? The demo's classifier from the same weights, on the same batches, per seed.

    python -m bench.training_precision [--precision bf16] [--seeds 16] [--steps 200] [--json]

Both sides are ours and differ in ``precision`` alone. Compared is the mean loss over held-out documents after training,
which both compute in float32. The margin was fixed before the first run: the mean over seeds of (low - float32), and both
ends of its 90 % interval (Student's t), must lie within 3 % of float32's mean loss. Exits with 1 when they do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

MARGIN = 0.03  # of float32's mean held-out loss
CONFIDENCE = 0.9
_BATCH, _LR, _RAMP = 8, 5e-4, 10


def train(precision: str, seed: int, steps: int, threads: int, data: Any) -> float:
    """Mean held-out loss after ``steps`` steps; weights and batches follow from the seed."""
    import torch

    import ortgraph
    from ortgraph.cli.demo_model import make_model

    batches = list(data.batches(_BATCH, steps, seed))
    example = {k: torch.from_numpy(v) for k, v in batches[0].items()}
    captured = ortgraph.capture(make_model(seed=seed), example, loss=0)
    optimizer = ortgraph.optim.AdamW(lr=_LR, weight_decay=0.01)
    session = ortgraph.TrainingSession(
        ortgraph.optimize(captured, "O2", optimizer=optimizer, precision=precision).graph, threads=threads
    )
    for step, batch in enumerate(batches):
        session.step(batch, learning_rate=_LR * min(1.0, (step + 1) / _RAMP))
    rows = range(0, len(data.held_out) - _BATCH + 1, _BATCH)
    held_out = (data.held_out.batch(slice(r, r + _BATCH)) for r in rows)
    return statistics.mean(float(session.evaluate(batch)[session.signature.loss]) for batch in held_out)


def compare(full: list[float], low: list[float]) -> dict[str, Any]:
    """Mean difference with its interval, and whether all of it lies within the margin.

    Args:
        full: Losses in float32 by seed.
        low: Losses in the low precision, seeds in the same order; two at least.
    """
    from scipy import stats

    differences = [b - a for a, b in zip(full, low, strict=True)]
    mean, count = statistics.mean(differences), len(differences)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * statistics.stdev(differences) / count**0.5
    margin = MARGIN * statistics.mean(full)
    within = -margin <= mean - half and mean + half <= margin
    return {"difference": mean, "low": mean - half, "high": mean + half, "margin": margin, "within": within}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--seeds", type=int, default=16)  # why: five spread as far as the margin
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from ortgraph.cli.demo_data import load_demo_data

    data = load_demo_data()
    losses: dict[str, list[float]] = {"fp32": [], options.precision: []}
    for seed in range(options.seeds):
        for precision, found in losses.items():
            found.append(train(precision, seed, options.steps, options.threads, data))
        print(f"seed {seed}: " + ", ".join(f"{p} {v[-1]:.4f}" for p, v in losses.items()), file=sys.stderr)
    found = compare(losses["fp32"], losses[options.precision])
    if options.json:
        print(json.dumps({"precision": options.precision, "steps": options.steps, "losses": losses, **found}))
    else:
        print(
            f"held-out loss after {options.steps} steps, {options.seeds} seeds: {options.precision} - fp32 = "
            f"{found['difference']:+.4f} ({CONFIDENCE:.0%} interval {found['low']:+.4f} to {found['high']:+.4f}), "
            f"margin {found['margin']:.4f}: {'within' if found['within'] else 'NOT within'}"
        )
    sys.exit(0 if found["within"] else 1)


if __name__ == "__main__":
    main()
