"""GraphPass: a pass is a frozen dataclass that is also an ``onnx_ir`` pass."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

import onnx_ir as ir

from ortgraph.errors import PassError
from ortgraph.graph import STAGES, TrainingGraph


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a candidate was left alone: shown by ``--explain``."""

    node: str
    reason: str


@dataclasses.dataclass
class Outcome(ir.passes.PassResult):
    """What a pass did: ``modified`` is truthful (a hash of the graph checks it), counts are by name."""

    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()


@dataclasses.dataclass
class Changes:
    """What ``GraphPass.run`` returns. The graph is modified when any count is positive."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class GraphPass(ir.passes.InPlacePass):
    """Base of ortgraph's passes. Options are the dataclass fields; no state on ``self``.

    Class attributes:
        name: Command-line name, a verb in kebab case (``fuse-bias-gelu``).
        stages: Stages at which the pass may run.
        sets_stage: Stage of the graph after the pass, for the few passes that move it.
    """

    name: ClassVar[str] = ""
    stages: ClassVar[tuple[str, ...]] = STAGES
    sets_stage: ClassVar[str | None] = None

    def run(self, graph: TrainingGraph) -> Changes:
        """Rewrite ``graph.model`` in place and say what was done."""
        raise NotImplementedError

    def call(self, model: ir.Model) -> Outcome:
        changes = self.run(TrainingGraph(model))
        if not isinstance(changes, Changes):
            raise PassError(f"run of pass {self.name!r} returned {type(changes).__name__}", "return the Changes made")
        counts = {k: v for k, v in changes.counts.items() if v}
        return Outcome(model, bool(counts), counts, tuple(changes.refusals))

    def __str__(self) -> str:
        options = [
            f"{f.name}={_option_text(value)}"
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default
        ]
        return f"{self.name}{{{' '.join(options)}}}" if options else self.name


def _option_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "|".join(map(str, value))
    return str(value)
