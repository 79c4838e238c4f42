"""Time per node, from ONNX Runtime's own profile."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class NodeTime:
    """Median kernel time of one node.

    Attributes:
        node: Node name.
        operator: ``domain.Op``, or ``Op`` for the ONNX standard.
        microseconds: Median over the profiled runs.
    """

    node: str
    operator: str
    microseconds: float


def read_profile(path: str | pathlib.Path, operators: dict[str, str], skip: int = 1) -> list[NodeTime]:
    """Kernel times of a profile file, in order of execution; the first ``skip`` runs (warm-up) are left out."""
    suffix = "_kernel_time"
    times: dict[str, list[float]] = {}
    for event in json.loads(pathlib.Path(path).read_text()):
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith(suffix):
            times.setdefault(name.removesuffix(suffix), []).append(float(event["dur"]))
    return [
        NodeTime(name, operators.get(name, "?"), statistics.median(found[skip:] or found))
        for name, found in times.items()
    ]


def by_operator(times: Iterable[NodeTime]) -> dict[str, tuple[int, float]]:
    """(node count, microseconds) by operator, the dearest first."""
    sums: dict[str, tuple[int, float]] = {}
    for t in times:
        count, total = sums.get(t.operator, (0, 0.0))
        sums[t.operator] = (count + 1, total + t.microseconds)
    return dict(sorted(sums.items(), key=lambda item: (-item[1][1], item[0])))
