"""``ortgraph optimize``: rewrite a training graph, verify it, write it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ortgraph.cli import options
from ortgraph.cli.optional_values import EVERY
from ortgraph.cli.output import FAILED, Output, verb
from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph, load

LEVELS = ("off", "structure", "signature", "types", "runtime", "numerics")


@dataclasses.dataclass(frozen=True)
class Request:
    """What the options asked for, parsed and checked before any work."""

    pipeline: str
    optimizer: Any
    target: str
    sizes: dict[str, int]
    verify: str
    explain: str | None
    print_after: str | None
    reproducer: pathlib.Path | None
    bisect: bool
    passes_after: dict[str, list[Any]]


@verb
def run(
    path: Annotated[
        pathlib.Path, typer.Argument(metavar="IN", help="A training graph (.onnx), or a folder of on-device artifacts.")
    ],
    output: Annotated[
        pathlib.Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="Where to write; a folder when IN is one."),
    ] = None,
    level: int = options.LEVEL,
    pipeline: Annotated[
        str | None,
        typer.Option("-p", "--pipeline", metavar="PIPELINE", help="Passes instead of a preset: 'a,b{option=value}'."),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", metavar="NAME", help="Attach an optimizer: adamw or 'adamw{lr=1e-3}'.")
    ] = None,
    target: Annotated[
        str, typer.Option("--target", help="onnxruntime-training or onnxruntime.")
    ] = "onnxruntime-training",
    shapes: Annotated[
        str | None, typer.Option("--shapes", metavar="SIZES", help="Bind dimensions: batch=8,sequence=128.")
    ] = None,
    verify: Annotated[
        str, typer.Option("--verify", metavar="LEVEL", help=f"One of {', '.join(LEVELS)}.")
    ] = "signature",
    report: Annotated[
        pathlib.Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML report.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="PASS", help="Say what this pass did and why it refused.")
    ] = None,
    print_after: Annotated[
        str | None,
        typer.Option("--print-after", metavar="[=PASS]", help="Print the graph after each pass, or after =PASS."),
    ] = None,
    time_passes: Annotated[bool, typer.Option("--time-passes", help="Show the time of each pass.")] = False,
    reproducer: Annotated[
        pathlib.Path | None,
        typer.Option("--reproducer", metavar="DIR", help="When a pass fails, save the graph before it here."),
    ] = None,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Find the pass and the nodes that break loss or gradients.")
    ] = False,
    plugin: Annotated[
        list[pathlib.Path], typer.Option("--plugin", metavar="FILE", help="Load and insert passes of a Python file.")
    ] = [],  # noqa: B006
    force: bool = options.FORCE,
    as_json: bool = options.JSON,
) -> None:
    """Rewrite a training graph and write it. Nothing is written when a check fails."""
    out = Output(as_json)
    request = _request(
        level, pipeline, optimizer, target, shapes, verify, explain, print_after, reproducer, bisect, plugin
    )
    if output is None and not bisect:
        raise InputError("no output is named", "-o OUT.onnx")
    if report is not None:
        options.check_output(report, [path], suffix=".html", force=force)
    if path.is_dir():
        from ortgraph.cli import artifact_folder

        artifact_folder.optimize(out, path, output, request, report, time_passes, force)
        return
    graph = load(path)
    stage = graph.stage  # a file without signature is refused here
    if output is not None:
        options.check_output(output, [path, path.with_suffix(".safetensors")], suffix=".onnx", force=force)
    options.named_sizes(graph, request.sizes)
    if request.bisect:
        find_culprit(out, graph, request)
        if output is None:
            return
    result, verified = apply(out, graph, request)
    assert output is not None
    options.save_graph(result.graph, output)
    show(out, result, request, time_passes)
    if report is not None:
        _write_report(report, path, result, verified)
    out.say(
        f"wrote {output} and {output.with_suffix('.safetensors').name} (stage {stage} → {result.graph.stage}, verified: {verified})"
    )
    out.result({**result.report.to_dict(), "verified": verified, "output": str(output), "stage": result.graph.stage})


def _request(
    level: int, pipeline: str | None, optimizer: str | None, target: str, shapes: str | None, verify: str,
    explain: str | None, print_after: str | None, reproducer: pathlib.Path | None, bisect: bool, plugin: Sequence[pathlib.Path],
) -> Request:  # fmt: skip
    from ortgraph.manager import parse_pipeline, registry

    if verify not in LEVELS:
        raise InputError(f"--verify: unknown level {verify!r}", f"one of {', '.join(LEVELS)}")
    inserted: dict[str, list[Any]] = {}
    for path in plugin:
        for cls in registry.load_plugin(path):
            after = getattr(cls, "after", None)
            if after is not None and (pipeline is None or cls.name not in pipeline):
                inserted.setdefault(after, []).append(cls())
    named = options.pipeline_of(level, pipeline)
    if pipeline is not None:
        parse_pipeline(pipeline)
        if optimizer is not None:
            raise InputError("--optimizer goes with a preset", "put attach-optimizer{...} into -p")
    for name in (explain, print_after):
        if name not in (None, EVERY):
            registry.get(name)  # type: ignore[arg-type]
    return Request(
        named, options.parse_optimizer(optimizer), target, options.parse_sizes(shapes), verify, explain, print_after,
        reproducer, bisect, inserted,
    )  # fmt: skip


def apply(out: Output, graph: TrainingGraph, request: Request) -> tuple[Any, str]:
    """Run the pipeline and the asked verification; returns the OptimizeResult and the level that holds."""
    from ortgraph.cli.instruments import PrintAfter
    from ortgraph.manager.instruments import Instrument, Progress, Reproducer
    from ortgraph.manager.numerics import example_batch, require_equal
    from ortgraph.manager.optimize import optimize

    with out.progress("optimizing") as tell:
        instruments: list[Instrument] = [Progress(tell)]
        if request.print_after is not None:
            only = None if request.print_after == EVERY else request.print_after
            instruments.append(PrintAfter(out, only))
        if request.reproducer is not None:
            instruments.append(Reproducer(request.reproducer))
        result = optimize(
            graph, request.pipeline, optimizer=request.optimizer, target=request.target, shapes=request.sizes or None,
            passes_after=request.passes_after, verify="runtime" if request.verify == "numerics" else request.verify,
            instruments=instruments,
        )  # fmt: skip
    if request.verify == "numerics":
        with out.progress("comparing loss and gradients"):
            require_equal(graph, result.graph, example_batch(graph, request.sizes), request.pipeline)
    return result, request.verify


def find_culprit(out: Output, graph: TrainingGraph, request: Request) -> None:
    """Bisect the pipeline; a culprit is shown and ends the program with exit code 1."""
    from ortgraph.manager import parse_pipeline, registry
    from ortgraph.manager.bisect import bisect
    from ortgraph.manager.numerics import example_batch

    if request.pipeline in registry.preset_names():
        passes = registry.preset(
            request.pipeline,
            optimizer=request.optimizer,
            target=request.target,
            shapes=request.sizes,
            accumulation_steps=1,
        )
    else:
        passes = parse_pipeline(request.pipeline)
    extra = [p for group in request.passes_after.values() for p in group]
    with out.progress("bisecting", total=len(passes) + len(extra)) as tell:
        culprit = bisect(
            graph, [*extra, *passes], example_batch(graph, request.sizes), tell=lambda name: tell(name, advance=1)
        )
    if culprit is None:
        out.say("bisect: every pass keeps loss and gradients")
        out.result({"culprit": None})
        return
    rewrite = f", rewrite number {culprit.rewrite}" if culprit.rewrite is not None else ""
    out.say(f"bisect: pass {culprit.name} (position {culprit.index}{rewrite}) breaks the graph: {culprit.reason}")
    for line in culprit.before:
        out.say(f"  - {line}")
    for line in culprit.after:
        out.say(f"  + {line}")
    out.result({"culprit": dataclasses.asdict(culprit)})
    raise typer.Exit(FAILED)


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
        _explain(out, request.explain, report.passes)
    out.say(f"{report.nodes_before} → {report.nodes_after} nodes in {report.seconds:.2f} s")


def _explain(out: Output, name: str, records: Sequence[Any]) -> None:
    from ortgraph.report import tables

    mine = [r for r in records if r.name == name]
    if not mine:
        out.say(f"{name}: not in this pipeline")
        return
    done = ", ".join(filter(None, (tables.counts_text(r.counts) for r in mine))) or "nothing to change"
    out.say(f"{name} ran {len(mine)} times: {done}")
    rows = [r[1:] for r in tables.refusal_rows(mine)]
    if rows:
        out.table(f"What {name} left alone, and why", ("times", "reason", "first node"), rows, right=(0,))


def _write_report(path: pathlib.Path, source: pathlib.Path, result: Any, verified: str) -> None:
    from ortgraph.report.optimization import optimization_page

    options.write_text(path, optimization_page(str(source), result.graph, result.report, verified))
