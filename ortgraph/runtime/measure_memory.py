"""Measured memory: how far a training step raises the resident size of a fresh process, beside what was planned.

A worker process runs the step once to warm up (code is paged in, threads and the runtime's own tables exist), gives all
pages of the arena and all free memory back, starts a new high-water mark and runs the step again. What the mark rises by
is the arena, kernel temporaries, and nothing else: parameters, states and batch are resident before and after, and so are
code and graph, which are reported as a line of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from ortgraph.errors import InputError, RuntimeSetupError
from ortgraph.graph import TrainingGraph

KINDS = ("step", "accumulate", "gradients", "loss")


@dataclasses.dataclass(frozen=True)
class MeasuredMemory:
    """Bytes of one training step.

    Attributes:
        peak: Rise of the resident size during the step: arena and temporaries. Figures of PyTorch and of ONNX Runtime by
            itself mean the same: everything but parameters, states, batch, code and graph.
        arena: Planned bytes of the arena (0 where there is no plan).
        max_load: The lower bound of the arena.
        temporaries: Declared scratch of the kernel that needs most.
        parameters: Parameters and buffers.
        states: Optimizer and random states.
        batch: The batch.
        session: Resident size of everything else: interpreter, libraries, graph, runtime.
        milliseconds: Median time of a step in that process.
    """

    peak: int
    arena: int = 0
    max_load: int = 0
    temporaries: int = 0
    parameters: int = 0
    states: int = 0
    batch: int = 0
    session: int = 0
    milliseconds: float = 0.0

    @property
    def planned(self) -> int:
        """Arena and declared temporaries: what the peak should be."""
        return self.arena + self.temporaries

    @property
    def deviation(self) -> float:
        """peak / planned - 1, 0 without a plan."""
        return self.peak / self.planned - 1 if self.planned else 0.0


def measure_step(
    graph: TrainingGraph, batch: Mapping[str, Any], kind: str = "step", threads: int | None = None, runs: int = 5
) -> MeasuredMemory:
    """Measured memory of a program of ``TrainingSession`` in a fresh process.

    Args:
        graph: At any stage.
        batch: As for ``TrainingSession.step``, by input name.
        kind: ``step``, ``accumulate``, ``gradients`` or ``loss``.
        threads: Threads of one operator.
        runs: Steps that are timed.

    Raises:
        InputError: ``kind`` is not one of those.
        RuntimeSetupError: The worker failed, or this is not Linux with glibc.
    """
    if kind not in KINDS:
        raise InputError(f"cannot measure {kind!r}", f"one of {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "graph.onnx")
        graph.save(path)
        _save_batch(folder, batch)
        return _measured({"what": "step", "graph": str(path), "kind": kind, "threads": threads, "runs": runs}, folder)


def measure_unplanned(
    graph: TrainingGraph, batch: Mapping[str, Any], threads: int | None = None, optimized: bool = True, runs: int = 5
) -> MeasuredMemory:
    """Measured memory of loss and gradients in ONNX Runtime by itself: its own order, allocator and memory pattern.

    Args:
        graph: At any stage; what is not lowered is replaced by expansions in standard operators.
        batch: By input name.
        threads: Threads of one operator.
        optimized: With ONNX Runtime's own graph optimizations.
        runs: Runs that are timed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "graph.onnx")
        graph.save(path)
        _save_batch(folder, batch)
        task = {"what": "unplanned", "graph": str(path), "threads": threads, "optimized": optimized, "runs": runs}
        return _measured(task, folder)


def measure_pytorch(
    build: str, options: Mapping[str, Any] | None = None, threads: int | None = None, runs: int = 5
) -> MeasuredMemory:
    """Measured memory of forward and backward in eager PyTorch, gradients included, in a fresh process.

    Args:
        build: ``package.module:function`` or ``file.py:function``; returns a dict with ``module``, ``batch`` (dict or
            tuple of tensors) and optionally ``loss`` (output name, or a function of the outputs).
        options: Keyword arguments of the function.
        threads: PyTorch's threads.
        runs: Steps that are timed.
    """
    task = {"what": "pytorch", "build": build, "options": dict(options or {}), "threads": threads, "runs": runs}
    with tempfile.TemporaryDirectory() as folder:
        return _measured(task, folder)


def _save_batch(folder: str, batch: Mapping[str, Any]) -> None:
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    np.savez(pathlib.Path(folder, "batch.npz"), **arrays)  # type: ignore[arg-type]


def _measured(task: dict[str, Any], folder: str) -> MeasuredMemory:
    threads = task["threads"]
    limits = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    paths = os.pathsep.join(p for p in (os.getcwd(), os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, "-m", "ortgraph.runtime.memory_worker", folder],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        env={**os.environ, **limits, "PYTHONPATH": paths},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeSetupError(f"measuring memory failed: {last}", "run the same step in this process to see why")
    return MeasuredMemory(**json.loads(done.stdout.splitlines()[-1]))
