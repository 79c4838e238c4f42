"""PassManager: runs passes over a training graph, holds them to the truth, and tells what they did."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from ortgraph.errors import OrtgraphError, PassError
from ortgraph.graph import STAGES, TrainingGraph
from ortgraph.graph import verify as rules
from ortgraph.graph.fingerprint import Fingerprint, compare, fingerprint
from ortgraph.graph.text import text_hash
from ortgraph.manager.base import GraphPass, Outcome, Refusal
from ortgraph.manager.draws import draws_in
from ortgraph.manager.instruments import Instrument
from ortgraph.manager.pipeline_text import pipeline_text

logger = logging.getLogger(__name__)
Look = tuple[str, Fingerprint]


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """What one pass did. ``seconds`` is the pass alone, ``verify_seconds`` what checking it cost."""

    name: str
    text: str
    modified: bool
    counts: Mapping[str, int]
    refusals: tuple[Refusal, ...]
    seconds: float
    verify_seconds: float
    nodes_before: int
    nodes_after: int

    def to_dict(self) -> dict[str, object]:
        record = dataclasses.asdict(self)
        record["refusals"] = len(self.refusals)
        return record


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """All records of one run of a pipeline."""

    pipeline: str
    passes: tuple[PassRecord, ...]
    nodes_before: int
    nodes_after: int
    verified: str
    seconds: float

    def to_dict(self) -> dict[str, object]:
        return {
            "pipeline": self.pipeline,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "verified": self.verified,
            "seconds": self.seconds,
            "passes": [p.to_dict() for p in self.passes],
        }


@dataclasses.dataclass(frozen=True)
class PassManager:
    """Runs passes in order: ours and any ``onnx_ir`` pass.

    Attributes:
        passes: In order. A foreign pass runs under the same verification as ours.
        verify: Level checked after each pass (``off``, ``structure``, ``signature``, ``types``, ``runtime``).
        instruments: Observers with before, after and failed hooks.
        passes_after: Extra passes per stage, run as soon as the graph has reached it.
    """

    passes: Sequence[ir.passes.PassBase]
    verify: str = "signature"
    instruments: Sequence[Instrument] = ()
    passes_after: Mapping[str, Sequence[ir.passes.PassBase]] = dataclasses.field(default_factory=dict)

    def run(self, graph: TrainingGraph) -> PipelineReport:
        """Rewrite ``graph`` in place.

        Raises:
            PassError: A pass raised, lied about its change, or was used at the wrong stage.
            VerificationError: A pass broke an invariant; names the rule, the pass and the place.
        """
        started, nodes = time.perf_counter(), graph.node_count()
        if self.verify not in ("off", *rules.LEVELS[:-1]):
            raise PassError(
                f"unknown verification level {self.verify!r}", "off, structure, signature, types or runtime"
            )
        if self.verify != "off":
            rules.verify(graph, self.verify, by="(input graph)")
        sequence = self.sequence(graph.stage)
        records = []
        with _collector_paused():
            before = _look(graph) if self.verify != "off" else None
            for p in sequence:
                record, before = self._run_pass(p, graph, before)
                records.append(record)
        seconds = time.perf_counter() - started
        return PipelineReport(pipeline_text(sequence), tuple(records), nodes, graph.node_count(), self.verify, seconds)

    def sequence(self, stage: str) -> list[ir.passes.PassBase]:
        """The passes with those of ``passes_after`` put where the pipeline leaves their stage."""
        unknown = set(self.passes_after) - set(STAGES)
        if unknown:
            raise PassError(f"passes_after names unknown stage {sorted(unknown)[0]!r}", f"one of {', '.join(STAGES)}")
        sequence: list[ir.passes.PassBase] = list(self.passes_after.get(stage, ()))
        for p in self.passes:
            sequence.append(p)
            moved = getattr(p, "sets_stage", None)
            if moved is not None and moved != stage:
                stage = moved
                sequence.extend(self.passes_after.get(stage, ()))
        return sequence

    def _run_pass(
        self, p: ir.passes.PassBase, graph: TrainingGraph, before: Look | None
    ) -> tuple[PassRecord, Look | None]:
        """Run one pass. ``before`` is the graph as the last pass left it; returned is how this one leaves it."""
        name = p.name if isinstance(p, GraphPass) else type(p).__name__
        moves = isinstance(p, GraphPass) and p.sets_stage is not None
        if isinstance(p, GraphPass) and graph.stage not in p.stages:
            raise PassError(
                f"pass {name} runs at stage {' or '.join(p.stages)}, the graph is {graph.stage}",
                "put it earlier in the pipeline, or start from an earlier graph",
            )
        nodes_before = graph.node_count()
        after: Look | None = None
        for instrument in self.instruments:
            instrument.before(p, graph)
        started = time.perf_counter()
        try:
            outcome = _call(p, graph, name)
            seconds = time.perf_counter() - started
            checking = time.perf_counter()
            if moves:
                graph.signature = graph.signature.replace(stage=p.sets_stage)  # type: ignore[attr-defined]
            if before is not None:
                after = self._check(p, name, graph, outcome, before)
            verify_seconds = time.perf_counter() - checking
        except OrtgraphError as error:
            for instrument in self.instruments:
                instrument.failed(p, graph, error)
            raise
        record = PassRecord(
            name,
            str(p) if isinstance(p, GraphPass) else name,
            outcome.modified,
            dict(outcome.counts),
            outcome.refusals,
            seconds,
            verify_seconds,
            nodes_before,
            graph.node_count(),
        )
        logger.debug("%s: modified=%s %s", name, record.modified, record.counts)
        for instrument in self.instruments:
            instrument.after(p, graph, record)
        return record, after

    def _check(
        self,
        p: ir.passes.PassBase,
        name: str,
        graph: TrainingGraph,
        outcome: Outcome,
        before: Look,
    ) -> Look:
        if not graph.has_signature:
            raise PassError(f"pass {name} removed the signature from the model's metadata", "keep ortgraph.* metadata")
        moves = isinstance(p, GraphPass) and p.sets_stage is not None
        rules.verify(graph, self.verify, by=name)
        after = _look(graph)
        changed = after[0] != before[0]
        if moves or not isinstance(p, GraphPass):
            # Foreign passes count metadata and names as change; the record tells what a runtime sees.
            outcome.modified = changed
        elif changed and not outcome.modified:
            raise PassError(f"pass {name} changed the graph and says that it did not", "count every change")
        elif outcome.modified and not changed:
            raise PassError(f"pass {name} says that it changed the graph and did not", "count changes, not candidates")
        binds = getattr(p, "binds_inputs", False)
        compare(before[1], after[1], name, moves_stage=moves, binds_inputs=binds)
        return after


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: it walks the whole graph again and again as passes allocate."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _look(graph: TrainingGraph) -> Look:
    """What is compared around a pass: a hash of the text, and what must survive."""
    return text_hash(graph), fingerprint(graph, draws_in(graph))


def _call(p: ir.passes.PassBase, graph: TrainingGraph, name: str) -> Outcome:
    """Run any onnx_ir pass on the graph; a functional one's new model replaces the old."""
    try:
        result = p(graph.model)
    except OrtgraphError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a foreign pass may raise anything; the cause is chained
        raise PassError(
            f"pass {name} raised {type(error).__name__}: {error}", "write a reproducer with --reproducer DIR"
        ) from error
    graph.model = result.model
    if isinstance(result, Outcome):
        return result
    return Outcome(result.model, result.modified, {"modified": int(result.modified)})
