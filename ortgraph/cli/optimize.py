"""``ortgraph optimize``: rewrite a training graph, verify it, write it."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from ortgraph.cli import options
from ortgraph.cli.optimize_run import LEVELS, Request, apply, explained, find_culprit, make_request, show
from ortgraph.cli.output import FAILED, Output, verb
from ortgraph.errors import InputError

_IN = typer.Argument(metavar="IN", help="A training graph (.onnx), or a folder of on-device artifacts.")
_OUT = typer.Option("-o", "--output", metavar="OUT", help="Where to write; a folder when IN is one.")
_PIPELINE = typer.Option("-p", "--pipeline", metavar="PIPELINE", help="Passes, not a preset: 'a,b{option=value}'.")
_OPTIMIZER = typer.Option(
    "--optimizer", metavar="NAME", help="Attach an optimizer: adamw, lamb, sgd or 'adamw{lr=1e-3}'."
)
_TARGET = typer.Option("--target", help="onnxruntime-training or onnxruntime; with :cuda and so on for a device.")
_BUDGET = typer.Option("--memory-budget", metavar="BUDGET", help="60% of what the given order needs, or bytes: 30MB.")
_VERIFY = typer.Option("--verify", metavar="LEVEL", help=f"One of {', '.join(LEVELS)}.")
_REPORT = typer.Option("--report", metavar="FILE", help="Write an HTML report.")
_EXPLAIN = typer.Option("--explain", metavar="PASS", help="Say what this pass did and why it refused.")
_PRINT = typer.Option("--print-after", metavar="[=PASS]", help="Print the graph after each pass, or after =PASS.")
_TIME = typer.Option("--time-passes", help="Show the time of each pass.")
_REPRODUCER = typer.Option("--reproducer", metavar="DIR", help="When a pass fails, save the graph before it here.")
_BISECT = typer.Option("--bisect", help="Find the pass and the nodes that break loss or gradients.")
_PLUGIN = typer.Option("--plugin", metavar="FILE", help="Load the passes of a Python file; may be repeated.")


@verb
def run(
    path: Annotated[pathlib.Path, _IN],
    output: Annotated[pathlib.Path | None, _OUT] = None,
    level: int = options.LEVEL,
    pipeline: Annotated[str | None, _PIPELINE] = None,
    optimizer: Annotated[str | None, _OPTIMIZER] = None,
    target: Annotated[str, _TARGET] = "onnxruntime-training",
    precision: str = options.PRECISION,
    precision_overrides: str | None = options.OVERRIDES,
    memory_budget: Annotated[str | None, _BUDGET] = None,
    shapes: Annotated[str | None, options.SHAPES] = None,
    batch: Annotated[pathlib.Path | None, options.BATCH] = None,
    verify: Annotated[str, _VERIFY] = "signature",
    report: Annotated[pathlib.Path | None, _REPORT] = None,
    explain: Annotated[str | None, _EXPLAIN] = None,
    print_after: Annotated[str | None, _PRINT] = None,
    time_passes: Annotated[bool, _TIME] = False,
    reproducer: Annotated[pathlib.Path | None, _REPRODUCER] = None,
    bisect: Annotated[bool, _BISECT] = False,
    plugin: Annotated[list[pathlib.Path], _PLUGIN] = [],  # noqa: B006
    force: bool = options.FORCE,
    as_json: bool = options.JSON,
) -> None:
    """Rewrite a training graph and write it. Nothing is written when a check fails."""
    out = Output(as_json)
    request = make_request(
        level=level, pipeline=pipeline, optimizer=optimizer, target=target, budget=memory_budget,
        precision=precision, overrides=precision_overrides,
        shapes=shapes, batch=batch, verify=verify,
        explain=explain, print_after=print_after, reproducer=reproducer, plugins=plugin,
    )  # fmt: skip
    if output is None and not bisect:
        raise InputError("no output is named", "-o OUT.onnx")
    if report is not None:
        options.check_output(report, [path], suffix=".html", force=force)
    if path.is_dir():
        result = _folder(out, path, output, request)
    else:
        result = _file(out, path, output, request, bisect, force)
    assert output is not None
    if report is not None:
        options.write_text(report, _page(path, result, request.verify))
    show(out, result, request, time_passes)
    out.say(f"wrote {output}, stage {result.graph.stage}, verified: {request.verify}")
    data = {**result.report.to_dict(), "verified": request.verify, "output": str(output), "stage": result.graph.stage}
    if request.explain is not None:
        data["explain"] = explained(request.explain, result.report.passes)
    out.result(data)


def _file(
    out: Output, path: pathlib.Path, output: pathlib.Path | None, request: Request, bisect: bool, force: bool
) -> Any:
    graph = options.read_graph(out, path)
    _ = graph.stage  # a file without signature is refused here
    if output is not None:
        options.check_output(output, [path, path.with_suffix(".safetensors")], suffix=".onnx", force=force)
    options.named_sizes(graph, request.sizes)
    if bisect:
        culprit = find_culprit(out, graph, request)
        if culprit is not None or output is None:
            out.result({"culprit": culprit})
            raise typer.Exit(FAILED if culprit is not None else 0)
    result = apply(out, graph, request)
    assert output is not None
    options.save_graph(result.graph, output)
    return result


def _folder(out: Output, source: pathlib.Path, output: pathlib.Path | None, request: Request) -> Any:
    from ortgraph.cli import artifact_folder

    if output is None:
        raise InputError("--bisect takes a graph, not a folder", "bisect a training graph")
    return artifact_folder.optimize(out, source, output, request)


def _page(source: pathlib.Path, result: Any, verified: str) -> str:
    from ortgraph.report.optimization import optimization_page

    return optimization_page(str(source), result.graph, result.report, verified)
