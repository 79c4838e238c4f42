"""Rows of the step benchmark: one peer on one workload each, and what they come to against the targets."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

EAGER, COMPILE, RAW = "PyTorch eager", "torch.compile", "ONNX Runtime"
PYTORCH = (EAGER, COMPILE)
BEST, STOCK, ALL = "best", "stock", "all optimizations"


@dataclasses.dataclass(frozen=True)
class Row:
    """One peer at one setting on one workload. A peer that has several forms counts with its fastest.

    Attributes:
        workload: Name.
        precision: ``fp32`` or ``bf16``.
        peer: ``PyTorch eager``, ``torch.compile`` or ``ONNX Runtime`` (the raw joint graph).
        setting: ``best`` or ``stock``; of ONNX Runtime ``all optimizations``.
        ratio_median: Peer's time over ours, per round; above 1 we are faster. None with an error.
        ratio_low, ratio_high: Quartiles.
        ms_ortgraph: Median time of our step.
        ms_peer: Median time of the peer's step.
        peak_fraction: Matrix operations of the captured graph per second of our step, over the machine's best rate on the
            same products; None when it was not measured.
        form: The peer's attention implementation that was fastest, or empty.
        error: Why there is no ratio.
        threads, rounds, steps, machine: How it was measured.
    """

    workload: str
    precision: str
    peer: str
    setting: str
    ratio_median: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ms_ortgraph: float | None = None
    ms_peer: float | None = None
    peak_fraction: float | None = None
    form: str = ""
    error: str | None = None
    threads: int = 0
    rounds: int = 0
    steps: int = 0
    machine: str = ""


def measured(row: Row, pairs: Sequence[tuple[float, float]]) -> Row:
    """The row with its figures, from (our seconds, the peer's seconds) of each round."""
    ratios = [peer / ours for ours, peer in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return dataclasses.replace(
        row,
        ratio_median=middle,
        ratio_low=low,
        ratio_high=high,
        ms_ortgraph=1e3 * statistics.median(ours for ours, _ in pairs),
        ms_peer=1e3 * statistics.median(peer for _, peer in pairs),
        rounds=len(pairs),
    )


def fastest(rows: Iterable[Row]) -> Row:
    """The form of a peer that takes least time; the first that failed when all did."""
    rows = list(rows)
    good = [r for r in rows if r.ratio_median is not None]
    return min(good, key=lambda r: r.ratio_median or 0.0) if good else rows[0]


def write_json(rows: Iterable[Row], path: str | pathlib.Path) -> None:
    """A list of objects with the fields of Row."""
    text = json.dumps([dataclasses.asdict(r) for r in rows], indent=1, allow_nan=False)
    pathlib.Path(path).write_text(text + "\n", "utf-8")


def read_json(path: str | pathlib.Path) -> list[Row]:
    """The rows of a file; fields that this release does not know are left out."""
    known = {f.name for f in dataclasses.fields(Row)}
    objects: list[dict[str, Any]] = json.loads(pathlib.Path(path).read_text("utf-8"))
    return [Row(**{k: v for k, v in o.items() if k in known}) for o in objects]


def geometric_mean(values: Sequence[float]) -> float | None:
    """None without values."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


@dataclasses.dataclass(frozen=True)
class Target:
    """What has to be reached against the fastest of some peers.

    Attributes:
        against: The peers, in words.
        precision: Rows that count.
        peers, setting: Rows that count.
        mean: Geometric mean over the workloads.
        worst: Of the worst workload; None where nothing is asked.
        workloads: Rows that count; empty means all.
    """

    against: str
    precision: str
    peers: tuple[str, ...]
    setting: str
    mean: float
    worst: float | None = None
    workloads: tuple[str, ...] = ()


_MASKED = ("bert-mlm-256x4",)
TARGETS = (
    Target("PyTorch (eager or compiled), best setting", "fp32", PYTORCH, BEST, 1.25, 1.05),
    Target("PyTorch (eager or compiled), stock", "fp32", PYTORCH, STOCK, 2.2, 1.1),
    Target("PyTorch (eager or compiled), bf16 autocast", "bf16", PYTORCH, BEST, 1.5, 1.15),
    Target("ONNX Runtime, raw joint graph", "fp32", (RAW,), ALL, 1.4, 1.2),
    Target("PyTorch on masked LM, best setting", "fp32", PYTORCH, BEST, 2.0, None, _MASKED),
    Target("PyTorch on masked LM, bf16 autocast", "bf16", PYTORCH, BEST, 2.0, None, _MASKED),
)
PEAK_TARGETS = {("bert-768x4", "fp32"): 0.75, ("bert-768x4", "bf16"): 0.60}


@dataclasses.dataclass(frozen=True)
class Result:
    """What rows come to against a target.

    Attributes:
        ratios: Our gain by workload, over the fastest peer.
        missing: Workloads without a figure.
    """

    target: Target
    ratios: dict[str, float]
    missing: tuple[str, ...]

    @property
    def mean(self) -> float | None:
        return geometric_mean(list(self.ratios.values()))

    @property
    def worst(self) -> tuple[str, float] | None:
        return min(self.ratios.items(), key=lambda item: item[1]) if self.ratios else None

    @property
    def met(self) -> bool:
        """Both figures reached, and no workload is missing."""
        if self.mean is None or self.worst is None or self.missing:
            return False
        return self.mean >= self.target.mean and (self.target.worst is None or self.worst[1] >= self.target.worst)


def results(rows: Iterable[Row]) -> list[Result]:
    """The targets that some row bears on."""
    rows, found = list(rows), []
    for target in TARGETS:
        counted = [r for r in rows if _counts(r, target)]
        names = list(dict.fromkeys(r.workload for r in counted))
        best = {n: fastest(r for r in counted if r.workload == n).ratio_median for n in names}
        if names:
            ratios = {n: ratio for n, ratio in best.items() if ratio is not None}
            found.append(Result(target, ratios, tuple(n for n in names if n not in ratios)))
    return found


def _counts(row: Row, target: Target) -> bool:
    fits = row.precision == target.precision and row.peer in target.peers and row.setting == target.setting
    return fits and (not target.workloads or row.workload in target.workloads)


def peaks(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Share of the matrix peak by workload and precision."""
    return {(r.workload, r.precision): r.peak_fraction for r in rows if r.peak_fraction is not None}
