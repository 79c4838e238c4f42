"""Planned against measured memory and time of training steps in the runtime, beside PyTorch and ONNX Runtime alone.

Memory is measured in fresh processes (``ortgraph.runtime.measure_memory``). Time: the planned and the unplanned step run in
turn in this process; the median of ratios is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.memory_rows import Row, row, stopwatch
from bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from bench.memory import Setup
    from ortgraph.graph import TrainingGraph
    from ortgraph.runtime.session import TrainingSession

SUITE = "runtime"
THREADS = 2
ROUNDS = 60
MARGIN = 0.97  # of what the process may take is planned: measured memory is within 3 % of planned
DEVIATION = 3.0  # percent between measured and planned plus declared temporaries
# GPT 4x128: (bytes, added step time in percent at most).
GPT = "gpt-128x4"
GPT_BUDGETS = ((30_000_000, 5.0), (24_000_000, 15.0))
AGAINST_PYTORCH = ("bert-base-8x128", "resnet-18")
ADDED_TIME = 10.0  # percent, at half of PyTorch's peak


def run(setup: Setup) -> Iterator[Row]:
    if setup.wants(GPT):
        yield from _gpt()
    for name in AGAINST_PYTORCH:
        if setup.wants(name):
            yield from _against_pytorch(name)


def _gpt() -> Iterator[Row]:
    from ortgraph.runtime.measure_memory import measure_pytorch, measure_unplanned

    work = _Workload(GPT)
    raw = measure_unplanned(work.captured, work.batch, THREADS)
    yield row(SUITE, GPT, "ONNX Runtime alone, captured graph: measured bytes", raw.peak)
    peer = measure_pytorch("bench.memory_runtime:build", {"name": GPT}, THREADS)
    yield row(SUITE, GPT, "PyTorch eager: measured bytes", peer.peak)
    for clipped in (False, True):
        yield from _step(work, None, clipped)
    for budget, added in GPT_BUDGETS:
        yield from _step(work, budget, False, added)


def _against_pytorch(name: str) -> Iterator[Row]:
    from ortgraph.runtime.measure_memory import measure_pytorch

    work = _Workload(name)
    with stopwatch() as watch:
        peer = measure_pytorch("bench.memory_runtime:build", {"name": name}, THREADS)
    yield row(SUITE, name, "PyTorch eager: measured bytes", peer.peak, seconds=watch.wall)
    yield from _step(work, None, False)
    yield from _step(work, peer.peak // 2, False, ADDED_TIME, peer.peak // 2)


def _step(
    work: _Workload, budget: int | None, clipped: bool, added: float | None = None, most: int | None = None
) -> Iterator[Row]:
    """Rows of a training step: measured and planned bytes, their deviation, added time, equal bits."""
    from ortgraph.runtime.measure_memory import measure_step

    mode = "clipped step" if clipped else "step"
    label = mode if budget is None else f"{mode} at {budget / 1e6:.1f} MB"
    with stopwatch() as watch:
        graph = work.optimized(None if budget is None else int(MARGIN * budget), clipped)
    found = measure_step(graph, work.batch, "step", THREADS)
    limit = budget if most is None else most
    yield row(
        SUITE, work.name, f"{label}: measured bytes", found.peak,
        bound=found.max_load, at_most=limit, seconds=watch.wall,
    )  # fmt: skip
    yield row(SUITE, work.name, f"{label}: planned bytes", found.planned, bound=found.max_load)
    yield row(SUITE, work.name, f"{label}: declared temporaries, bytes", found.temporaries)
    yield row(SUITE, work.name, f"{label}: |measured/planned - 1| %", 100 * abs(found.deviation), at_most=DEVIATION)
    if budget is None:
        return
    with stopwatch() as watch:
        ratios, equal = _compare(work, work.optimized(None, clipped), graph)
    low, middle, high = (100 * (q - 1) for q in statistics.quantiles(ratios, n=4))
    spread = f"{label}: added step time %"
    yield row(SUITE, work.name, spread, middle, at_most=added, seconds=watch.wall)
    yield row(SUITE, work.name, f"{spread}, lower quartile", low)
    yield row(SUITE, work.name, f"{spread}, upper quartile", high)
    yield row(SUITE, work.name, f"{label}: states that differ from the unplanned graph", equal, at_most=0)


def _compare(work: _Workload, plain: TrainingGraph, tight: TrainingGraph) -> tuple[list[float], int]:
    """Time ratios of steps run in turn, and the number of parameters and states that differ in any bit afterwards."""
    import ortgraph

    sides = [ortgraph.TrainingSession(graph, threads=THREADS) for graph in (plain, tight)]
    for _ in range(3):
        for session in sides:
            session.step(work.batch)
    rounds = ROUNDS if _seconds(sides[0], work.batch) < 0.5 else 7
    ratios = []
    for _ in range(rounds):
        times = [_seconds(session, work.batch) for session in sides]
        ratios.append(times[1] / times[0])
    _seconds(sides[1], work.batch)  # as many steps as the other side
    a, b = (session.state_dict() for session in sides)
    return ratios, sum(not np.array_equal(np.asarray(a[k]), np.asarray(b[k])) for k in a)


def _seconds(session: TrainingSession, batch: Mapping[str, Any]) -> float:
    started = time.perf_counter()
    session.step(batch)
    return time.perf_counter() - started


class _Workload:
    """A workload, captured once."""

    def __init__(self, name: str) -> None:
        import ortgraph

        made = WORKLOADS[name]()
        self.name = name
        self.batch = {k: v.numpy() for k, v in made["batch"].items()}
        self.captured = ortgraph.capture(made["module"], made["batch"])

    def optimized(self, budget: int | None, clipped: bool) -> TrainingGraph:
        import ortgraph

        optimizer = ortgraph.optim.AdamW(lr=1e-4, max_grad_norm=1.0 if clipped else None)
        return ortgraph.optimize(self.captured, "O2", optimizer=optimizer, memory_budget=budget).graph


def build(name: str) -> dict[str, Any]:
    """For the PyTorch worker."""
    return WORKLOADS[name]()
