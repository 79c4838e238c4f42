"""What lowering saves before anything is planned: scores of a large vocabulary in chunks, against whole ones.

Memory is measured in fresh processes (``ortgraph.runtime.measure_memory``). Time is processor time of one thread, steps
run in turn, the median of ratios: chunks cost work (each packs the weight anew), not waiting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.memory_rows import Row, row, stopwatch
from bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from bench.memory import Setup
    from ortgraph.graph import TrainingGraph

SUITE = "lowering"
MODELS = ("gpt2-32k-128x2", "gpt2-32k-512x2")
ROWS = (256, 128)
ROUNDS = 11
ADDED_TIME = {256: 3.0}  # percent at most, for the size of chunk that O2 takes


def run(setup: Setup) -> Iterator[Row]:
    for name in MODELS:
        if setup.wants(name):
            yield from _chunks(name)


def _chunks(name: str) -> Iterator[Row]:
    import ortgraph
    from ortgraph.runtime.measure_memory import measure_step

    made = WORKLOADS[name]()
    batch = {k: v.numpy() for k, v in made["batch"].items()}
    captured = ortgraph.capture(made["module"], made["batch"])
    classes, rows = made["module"].config.vocab_size, batch["labels"].size
    sessions = {}
    whole = 0
    for size in (0, *ROWS):
        with stopwatch() as watch:
            graph = _optimized(captured, size)
            found = measure_step(graph, batch, "step", 2)
        label = f"chunks of {size} rows" if size else "whole scores"
        saved = (rows - size) * classes * 4 if size else 0
        most = 1.01 * (whole - saved) if size else None  # the peak falls by the scores that no longer exist
        yield row(
            SUITE, name, f"{label}: measured bytes", found.peak, bound=found.max_load, at_most=most, seconds=watch.wall
        )
        whole = whole or found.peak
        sessions[size] = ortgraph.TrainingSession(graph, threads=1)
    times: dict[int, list[float]] = {size: [] for size in sessions}
    for session in sessions.values():
        session.step(batch)
    for _ in range(ROUNDS):
        for size, session in sessions.items():
            started = time.process_time()
            session.step(batch)
            times[size].append(time.process_time() - started)
    for size in ROWS:
        ratio = statistics.median(a / b for a, b in zip(times[size], times[0], strict=True))
        yield row(
            SUITE,
            name,
            f"chunks of {size} rows: added processor time %",
            100 * (ratio - 1),
            at_most=ADDED_TIME.get(size),
        )


def _optimized(captured: TrainingGraph, rows: int) -> TrainingGraph:
    """O2 with chunks of that many rows, or with whole scores."""
    import ortgraph
    from ortgraph.manager import registry
    from ortgraph.passes.memory.chunk_loss import ChunkLoss

    chunks = ChunkLoss(least_bytes=0, rows=rows) if rows else ChunkLoss(least_bytes=1 << 62)
    optimizer = ortgraph.optim.AdamW(lr=1e-4)
    preset = registry.preset("O2", optimizer=optimizer, target="onnxruntime-training", shapes={}, accumulation_steps=1)
    passes = [chunks if p.name == ChunkLoss.name else p for p in preset]
    return ortgraph.optimize(captured, passes).graph
