"""The proof of one case, from capture to a fresh process; the outcome is one row."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.coverage import measure
from bench.coverage.fresh import run
from bench.coverage.reference import LEARNING_RATE, Trained, trained
from bench.coverage.registry import Built, Case
from bench.coverage.replay import Draws
from ortgraph.errors import OrtgraphError

PIPELINES = ("O0", "O1", "O2")  # O3 is O2
CAPTURED = "captured"
# Not to be fused: products, which kernels are for, and views, which cost nothing.
FOUND_WHOLE = frozenset({
    "MatMul", "Gemm", "Conv", "ConvTranspose", "Gather", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Constant",
    "Shape", "Flatten",
})  # fmt: skip


class Disproved(Exception):
    """Something of a case is wrong; the text says what."""


@dataclasses.dataclass
class Row:
    """What is known about a case.

    Attributes:
        status: ``proven``, ``refused`` (as the family says), ``failed`` or ``skipped`` (a package is missing).
        message: The error of a refusal or failure.
        trainable: Number of trainable parameters.
        draws: Number of nodes that draw random numbers.
        nodes: By form: captured, then each pipeline.
        unfused: Standard operators left after the last pipeline, by name, apart from products and views.
        error: Worst relative error of a gradient against float64, of all forms and thread counts.
        own_error: The same of PyTorch float32.
        share: Largest error over what the measure allows.
        doubted: Gradients that were compared with PyTorch float32 only.
        moved: ``measure.Moved`` of the AdamW steps, worst of all pipelines.
        seconds: That the proof took.
    """

    case: str
    family: str
    kind: str
    status: str
    message: str = ""
    trainable: int = 0
    draws: int = 0
    nodes: dict[str, int] = dataclasses.field(default_factory=dict)
    unfused: dict[str, int] = dataclasses.field(default_factory=dict)
    error: float = 0.0
    own_error: float = 0.0
    share: float = 0.0
    doubted: list[str] = dataclasses.field(default_factory=list)
    moved: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def prove(case: Case, pipelines: Sequence[str] = PIPELINES, *, fresh: bool = True) -> Row:
    """Capture, compare, optimize, compare, train, compare, save, load in a fresh process, compare.

    Args:
        case: What to prove.
        pipelines: Presets, each tried on the captured graph.
        fresh: Whether to run the saved graphs in a fresh process.
    """
    row = Row(case.name, case.family.name, case.family.kind, "failed")
    start = time.perf_counter()
    missing = case.family.missing()
    if missing:
        row.status, row.message = "skipped", f"needs {', '.join(missing)}"
        return row
    try:
        _prove(case, row, pipelines, fresh)
        row.status = "proven"
    except (OrtgraphError, Disproved, AssertionError) as error:
        row.message = " ".join(str(error).split())
        if case.family.refused and isinstance(error, OrtgraphError) and case.family.refused in row.message:
            row.status = "refused"
    except Exception as error:  # noqa: BLE001 - a family that breaks is a row that says so, and the others go on
        row.message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    row.seconds = round(time.perf_counter() - start, 1)
    return row


def _prove(case: Case, row: Row, pipelines: Sequence[str], fresh: bool) -> None:
    import ortgraph

    built = case.build()
    captured = ortgraph.capture(built.module, built.batch, built.dynamic, built.loss)
    if case.family.refused:
        raise Disproved(f"captured, though it should be refused: {case.family.refused}")
    draws = Draws.of(captured)
    row.trainable, row.draws = len(captured.signature.gradients), len(draws.nodes)
    forms = {CAPTURED: captured}
    for pipeline in pipelines:
        optimizer = ortgraph.optim.AdamW(lr=LEARNING_RATE)
        result = ortgraph.optimize(captured, pipeline, optimizer=optimizer, verify="types")
        forms[pipeline] = result.graph
        row.unfused = _unfused(result.report.operators_after)
    row.nodes = {name: len(list(graph.graph)) for name, graph in forms.items()}
    batch = feeds(built)
    one, two = trained(case, draws, 1), trained(case, draws, 2)
    exact = trained(case, draws, 2, double=True)
    own = measure.gradients(one.gradients, one.gradients, exact.gradients)
    row.own_error, row.doubted = own.error, list(own.doubted)
    runs: dict[str, dict[str, np.ndarray]] = {}
    for name, graph in forms.items():
        for threads in (1, 2):
            runs[name] = run(graph, batch, threads)
            _check(f"{name} at {threads} threads", runs[name], one, two, exact, row)
    if fresh:
        _check_fresh(forms, batch, runs)


def feeds(built: Built) -> dict[str, np.ndarray]:
    """The tensors of a batch as arrays, by the names of the graph's inputs."""
    from ortgraph.capture.torch_batch import read_batch
    from ortgraph.capture.torch_module import is_criterion

    read = read_batch(built.module, built.batch, is_criterion(built.loss), has_loss=callable(built.loss))
    return {name: tensor.numpy() for name, tensor in zip(read.names, read.tensors, strict=True)}


def _check(where: str, got: Mapping[str, np.ndarray], one: Trained, two: Trained, exact: Trained, row: Row) -> None:
    """Loss, gradients and state of one run against PyTorch."""
    loss = float(got["loss"])
    if not abs(loss - exact.loss) <= measure.FACTOR * abs(one.loss - exact.loss) + 1e-6 * abs(exact.loss) + 1e-9:
        raise Disproved(f"{where}: the loss is {loss!r}, PyTorch's {one.loss!r}, in float64 {exact.loss!r}")
    found = measure.gradients(_group(got, "gradient/"), _owners(got, one.gradients), _owners(got, exact.gradients))
    row.error, row.share = max(row.error, found.error), max(row.share, found.share)
    if not found.share <= 1:
        raise Disproved(f"{where}: gradient {found.worst}: {found.share:.3g} times the error that is allowed")
    state = _group(got, "state/")
    if not state:
        return
    moved = measure.states(state, one.state, two.state, exact.state)
    if not row.moved or moved.share > row.moved["share"]:
        row.moved = dataclasses.asdict(moved)
    if not moved.share <= 1:
        raise Disproved(f"{where}: {moved.worst} after AdamW: {moved.share:.3g} times the difference that is allowed")


def _owners(got: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """PyTorch names a tied gradient several times: keep the names that the graph uses, and those it lacks."""
    have = {n.removeprefix("gradient/") for n in got if n.startswith("gradient/")}
    kept: dict[str, np.ndarray] = {}
    seen = [gradients[n] for n in have if n in gradients]
    for name, gradient in gradients.items():
        if name in have or not any(s.shape == gradient.shape and np.array_equal(s, gradient) for s in seen):
            kept[name] = gradient
    return kept


def _group(found: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {n.removeprefix(prefix): a for n, a in found.items() if n.startswith(prefix)}


def _same(where: str, again: Mapping[str, np.ndarray], first: Mapping[str, np.ndarray]) -> None:
    """Bit for bit."""
    wrong = [n for n in first if n not in again or again[n].tobytes() != first[n].tobytes()]
    if wrong:
        raise Disproved(f"{where}: {wrong[0]} and {len(wrong) - 1} more have other bits")


def _check_fresh(
    forms: Mapping[str, Any], batch: Mapping[str, np.ndarray], runs: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        np.savez(folder / "batch.npz", **batch)  # type: ignore[arg-type]
        for form, graph in forms.items():
            graph.save(folder / f"{form}.onnx")
        root = pathlib.Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-m", "bench.coverage.fresh", name],
            cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise Disproved(f"in a fresh process: {done.stderr.strip().splitlines()[-1]}")
        for form, first in runs.items():
            with np.load(folder / f"{form}.npz") as stored:
                _same(f"{form} in a fresh process", dict(stored), first)


def _unfused(operators: Mapping[str, int]) -> dict[str, int]:
    return {n: c for n, c in operators.items() if "." not in n and ":" not in n and n not in FOUND_WHOLE}
