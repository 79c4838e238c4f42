"""What ``ortgraph optimize`` does between reading and writing."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ortgraph.cli import options
from ortgraph.cli.optional_values import EVERY
from ortgraph.cli.output import Output
from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph

PASSES_BY_TOPIC = {"precision": "cast-precision", "lowering": "lower"}  # what --explain takes beside names of passes
BESIDE = {"lower": "fuse-regions"}  # a pass that decides about the same nodes: kernels for single ones, and for groups
LEVELS = ("off", "structure", "signature", "types", "runtime", "numerics")


@dataclasses.dataclass(frozen=True)
class Request:
    """What the options asked for, parsed and checked before any work."""

    pipeline: str
    optimizer: Any
    target: str
    budget: str | None
    precision: str
    overrides: str | None
    sizes: dict[str, int]
    batch: pathlib.Path | None
    verify: str
    explain: str | None
    print_after: str | None
    reproducer: pathlib.Path | None
    passes_after: dict[str, list[Any]]


def make_request(
    *,
    level: int,
    pipeline: str | None,
    optimizer: str | None,
    target: str,
    budget: str | None,
    precision: str,
    overrides: str | None,
    shapes: str | None,
    batch: pathlib.Path | None,
    verify: str,
    explain: str | None,
    print_after: str | None,
    reproducer: pathlib.Path | None,
    plugins: Sequence[pathlib.Path],
) -> Request:
    """Parse every option.

    Raises:
        InputError, PipelineSyntaxError: One of them cannot be used.
    """
    from ortgraph.manager import parse_pipeline, registry
    from ortgraph.manager.precision_option import precision_pass
    from ortgraph.ops.targets import target_of
    from ortgraph.plan.budget import check_budget

    if verify not in LEVELS:
        raise InputError(f"--verify: unknown level {verify!r}", f"one of {', '.join(LEVELS)}")
    target = target_of(target, "--target: ").text
    found = [cls for path in plugins for cls in registry.load_plugin(path)]
    inserted: dict[str, list[Any]] = {}
    if pipeline is None:  # a pipeline that is spelled out names its plugins itself
        for cls in found:
            try:
                made = cls()
            except TypeError as error:  # an option without a default
                raise InputError(
                    f"the plugin pass {cls.name!r} cannot be made without options: {error}",
                    "give its fields defaults, or name it with its options in -p",
                ) from error
            inserted.setdefault(getattr(cls, "after", "optimized"), []).append(made)
    else:
        parse_pipeline(pipeline)
    if pipeline is not None and optimizer is not None:
        raise InputError("--optimizer goes with a preset", "put attach-optimizer{optimizer=adamw} into -p")
    if pipeline is not None and budget is not None:
        raise InputError("--memory-budget goes with a preset", "put select-recompute{budget=...} into -p")
    if precision_pass(precision, overrides) and pipeline is not None:
        raise InputError(
            "--precision goes with a preset", "put cast-precision{precision=...} behind mark-optimized in -p"
        )
    explain = PASSES_BY_TOPIC.get(explain or "", explain)
    for name in (explain, print_after):
        if name not in (None, EVERY):
            registry.get(name)
    return Request(
        options.pipeline_of(level, pipeline),
        options.parse_optimizer(optimizer),
        target,
        None if budget is None else check_budget(budget),
        precision,
        overrides,
        options.parse_sizes(shapes),
        batch,
        verify,
        explain,
        print_after,
        reproducer,
        inserted,
    )


def apply(out: Output, graph: TrainingGraph, request: Request) -> Any:
    """Run the pipeline and the asked verification; returns the OptimizeResult.

    Raises:
        InputError: The file of the batch cannot be used.
        PassError, VerificationError: A pass or a check failed.
    """
    from ortgraph.cli.instruments import PrintAfter
    from ortgraph.manager.instruments import Instrument, Progress, Reproducer
    from ortgraph.manager.numerics import require_equal
    from ortgraph.manager.optimize import optimize

    if request.batch is not None:  # also where no check reads it: a wrong file is told, and before the work
        options.batch_of(graph, request.sizes, request.batch)
    with out.progress("optimizing") as tell:
        instruments: list[Instrument] = [Progress(tell)]
        if request.print_after is not None:
            only = None if request.print_after == EVERY else request.print_after
            instruments.append(PrintAfter(out, only))
        if request.reproducer is not None:
            instruments.append(Reproducer(request.reproducer))
        result = optimize(
            graph, request.pipeline, optimizer=request.optimizer, target=request.target,
            memory_budget=request.budget, shapes=request.sizes or None,
            precision=request.precision, precision_overrides=request.overrides,
            passes_after=request.passes_after, verify="runtime" if request.verify == "numerics" else request.verify,
            instruments=instruments,
        )  # fmt: skip
    if request.verify == "numerics":
        with out.progress("comparing loss and gradients"):
            require_equal(
                graph,
                result.graph,
                options.batch_of(graph, request.sizes, request.batch),
                request.pipeline,
            )
    return result


def find_culprit(out: Output, graph: TrainingGraph, request: Request) -> dict[str, Any] | None:
    """Bisect the pipeline and show the culprit; None when every pass keeps loss and gradients."""
    from ortgraph.manager.bisect import bisect

    passes = _passes(graph, request)
    feeds = options.batch_of(graph, request.sizes, request.batch)
    with out.progress("bisecting", total=len(passes)) as tell:
        culprit = bisect(graph, passes, feeds, tell=lambda name: tell(name, advance=1))
    if culprit is None:
        out.say("bisect: every pass keeps loss and gradients")
        return None
    rewrite = f", rewrite number {culprit.rewrite}" if culprit.rewrite is not None else ""
    out.say(f"bisect: pass {culprit.name} (position {culprit.index}{rewrite}) breaks the graph: {culprit.reason}")
    for line in culprit.before:
        out.say(f"  - {line}")
    for line in culprit.after:
        out.say(f"  + {line}")
    return dataclasses.asdict(culprit)


def _passes(graph: TrainingGraph, request: Request) -> list[Any]:
    """The passes that ``optimize`` runs, plugins included."""
    from ortgraph.manager import PassManager
    from ortgraph.manager.optimize import passes_of

    passes = passes_of(
        request.pipeline, optimizer=request.optimizer, target=request.target, memory_budget=request.budget,
        shapes=request.sizes or None, precision=request.precision, precision_overrides=request.overrides,
    )  # fmt: skip
    return PassManager(passes, passes_after=request.passes_after).sequence(graph.stage)


def show(out: Output, result: Any, request: Request, time_passes: bool) -> None:
    """Tables of what the pipeline did."""
    from ortgraph.report import tables

    report = result.report
    columns = tables.PASS_COLUMNS + (("ms", "verify ms") if time_passes else ())
    records = report.passes if time_passes else [r for r in report.passes if r.modified or r.refusals]
    out.table(f"Passes of {request.pipeline}", columns, tables.pass_rows(records, time_passes), right=(4, 5, 6))
    changes = tables.operator_change_rows(report.operators_before, report.operators_after)
    out.table("Operators", ("operator", "before", "after", "change"), changes, right=(1, 2, 3))
    if request.explain is not None:
        _explain(out, explained(request.explain, report.passes))
    if any(r.name == "select-recompute" and r.refusals for r in report.passes):
        out.say(
            "memory budget: dimensions are symbolic, so the session meets it for each batch shape; --shapes binds them"
        )
    out.say(f"{report.nodes_before} → {report.nodes_after} nodes in {report.seconds:.2f} s")


def explained(name: str, records: Sequence[Any]) -> dict[str, Any]:
    """What a pass did and left alone, over all its runs in the pipeline."""
    from ortgraph.report import tables

    mine = [r for r in records if r.name == name]
    rows = [{"times": r[1], "reason": r[2], "node": r[3]} for r in tables.refusal_rows(mine)]
    found: dict[str, Any] = {"pass": name, "runs": len(mine), "counts": tables.summed_counts(mine), "refusals": rows}
    if name in BESIDE:
        found["beside"] = explained(BESIDE[name], records)
    return found


def _explain(out: Output, found: Mapping[str, Any]) -> None:
    from ortgraph.report import tables

    name = found["pass"]
    if not found["runs"]:
        out.say(f"{name}: not in this pipeline")
        return
    done = tables.counts_text(found["counts"]) or "nothing to change"
    runs = "once" if found["runs"] == 1 else f"{found['runs']} times"
    out.say(f"{name}, {runs} in this pipeline: {done}")
    rows = [(r["times"], r["reason"], r["node"]) for r in found["refusals"]]
    if rows:
        out.table(f"What {name} left alone or chose, and why", ("times", "reason", "first node"), rows, right=(0,))
    if found.get("beside", {}).get("runs"):
        _explain(out, found["beside"])
