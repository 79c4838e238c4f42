"""``ortgraph plan``: what a training step needs, what it could need, and at what price."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from ortgraph.cli import options
from ortgraph.cli.output import Output, verb
from ortgraph.cli.plan_run import make_request, make_views, page, result_of, show, write_planned

_IN = typer.Argument(metavar="IN", help="A training graph (.onnx) of any stage.")
_OUT = typer.Option("-o", "--output", metavar="OUT", help="Write the planned graph.")
_BUDGET = typer.Option("--memory-budget", metavar="BUDGET", help="60% of what the given order needs, or bytes: 30MB.")
_LEVEL = typer.Option("-O", metavar="LEVEL", help="Preset for a graph that is not lowered yet; -O2 if absent.")
_OPTIMIZER = typer.Option(
    "--optimizer", metavar="NAME", help="Attach an optimizer: adamw, lamb, sgd or 'adamw{lr=1e-3}'."
)
_TARGET = typer.Option("--target", help="onnxruntime-training or onnxruntime; with :cuda and so on for a device.")
_PROGRAM = typer.Option("--program", metavar="NAME", help="step, gradients, ...; the one that trains if absent.")
_SECONDS = typer.Option("--seconds", metavar="S", help="Time for each search and for the bound; 5 if absent.")
_KEEP = typer.Option("--keep-order", help="First evaluations keep the given order.")
_BOUND = typer.Option("--bound", help="Also compute the bound on every order without recomputation.")
_SWEEP = typer.Option("--sweep", help="Plan for budgets from all the memory down to the floor.")
_POINTS = typer.Option("--points", metavar="N", help="Number of budgets of --sweep; 12 if absent.")
_MAX = typer.Option("--max-batch", help="Find the largest batch that fits into --memory.")
_MEMORY = typer.Option("--memory", metavar="BYTES", help="Memory of a whole step, for --max-batch: 4GB.")
_DIM = typer.Option("--dim", metavar="NAME", help="Dimension that --max-batch grows; batch if absent.")
_OVERHEAD = typer.Option("--overhead", metavar="SHARE", help="Largest predicted overhead for --max-batch: 10%.")
_MEASURE = typer.Option("--measure", help="Run the step in fresh processes and measure its memory and time.")
_REPORT = typer.Option("--report", metavar="FILE", help="Write an HTML report with pictures.")


@verb
def run(
    path: Annotated[pathlib.Path, _IN],
    output: Annotated[pathlib.Path | None, _OUT] = None,
    memory_budget: Annotated[str | None, _BUDGET] = None,
    level: Annotated[int | None, _LEVEL] = None,
    optimizer: Annotated[str | None, _OPTIMIZER] = None,
    target: Annotated[str, _TARGET] = "onnxruntime-training",
    shapes: Annotated[str | None, options.SHAPES] = None,
    program: Annotated[str | None, _PROGRAM] = None,
    seconds: Annotated[float, _SECONDS] = 5.0,
    keep_order: Annotated[bool, _KEEP] = False,
    bound: Annotated[bool, _BOUND] = False,
    sweep: Annotated[bool, _SWEEP] = False,
    points: Annotated[int | None, _POINTS] = None,
    max_batch: Annotated[bool, _MAX] = False,
    memory: Annotated[str | None, _MEMORY] = None,
    dim: Annotated[str | None, _DIM] = None,
    overhead: Annotated[str | None, _OVERHEAD] = None,
    measure: Annotated[bool, _MEASURE] = False,
    threads: Annotated[int | None, options.THREADS] = None,
    report: Annotated[pathlib.Path | None, _REPORT] = None,
    force: bool = options.FORCE,
    as_json: bool = options.JSON,
) -> None:
    """Show the memory of a training step in its order and under a budget: peak, arena, bounds, predicted time."""
    out = Output(as_json)
    request = make_request(
        budget=memory_budget, level=level, optimizer=optimizer, target=target, shapes=shapes, program=program, seconds=seconds,
        reorder=not keep_order, bound=bound, sweep=sweep, points=points, max_batch=max_batch, memory=memory, dim=dim,
        overhead=overhead, measure=measure, threads=threads,
    )  # fmt: skip
    graph = options.read_graph(out, path)
    _ = graph.stage  # a file without signature is refused here
    inputs = [path, path.with_suffix(".safetensors")]
    if output is not None:
        options.check_output(output, inputs, suffix=".onnx", force=force)
    if report is not None:
        options.check_output(report, inputs, suffix=".html", force=force)
    options.named_sizes(graph, request.sizes)
    views = make_views(out, graph, request)
    show(out, path, views)
    data = result_of(path, views)
    if output is not None:
        stage = write_planned(out, views, output)
        data |= {"output": str(output), "stage": stage}
        out.say(f"wrote {output}, stage {stage}")
    if report is not None:
        options.write_text(report, page(path, views))
        out.say(f"wrote {report}")
    out.result(data)
